"""Retries of requests that failed for a passing reason: exponential back-off with full jitter.

Times are seconds. Clock, sleep and random numbers are passed in.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from perdure.storage.errors import StorageError, TransientError

T = TypeVar("T")

OUTAGE_S = 1200.0  # an outage of the store that a run sits out
PATIENT_CAP_S = 30.0
BRIEF_S = 15.0


@dataclass(frozen=True, slots=True)
class Retry:
    """Repeat an operation while what it raises may pass.

    The n-th pause is drawn from [d/2, d] with d = min(cap_s, base_s * 2**(n-1)): never so short
    that a throttled store is hammered, never the same on a thousand ranks. A pause that the store
    requests is added to it, or the thousand would return at the same moment.

    Attributes:
        passing: errors that are retried; every other error is raised at once.
        on_failure: called with every error that is repeated, before the pause, and the time since
            the operation began.
        on_success: called when an operation has succeeded that had failed before.
    """

    max_tries: int = 6
    base_s: float = 0.25
    cap_s: float = 15.0
    give_up_after_s: float = 180.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    rng: random.Random = field(default_factory=random.Random)
    passing: tuple[type[StorageError], ...] = (TransientError,)
    on_failure: Callable[[StorageError, float], None] = lambda _error, _lasted_s: None
    on_success: Callable[[], None] = lambda: None

    @classmethod
    def patient(cls, **options: Any) -> Self:
        """Sit out an outage of the store: for all that a run cannot go on without."""
        return cls(max_tries=1_000, cap_s=PATIENT_CAP_S, give_up_after_s=OUTAGE_S, **options)

    @classmethod
    def brief(cls) -> Self:
        """Give up soon: for a person who waits."""
        return cls(max_tries=2, cap_s=1.0, give_up_after_s=BRIEF_S)

    def run(self, operation: Callable[[int], T]) -> T:
        """Call `operation(tries_before)` until it returns.

        Raises:
            StorageError: the last one, when tries or time are used up, or one that does not pass.
        """
        started_s = self.clock()
        tries = 0
        while True:
            try:
                done = operation(tries)
            except self.passing as exc:
                tries += 1
                asked_s = exc.retry_after_s if isinstance(exc, TransientError) else None
                pause_s = self.pause_s(tries) + (asked_s or 0.0)
                late = self.clock() - started_s + pause_s > self.give_up_after_s
                if tries >= self.max_tries or late:
                    raise
                self.on_failure(exc, self.clock() - started_s)
            else:
                if tries:
                    self.on_success()
                return done
            self.sleep(pause_s)

    def pause_s(self, tries: int) -> float:
        """Seconds to wait after the `tries`-th failure."""
        # Beyond 2**60 a float is no longer made of it, and the cap has long been reached.
        longest_s: float = min(self.cap_s, self.base_s * 2 ** min(tries - 1, 60))
        return longest_s * (0.5 + self.rng.random() / 2)
