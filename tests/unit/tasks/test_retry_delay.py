"""The wait before a retry: a request to stop ends it, and nothing else does."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from perdure.tasks import retry_delay as module
from perdure.tasks.retry_delay import NotWanted, RetryDelay
from tests.waiting import BEYOND_A_TEST_S


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(module, "POLL_S", 0.01)


def wait(delay: RetryDelay, seconds: float) -> None:
    delay.begin()
    time.sleep(seconds)


def test_a_request_to_stop_ends_a_wait():
    wanted = threading.Event()
    threading.Timer(0.1, wanted.set).start()
    with RetryDelay(wanted.is_set) as delay, pytest.raises(NotWanted):
        wait(delay, BEYOND_A_TEST_S)


def test_a_wait_ends_also_where_the_answer_is_an_exception():
    def superseded() -> bool:
        raise RuntimeError("another supervisor has taken the run")

    with RetryDelay(superseded) as delay, pytest.raises(NotWanted):
        wait(delay, BEYOND_A_TEST_S)


def test_what_runs_is_not_interrupted_by_a_request_to_stop():
    with RetryDelay(lambda: True) as delay:
        time.sleep(0.05)
        delay.begin()
        delay.over()
        time.sleep(0.05)


def test_the_signal_has_the_handler_that_it_had_before():
    before = signal.getsignal(signal.SIGUSR1)
    with RetryDelay(lambda: False):
        assert signal.getsignal(signal.SIGUSR1) != before
    assert signal.getsignal(signal.SIGUSR1) == before


def test_outside_of_the_main_thread_a_wait_lasts_as_long_as_it_lasts():
    waited = []

    def elsewhere() -> None:
        with RetryDelay(lambda: True) as delay:
            wait(delay, 0.05)
            waited.append(True)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert waited == [True]
