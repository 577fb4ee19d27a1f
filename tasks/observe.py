"""Observations of a run at one moment, for the terminal and the artifacts.

Observers are called from the flow's thread and must return at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from perdure.training.journal.events import StepRecord
from perdure.training.journal.history import RunHistory


@dataclass(frozen=True, slots=True)
class Observation:
    """State of a run at one moment.

    Attributes:
        activity: current activity for the user: "training", "recovering: ...".
        steps: step records that are new since the last look.
    """

    run_id: str
    target_step: int | None
    activity: str
    history: RunHistory
    last: StepRecord | None = None
    steps: tuple[StepRecord, ...] = field(default=())


Observer = Callable[[Observation], None]

_observers: list[Observer] = []


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Have `observer` called for every observation of runs in this process."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def publish(observation: Observation) -> None:
    """Show an observation to every observer."""
    for observer in _observers:
        observer(observation)
