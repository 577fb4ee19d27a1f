"""Processes that live on after the exception that has ended their program, real ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from perdure.training.agent.evidence import dump_stacks
from perdure.training.agent.last_words import LastWordsCheck, has_left_program
from perdure.training.agent.workers import WorkerGroup
from perdure.training.diagnosis.ending import find_last_traceback
from tests.waiting import wait_for

WORDS = "ValueError: sample 3: expected 2048 tokens, got 0"
RAISE = "raise ValueError('sample 3: expected 2048 tokens, got 0')"
HANDLED = f"try:\n    {RAISE}\nexcept ValueError:\n    import traceback; traceback.print_exc()\n"
LINGERING = {
    "a hook at exit": f"import atexit, time; atexit.register(time.sleep, 9999)\n{RAISE}",
    "a hook of the program's": (
        f"import atexit, time\ndef upload():\n    print('uploading', flush=True)\n"
        f"    time.sleep(9999)\natexit.register(upload)\n{RAISE}"
    ),
    "a thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(9999,)).start()\n"
        f"{RAISE}"
    ),
    "a hook for exceptions": (
        "import sys, time\ndef hook(*raised):\n    sys.__excepthook__(*raised)\n"
        f"    time.sleep(9999)\nsys.excepthook = hook\n{RAISE}"
    ),
    "a child": (
        "import multiprocessing, time\ncontext = multiprocessing.get_context('fork')\n"
        f"context.Process(target=time.sleep, args=(9999,)).start()\n{RAISE}"
    ),
}
# The program waits inside itself for what has died.
HELPERS = {
    "a child": (
        "import multiprocessing, queue\ndef work():\n    " + RAISE + "\n"
        "multiprocessing.get_context('fork').Process(target=work).start()\nqueue.Queue().get()"
    ),
    "a thread": (
        "import threading, queue\ndef work():\n    " + RAISE + "\n"
        "threading.Thread(target=work).start()\nqueue.Queue().get()"
    ),
    "a thread of a pool of its own": (
        "import threading\nis_done = threading.Event()\ndef work():\n    " + RAISE + "\n"
        "thread = threading.Thread(target=work)\nthread.start()\nthread.join()\nis_done.wait()"
    ),
}
GOING_ON = {
    "it sleeps": f"{HANDLED}\nimport time; time.sleep(9999)",
    "it computes in a function": (
        f"{HANDLED}\ndef work():\n    while True:\n        sum(range(1000))\nwork()"
    ),
    "it waits for a thread": (
        f"{HANDLED}\nimport threading, time\nthread = threading.Thread(target=time.sleep, "
        "args=(9999,))\nthread.start()\nthread.join()"
    ),
}


def program(text: str) -> list[str]:
    return [sys.executable, "-u", "-c", f"print('step 1/9 loss 2.0')\n{text}"]


def run_to_end(group: WorkerGroup) -> None:
    """Poll a group as its agent does, until no process of it is left."""
    check = LastWordsCheck(exit_time_s=0.0, idle_time_s=0.0, period_s=0.0)

    def is_over() -> bool:
        check.check(group, shown_steps_limit_s=0.0)
        return group.poll()

    wait_for(is_over)


@pytest.mark.parametrize("text", LINGERING.values(), ids=LINGERING)
def test_a_process_that_lives_on_after_an_exception_ends_as_that_exception(new_group, text):
    group = new_group(*program(text), is_command=True)
    group.start(dict(os.environ), proc_start_cnt=1)
    run_to_end(group)
    (status,) = group.statuses()
    assert (status.exit_code, status.error) == (1, WORDS)
    assert not status.stopped_by_agent, "its end is a failure"


@pytest.mark.parametrize("text", HELPERS.values(), ids=HELPERS)
def test_a_process_that_waits_idle_for_what_an_exception_has_ended_ends_as_it(
    new_group, monkeypatch, text
):
    monkeypatch.setattr("perdure.training.agent.last_words.IDLE_LOOK_S", 0.1)
    group = new_group(*program(text), is_command=True)
    group.start(dict(os.environ), proc_start_cnt=1)
    run_to_end(group)
    (status,) = group.statuses()
    assert (status.exit_code, status.error) == (1, WORDS)


def test_silence_after_the_death_of_a_thread_proves_nothing_where_no_steps_are_shown(new_group):
    group = new_group(*program(HELPERS["a thread"]), is_command=True)
    group.start(dict(os.environ), proc_start_cnt=1)
    check = LastWordsCheck(exit_time_s=0.0, idle_time_s=0.0, period_s=0.0)
    log = group.output.path(group.ranks[0], "stderr")
    wait_for(lambda: log.exists() and WORDS in log.read_text())
    for _ in range(20):
        check.check(group, shown_steps_limit_s=None)
        time.sleep(0.02)
    assert not group.poll()


def test_silence_long_after_the_death_of_a_thread_that_training_has_outlived_proves_nothing(
    new_group, monkeypatch
):
    monkeypatch.setattr("perdure.training.agent.last_words.IDLE_LOOK_S", 0.1)
    outlived = "import time\ntime.sleep(1.5)\nprint('step 2/9 loss 1.0')\ntime.sleep(9999)"
    text = HELPERS["a thread"].replace("queue.Queue().get()", outlived)
    group = new_group(*program(text), is_command=True)
    group.start(dict(os.environ), proc_start_cnt=1)
    check = LastWordsCheck(exit_time_s=0.0, idle_time_s=2.5, period_s=0.0)
    logs = [group.output.path(group.ranks[0], stream) for stream in ("stderr", "stdout")]

    def shows(index: int, words: str) -> bool:
        check.check(group, shown_steps_limit_s=0.5)
        return logs[index].exists() and words in logs[index].read_text()

    wait_for(lambda: shows(0, WORDS))
    wait_for(lambda: shows(1, "step 2/9"))
    until_s = time.monotonic() + 4
    while time.monotonic() < until_s:
        check.check(group, shown_steps_limit_s=0.5)
        time.sleep(0.02)
    group.poll()
    (status,) = group.statuses()
    assert status.exit_code is None


def test_a_process_that_computes_after_the_death_of_its_thread_goes_on(new_group, monkeypatch):
    monkeypatch.setattr("perdure.training.agent.last_words.IDLE_LOOK_S", 0.1)
    text = HELPERS["a thread"].replace(
        "queue.Queue().get()", "import time\nuntil = time.time() + 3"
    )
    computing = f"{text}\nwhile time.time() < until:\n    sum(range(1000))"
    group = new_group(*program(computing), is_command=True)
    group.start(dict(os.environ), proc_start_cnt=1)
    run_to_end(group)
    (status,) = group.statuses()
    assert (status.exit_code, status.error) == (0, None)


def test_ranks_below_a_launcher_are_looked_at_too(new_group):
    script = f'{sys.executable} -u -c "$PROGRAM" & wait'
    group = new_group("bash", "-c", script.replace("$", "$$"), is_command=True)
    group.start({**os.environ, "PROGRAM": LINGERING["a hook at exit"]}, proc_start_cnt=1)
    run_to_end(group)
    (status,) = group.statuses()
    assert (status.exit_code, status.error) == (1, WORDS)


@pytest.mark.parametrize("text", GOING_ON.values(), ids=GOING_ON)
def test_a_program_that_prints_a_traceback_and_goes_on_is_healthy(tmp_path, text):
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(program(text), stdout=output, stderr=output)
    try:
        wait_for(lambda: find_last_traceback(log.read_text()) == WORDS)
        stacks = wait_for(lambda: dump_stacks(process.pid))
        assert not has_left_program(stacks, process.pid)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("module", ["runpy", "json.tool"])
def test_a_program_that_runs_as_a_module_is_inside_of_itself(module):
    stacks = (
        "Process 7: python -m tool\nPython v3.11.7 (python3.11)\n\nThread 7 (idle)\n"
        f"    read ({module}.py:3)\n    _run_code (<frozen runpy>:88)\n"
        '    _run_module_as_main (<frozen runpy>:198)\nThread 8 (idle): "loader"\n    f (x.py:1)\n'
    )
    assert not has_left_program(stacks, 7)


def test_a_process_that_a_thread_has_forked_is_inside_of_the_program():
    frames = "    fetch (loader.py:9)\n    _bootstrap (threading.py:1002)\n"
    stacks = f'Thread 7 (active): "Thread-1"\n{frames}'
    assert not has_left_program(stacks, 7)


def test_stacks_that_cannot_be_read_prove_nothing():
    assert not has_left_program(None, 7)
    assert not has_left_program('Thread 8 (idle): "loader"\n    f (x.py:1)\n', 7)


TRACEBACK = f'Traceback (most recent call last):\n  File "x.py", line 3, in f\n{WORDS}\n'


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (TRACEBACK, WORDS),
        (f"step 2/9 loss 1.9\n{TRACEBACK}wandb: uploading\n" + "wandb: waiting\n" * 50, WORDS),
        ("".join(f"[rank1]: {part}\n" for part in TRACEBACK.splitlines()), WORDS),
        (f"step 2/9 loss 2\n{TRACEBACK}step 3/9 loss 2\nstep 4/9 loss 2\nstep 5/9 loss 2\n", None),
        (f"Exception in thread Thread-1:\n{TRACEBACK}", None),
        (f"Exception ignored in: <function f>\n{TRACEBACK}", None),
        ("step 3/9 loss 1.8\n", None),
    ],
)
def test_last_words_are_a_traceback_that_no_step_follows(text, line):
    assert find_last_traceback(text) == line
