"""Reading one entry of a platform: what a reader is, and the values that all of them share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from training.errors import InputError
from training.platforms.settings import Setting

CoordinatorMessage = Setting | str  # a statement, or a warning
Reader = Callable[[str, str], Iterator[CoordinatorMessage]]


def source_of(name: str, text: str) -> str:
    """An entry as messages quote it."""
    return f"{name}={text!r}"


def refuse(name: str, text: str, allowed: str) -> InputError:
    """The error for a value that is not allowed."""
    return InputError(name, f"{text!r} must be {allowed}")


def number(name: str, text: str, *, low: int, high: int) -> int:
    """A decimal number within limits."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or not low <= int(text) <= high:
        raise refuse(name, text, f"a number from {low} to {high}")
    return int(text)
