"""Sleeping until a process ends: real processes, no waiting for the time to pass."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time

import pytest

from perdure.training.agent.control import WakeupSignal

LONG_S = 60.0


@pytest.fixture
def waking():
    with WakeupSignal() as one:
        yield one


def took_s(waking: WakeupSignal, timeout_s: float) -> float:
    began_s = time.monotonic()
    waking.sleep(timeout_s)
    return time.monotonic() - began_s


def test_the_end_of_a_process_wakes(waking):
    with subprocess.Popen(["true"]):
        assert took_s(waking, LONG_S) < LONG_S / 2


def test_an_end_before_the_sleep_is_not_missed(waking):
    subprocess.run(["true"], check=True)
    assert took_s(waking, LONG_S) < LONG_S / 2


def test_another_thread_can_wake(waking):
    thread = threading.Thread(target=waking.wake)
    thread.start()
    assert took_s(waking, LONG_S) < LONG_S / 2
    thread.join()


def test_each_cause_wakes_once(waking):
    for _ in range(3):
        waking.wake()
    waking.sleep(LONG_S)
    assert took_s(waking, 0.05) >= 0.04


def test_more_wakeups_than_the_socket_holds_are_no_error(waking):
    for _ in range(100_000):
        waking.wake()
    assert took_s(waking, LONG_S) < LONG_S / 2


def test_what_comes_after_the_end_is_no_error_and_signals_are_as_before():
    with WakeupSignal() as waking:
        pass
    waking.wake()
    assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
    os.kill(os.getpid(), signal.SIGCHLD)
