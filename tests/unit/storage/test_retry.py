"""Retry: how often, how long, and when to give up."""

from __future__ import annotations

import pytest

from perdure.storage.errors import PermanentError, Throttled
from perdure.storage.retry import Retry


class Flaky:
    """Fails a number of times, then answers with how often it was called before."""

    def __init__(self, num_failures: int, error: type[Exception] = Throttled) -> None:
        self.num_failures = num_failures
        self.error = error
        self.num_calls = 0

    def __call__(self, tries: int) -> int:
        assert tries == self.num_calls
        self.num_calls += 1
        if self.num_calls <= self.num_failures:
            raise self.error(f"failure {self.num_calls}")
        return tries


def test_transient_errors_are_repeated_until_they_pass():
    pauses_s: list[float] = []
    retry = Retry(max_tries=5, sleep=pauses_s.append)
    assert retry.run(Flaky(4)) == 4
    assert len(pauses_s) == 4


def test_the_last_error_is_raised_when_tries_are_used_up():
    retry = Retry(max_tries=3, sleep=lambda _: None)
    with pytest.raises(Throttled, match="failure 3"):
        retry.run(Flaky(99))


def test_permanent_errors_are_not_repeated():
    operation = Flaky(99, PermanentError)
    with pytest.raises(PermanentError, match="failure 1"):
        Retry(sleep=lambda _: None).run(operation)
    assert operation.num_calls == 1


def test_pauses_grow_to_their_cap_and_never_vanish():
    retry = Retry(base_s=1.0, cap_s=8.0)
    for tries in range(1, 10):
        longest_s = min(8.0, 2.0 ** (tries - 1))
        for _ in range(20):
            assert longest_s / 2 <= retry.pause_s(tries) <= longest_s


def test_nothing_is_tried_after_the_time_is_used_up():
    now_s = 0.0

    def sleep(pause_s: float) -> None:
        nonlocal now_s
        now_s += pause_s

    operation = Flaky(99)
    retry = Retry(max_tries=99, give_up_after_s=20.0, clock=lambda: now_s, sleep=sleep)
    with pytest.raises(Throttled):
        retry.run(operation)
    assert now_s <= 20.0
    assert operation.num_calls > 4
