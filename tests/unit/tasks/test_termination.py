"""How SIGTERM ends the process of a supervisor: whose handler answers, and within which time."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from perdure.tasks.termination import EXIT_BY_PLATFORM, TerminationSignals, limit_of
from perdure.training.supervisor.termination import Termination

HANGS = """
import os, signal, time
from perdure.tasks.termination import ended_in_time
signal.signal(signal.SIGTERM, lambda *_: time.sleep(600))  # as a client that tries again and again
with ended_in_time(0.1):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)
"""
GOES_ON = """
import os, signal
from perdure.tasks import termination
from perdure.training.supervisor.termination import Termination
signal.signal(signal.SIGTERM, lambda *_: None)
signals = termination.TerminationSignals(Termination(), -termination.limit_of(0) + 0.1)
signals.install()
signals.disarm()
os.kill(os.getpid(), signal.SIGTERM)
import time
time.sleep(1)
print("has cancelled the run")
"""


def ended(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False
    )


def test_a_handler_that_never_returns_ends_with_the_limit_and_a_line():
    done = ended(HANGS)
    assert done.returncode == EXIT_BY_PLATFORM == 143
    assert done.stderr == "perdure: ended by the platform (SIGTERM); start it again to go on\n"


def test_a_cancellation_takes_the_time_that_it_needs():
    done = ended(GOES_ON)
    assert (done.returncode, done.stdout) == (0, "has cancelled the run\n")


@pytest.fixture
def signals():
    """Signals whose former handler counts; the limit is far away."""
    calls: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, _frame: calls.append(number))
    termination = Termination()
    installed = TerminationSignals(termination, 10_000)
    installed.install()
    yield termination, calls
    installed.restore()
    signal.signal(signal.SIGTERM, former)


def test_outside_of_an_attempt_the_first_signal_is_prefects(signals):
    termination, calls = signals
    for _ in range(3):
        signal.raise_signal(signal.SIGTERM)
    assert calls == [signal.SIGTERM], "a second one must not cut the end short"
    assert termination.is_wanted


def test_in_an_attempt_the_watch_answers(signals):
    termination, calls = signals
    with termination.deferred():
        signal.raise_signal(signal.SIGTERM)
    assert calls == []
    assert termination.is_wanted
    assert not termination.is_alone()


def test_the_end_fits_into_what_slurm_leaves():
    assert limit_of(grace_s=20) < 30
