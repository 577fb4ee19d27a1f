"""States that tasks return, typed as what their callers get.

Prefect unwraps a state that a task returns: the caller sees its data, the UI its name and
message. A state must be fresh each time; one that came from another run loses both (3.8.8).
"""

from __future__ import annotations

from typing import TypeVar, cast

from prefect.states import Completed, Failed

T = TypeVar("T")


def completed(data: T, message: str, *, name: str = "Completed") -> T:
    """A task that did its work."""
    return cast("T", Completed(name=name, message=message, data=data))


def failed(data: T, message: str, *, name: str) -> T:
    """A task whose failure the flow knows how to answer from `data`."""
    return cast("T", Failed(name=name, message=message, data=data))
