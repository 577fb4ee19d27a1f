"""Sleeping until a process ends: real processes, no waiting for the time to pass."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time

import pytest

from perdure.training.agent.control import WakeupSignal
from tests.waiting import BEYOND_A_TEST_S


@pytest.fixture
def waking():
    with WakeupSignal() as signal_:
        yield signal_


def test_the_end_of_a_process_wakes(waking):
    with subprocess.Popen(["true"]):
        waking.sleep(BEYOND_A_TEST_S)


def test_an_end_before_the_sleep_is_not_missed(waking):
    subprocess.run(["true"], check=True)
    waking.sleep(BEYOND_A_TEST_S)


def test_another_thread_can_wake(waking):
    thread = threading.Thread(target=waking.wake)
    thread.start()
    waking.sleep(BEYOND_A_TEST_S)
    thread.join()


def test_each_cause_wakes_once(waking):
    for _ in range(3):
        waking.wake()
    waking.sleep(BEYOND_A_TEST_S)
    began_s = time.monotonic()
    waking.sleep(0.05)
    assert time.monotonic() - began_s >= 0.04


def test_more_wakeups_than_the_socket_holds_are_no_error(waking):
    for _ in range(100_000):
        waking.wake()
    waking.sleep(BEYOND_A_TEST_S)


def test_what_comes_after_the_end_is_no_error_and_signals_are_as_before():
    with WakeupSignal() as waking:
        pass
    waking.wake()
    assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
    os.kill(os.getpid(), signal.SIGCHLD)
