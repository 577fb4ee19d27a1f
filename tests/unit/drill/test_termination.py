"""A driver that is terminated."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from perdure.training.drill.termination import raise_on_termination

# The tests themselves may run under nohup, whose ignored SIGHUP is inherited.
PROGRAM = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from perdure.training.drill.termination import raise_on_termination
with raise_on_termination():
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        signal.raise_signal(signal.SIGTERM)  # one more: ignored
        print("taken down", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_program_only_when_all_is_taken_down(number):
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.stdout.read() == b"taken down\n"
    assert process.returncode == 128 + number


def test_a_signal_that_nohup_has_ignored_stays_ignored():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with raise_on_termination():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_a_handler_that_is_there_is_left_alone():
    numbers = []
    previous = signal.signal(signal.SIGTERM, lambda number, _frame: numbers.append(number))
    try:
        with raise_on_termination():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert numbers == [signal.SIGTERM]


def test_a_thread_changes_nothing():
    handlers = []

    def look() -> None:
        with raise_on_termination():
            handlers.append(signal.getsignal(signal.SIGHUP))

    previous = signal.getsignal(signal.SIGHUP)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [previous]
