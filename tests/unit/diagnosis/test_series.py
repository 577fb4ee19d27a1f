"""What only several lines show: a loss that jumps, a run that does not train, a dump of stacks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.training.diagnosis.recognise import Finding
from perdure.training.diagnosis.rules import Role
from perdure.training.diagnosis.series import find_jump, find_stacks, find_stall, find_wait
from perdure.training.recovery.faults import FaultClass, RecoverableBy
from tests.values import not_none

YEAR = 2026
STARTED_S = datetime(2026, 8, 1, 10, tzinfo=UTC).timestamp()
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


def stamped(at_s: float, text: str) -> str:
    return f"{datetime.fromtimestamp(STARTED_S + at_s, UTC):%Y-%m-%d %H:%M:%S} {text}\n"


def log(losses: Sequence[float], norms: Sequence[float] = ()) -> str:
    tails = [f" | grad norm: {norm}" for norm in norms] or [""] * len(losses)
    return "".join(
        stamped(10 * step, f"iteration {step}/ 1000 | lm loss: {loss:.4E}{tail} |")
        for step, (loss, tail) in enumerate(zip(losses, tails, strict=True))
    )


def jump(text: str) -> Finding:
    return not_none(find_jump(text, year=YEAR))


def test_a_loss_that_jumps_and_stays_up_is_a_fault_for_the_user():
    finding = jump(log([2.0] * 20 + [6.0] * 10))
    assert (finding.fault_class, finding.role) == (FaultClass.NUMERIC_ANOMALY, Role.ROOT)
    assert finding.recoverable_by is RecoverableBy.USER_FIX
    assert "iteration 20/" in finding.line
    assert "from about 2 to 6 and did not come back" in finding.why


def test_a_jump_that_recovers_can_be_answered_by_a_retry():
    finding = jump(log([2.0] * 20 + [6.0] * 4 + [2.1] * 10))
    assert finding.recoverable_by is RecoverableBy.RETRY
    assert "iteration 20/" in finding.line


def test_a_jump_that_comes_down_steadily_can_be_answered_by_a_retry():
    finding = jump(log([2.0] * 20 + [6.0, 7.0, 6.5, 6.0, 5.6]))
    assert finding.recoverable_by is RecoverableBy.RETRY
    finding = jump(log([2.0] * 20 + [6.0, 7.0, 6.5, 6.9, 5.6]))
    assert finding.recoverable_by is RecoverableBy.USER_FIX


def test_a_norm_of_zero_was_not_computed():
    assert find_jump(log([2.0] * 20 + [6.0] * 10, [0.0] * 30), year=YEAR) is not None


def test_a_jump_has_the_time_and_the_place_of_its_line():
    text = log([2.0] * 20 + [6.0] * 10)
    finding = jump(text)
    assert finding.seen_s == STARTED_S + 200
    assert text[finding.offset :].startswith(finding.line)


@pytest.mark.parametrize(
    "losses",
    [
        pytest.param([], id="no-steps"),
        pytest.param([2.0, 2.0, 9.0, 9.0, 9.0, 9.0], id="too-little-before"),
        pytest.param([2.0, 2.2, 1.9, 2.1] * 10, id="noise"),
        pytest.param([11.0, 9.0, 7.5, 6.0, 5.0, 4.0, 3.5, 3.2], id="falling-at-the-start"),
        pytest.param([2.0 + 0.05 * step for step in range(60)], id="slow-rise"),
        pytest.param([2.0] * 20 + [9.0] + [2.0] * 20, id="one-step-alone"),
        pytest.param([2.0] * 20 + [9.0], id="last-step-alone"),
        pytest.param([0.01] * 20 + [0.2] * 10, id="small-numbers"),
        pytest.param([0.0] * 20 + [0.9] * 10, id="zeros"),
        pytest.param([2.0] * 20 + [float("nan")] * 10, id="not-a-number"),
    ],
)
def test_an_ordinary_loss_does_not_jump(losses):
    assert find_jump(log(losses), year=YEAR) is None


LEFT_ITS_COURSE = [2.0] * 20 + [6.0] * 10


@pytest.mark.parametrize(
    ("losses", "norms", "step"),
    [
        (LEFT_ITS_COURSE, [0.9] * 20 + [45.0] * 10, 20),
        (LEFT_ITS_COURSE, [0.9, 0.8] * 9 + [0.9] * 12, 20),
        ([2.0] * 20 + [2.2, 2.4, 2.9, 4.0], [0.9, 0.8] * 12, 23),
    ],
    ids=["confirmed", "the norm of a skipped step", "climbs step by step whatever its norm"],
)
def test_a_norm_that_is_printed_must_confirm_the_jump(losses, norms, step):
    assert find_jump(log(LEFT_ITS_COURSE, [0.9, 0.8] * 15), year=YEAR) is None
    assert f"iteration {step}/" in jump(log(losses, norms)).line


def test_a_norm_confirms_a_jump_of_one_step():
    losses = [2.0] * 20 + [6.0] + [2.0] * 5
    finding = jump(log(losses, [0.9] * 20 + [float("inf")] + [0.9] * 5))
    assert finding.recoverable_by is RecoverableBy.RETRY


@pytest.mark.parametrize(
    "line",
    ["{{'loss': {:.2f}, 'grad_norm': 0.5}}", "step 3 train_loss={:.3f} lr=0.1", "Loss: {:e}"],
)
def test_losses_are_read_in_each_trainers_format(line):
    text = "\n".join(line.format(loss) for loss in [2.0] * 20 + [6.0] * 10)
    text = text.replace("'grad_norm': 0.5", "'x': 1")
    assert jump(text).line == text.splitlines()[20]


def test_a_loss_scale_is_no_loss():
    lines = [f"step {n} loss scale: {scale}" for n, scale in enumerate([2.0] * 20 + [65536.0] * 9)]
    assert find_jump("\n".join(lines), year=YEAR) is None


@pytest.mark.parametrize(
    "last",
    ["Using /root/.cache/torch_extensions/py310_cu118 as PyTorch extensions root...",
     "All distributed processes registered. Starting with 8 processes"],
)  # fmt: skip
def test_a_log_that_ends_where_it_waits_hangs(last):
    finding = not_none(find_wait(f"loading\n{last}\n-----\n\n", year=YEAR))
    assert (finding.fault_class, finding.line) == (FaultClass.HANG, last)
    assert find_wait(f"{last}\nloaded\n", year=YEAR) is None


def steps(count: int = 5, *, every_s: float = 10, more: str = "") -> str:
    return "".join(
        stamped(every_s * n, f"iteration {n}/ 1000 | lm loss: 2.0 |{more}") for n in range(count)
    )


def test_a_run_that_prints_for_half_an_hour_without_a_step_stalls():
    text = steps() + "".join(stamped(60 * n, "heartbeat sent") for n in range(1, 41))
    finding = not_none(find_stall(text, year=YEAR))
    assert (finding.fault_class, finding.role) == (FaultClass.HANG, Role.SYMPTOM)
    assert finding.seen_s == STARTED_S + 2400
    assert finding.line.endswith("heartbeat sent")
    assert text[finding.offset :].startswith(finding.line)
    assert "2360 s" in finding.why


@pytest.mark.parametrize(
    "after",
    [
        pytest.param("", id="just-ends"),
        pytest.param("saving\nno time here\n", id="no-times"),
        pytest.param(stamped(1000, "saving a checkpoint"), id="too-short"),
        pytest.param(
            stamped(7000, "validation") + stamped(7010, "iteration 5/ 1000 | lm loss: 2 |"),
            id="steps-follow",
        ),
    ],
)
def test_a_log_that_ends_or_goes_on_training_does_not_stall(after):
    assert find_stall(steps() + after, year=YEAR) is None


def test_a_run_that_never_made_a_step_does_not_stall():
    text = stamped(0, "loading") + stamped(9000, "still loading")
    assert find_stall(text, year=YEAR) is None


def test_long_steps_are_given_ten_steps_of_time():
    slow = steps(every_s=600, more=" elapsed time per iteration (ms): 600000.0 |")
    waiting = stamped(2400 + 4000, "waiting")
    assert find_stall(slow + waiting, year=YEAR) is None
    assert find_stall(slow + waiting + stamped(2400 + 6100, "waiting"), year=YEAR) is not None


@pytest.mark.parametrize("number", ["812.4.", "...", "1.2.3", "", "9" * 400])
def test_a_garbled_step_time_is_no_obstacle(number):
    text = steps(more=f" elapsed time per iteration (s): {number}") + stamped(9000, "waiting")
    find_stall(text, year=YEAR)


@given(st.lists(st.sampled_from(["loss: 2", "loss: 9", "loss: nan", "loss: -inf", "x", "12:00:00",
                                 "iteration 3/ 4", "2026-08-01 10:00:00 a",
                                 "grad norm: nan loss: 7"])))  # fmt: skip
def test_any_lines_can_be_read(lines):
    find_jump("\n".join(lines), year=YEAR)
    find_stall("\n".join(lines), year=YEAR)
    find_wait("\n".join(lines), year=YEAR)


def frame(text: str) -> str | None:
    finding = find_stacks(text, year=2026)
    return None if finding is None else finding.line.strip()


def test_py_spy_shows_where_the_main_thread_is_outside_the_standard_library():
    finding = not_none(find_stacks(PY_SPY, year=2026))
    assert (finding.fault_class, finding.role) == (FaultClass.HANG, Role.SYMPTOM)
    assert finding.line == "    barrier (torch/distributed/distributed_c10d.py:3683)"
    assert PY_SPY[finding.offset :].startswith(finding.line)


NATIVE = (
    'Thread 4711 (idle): "MainThread"\n'
    "    pthread_cond_timedwait@@GLIBC_2.3.2 (libpthread-2.27.so)\n"
    "    synchronize (torch/npu/streams.py:12)\n"
    "        Arguments:\n            self: <Stream at 0x7f>\n"
    "    train (train.py:306)\n"
    'Thread 4800 (idle): "other"\n    emit (logger.py:12)\n'
)
LIBRARY = 'Thread 1 (idle): "MainThread"\n    wait (threading.py:320)\n    get (queue.py:171)\n'
NO_MAIN = "Thread 0x7F (active+gil)\n    f (a.py:1)\nThread 0x8F (idle)\n    g (b.py:2)\n"
MODULE = 'Current thread 0x00007f (most recent call first):\n  File "/w/a.py", line 3 in <module>\n'


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (FAULTHANDLER,
         'File "/lib/torch/distributed/distributed_c10d.py", line 2810 in all_reduce'),
        (NATIVE, "synchronize (torch/npu/streams.py:12)"),
        (LIBRARY, "wait (threading.py:320)"),
        (NO_MAIN, "f (a.py:1)"),
        (MODULE, 'File "/w/a.py", line 3 in <module>'),
    ],
    ids=["faulthandler: the current thread", "native frames and variables are passed over",
         "the innermost frame within the standard library", "the first of no main thread",
         "the module alone"],
)  # fmt: skip
def test_a_dump_shows_where_its_main_thread_is(text, line):
    assert frame(text) == line


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
