"""Waiting for what another process, thread or server does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_for(
    condition: Callable[[], Any],
    *,
    timeout_s: float = 30.0,
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
