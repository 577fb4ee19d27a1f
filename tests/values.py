"""Values that a test needs to be there."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def not_none(value: T | None) -> T:
    """The value, which is there."""
    assert value is not None
    return value
