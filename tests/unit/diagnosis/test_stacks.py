"""Dumps of processes that live but do not move."""

from __future__ import annotations

import pytest

from training.diagnosis.rules import Role
from training.diagnosis.series import find_stacks
from training.recovery.faults import FaultClass

PY_SPY = """\
Process 4711: python train.py
Python v3.11.4 (/usr/bin/python3.11)

Thread 4800 (idle): "pin_memory"
    select (selectors.py:415)
    run (torch/utils/data/pin_memory.py:9)
Thread 4711 (idle): "MainThread"
    wait (threading.py:320)
    get (queue.py:171)
    barrier (torch/distributed/distributed_c10d.py:3683)
    train (train.py:306)
    <module> (train.py:400)
Thread 4801 (active): "logger"
    emit (logger.py:12)
"""

FAULTHANDLER = """\
Timeout (0:10:00)!
Thread 0x00007f5cf2ffd640 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/w/logger.py", line 12 in run

Current thread 0x00007f5e1f2b1740 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/lib/torch/distributed/distributed_c10d.py", line 2810 in all_reduce
  File "/w/train.py", line 306 in <module>
"""


def frame(text: str) -> str | None:
    found = find_stacks(text, year=2026)
    return None if found is None else found.line.strip()


def test_py_spy_shows_where_the_main_thread_stands_outside_the_standard_library():
    found = find_stacks(PY_SPY, year=2026)
    assert found is not None
    assert (found.fault_class, found.role) == (FaultClass.HANG, Role.SYMPTOM)
    assert found.line == "    barrier (torch/distributed/distributed_c10d.py:3683)"
    assert PY_SPY[found.offset :].startswith(found.line)


def test_faulthandler_shows_where_the_current_thread_stands():
    expected = 'File "/lib/torch/distributed/distributed_c10d.py", line 2810 in all_reduce'
    assert frame(FAULTHANDLER) == expected


def test_native_frames_and_variables_are_passed_over():
    text = (
        'Thread 4711 (idle): "MainThread"\n'
        "    pthread_cond_timedwait@@GLIBC_2.3.2 (libpthread-2.27.so)\n"
        "    synchronize (torch/npu/streams.py:12)\n"
        "        Arguments:\n            self: <Stream at 0x7f>\n"
        "    train (train.py:306)\n"
        'Thread 4800 (idle): "other"\n    emit (logger.py:12)\n'
    )
    assert frame(text) == "synchronize (torch/npu/streams.py:12)"


def test_a_stack_within_the_standard_library_shows_its_innermost_frame():
    text = 'Thread 1 (idle): "MainThread"\n    wait (threading.py:320)\n    get (queue.py:171)\n'
    assert frame(text) == "wait (threading.py:320)"


def test_without_a_main_thread_the_first_one_is_taken():
    text = "Thread 0x7F (active+gil)\n    f (a.py:1)\nThread 0x8F (idle)\n    g (b.py:2)\n"
    assert frame(text) == "f (a.py:1)"


def test_a_stack_of_the_module_alone_is_a_stack():
    text = (
        'Current thread 0x00007f (most recent call first):\n  File "/w/a.py", line 3 in <module>\n'
    )
    assert frame(text) == 'File "/w/a.py", line 3 in <module>'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "step 12 loss 3.4\n",
        'Thread 1 (idle): "MainThread"\n',
        'Thread 1 (idle): "MainThread"\nstep 12 loss 3.4\n    f (a.py:1)\n',
        'Traceback (most recent call last):\n  File "a.py", line 3, in f\nTypeError: x\n',
        "Thread pool with 8 threads\n    wait (threading.py:320)\n",
    ],
)
def test_a_log_without_a_dump_has_no_stacks(text):
    assert find_stacks(text, year=2026) is None
