"""Waiting for what another process, thread or server does."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
# A wait ends with the event that it is for, so a generous bound costs nothing.
PATIENCE_S = 240.0
# For limits of the product: pytest ends a test earlier, so an operation that returns did not wait.
BEYOND_A_TEST_S = 900.0


def wait_for(
    condition: Callable[[], Any],
    *,
    timeout_s: float = PATIENCE_S,
    what: object = "the condition",
    period_s: float = 0.05,
) -> Any:
    """Poll until `condition` gives something true. Returns that."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(period_s)
    return value


def apart(call: Callable[[], T]) -> T:
    """Call in a thread of its own: what takes a running loop for a caller that awaits finds none.

    A browser of a test has one running in the main thread.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(contextvars.copy_context().run, call).result()
