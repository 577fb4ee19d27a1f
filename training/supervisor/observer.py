"""Recoveries inside the processes, seen from outside: for the next attempt, and for onlookers.

Times are seconds since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from training.engines.base import Engine, Placement, Snapshot
from training.errors import AgentUnreachable, EngineError
from training.journal.attempt_log import Follower
from training.journal.events import CheckpointCommitted, Event, LedgerEvent, StepRecord
from training.journal.history import AttemptView, Pause, spans
from training.recovery.decision import Recovery
from training.recovery.events import PauseBegan, PauseEnded

# Rows without progress are short, and a window of a day holds no more of one code that matter.
NUM_PAST = 50


def past_recoveries(recoveries: Iterable[Recovery]) -> list[Recovery]:
    """The newest recoveries as a start order carries them, oldest first."""
    return list(recoveries)[-NUM_PAST:]


@dataclass(frozen=True, slots=True)
class AttemptSnapshot:
    """How an attempt stands by its own word.

    Attributes:
        snapshot: of its members; None when no agent of it can be reached from here.
        steps: completed since the last look.
        notes: of its coordinator, from the beginning.
    """

    snapshot: Snapshot | None
    steps: tuple[StepRecord, ...] = ()
    notes: tuple[LedgerEvent, ...] = ()


class AttemptObserver:
    """Reads the live file of an attempt that somebody else supervises, or nobody.

    Args:
        engine: of the run; it is asked, and told nothing.
        placement: that the attempt stands on.
    """

    def __init__(self, engine: Engine, placement: Placement) -> None:
        self._engine = engine
        self._placement = placement
        self._notes: list[LedgerEvent] = []
        self._steps: list[StepRecord] = []
        self._log = Follower(engine.metrics)

    def pause(self, view: AttemptView) -> Pause | None:
        """The pause that the attempt is in by now.

        Args:
            view: the attempt as it is on record; its live file may be out of reach.
        """
        self._read_on()
        pauses = spans((*view.notes, *self._notes), PauseBegan, PauseEnded)
        return pauses[-1] if pauses and pauses[-1].ended is None else None

    def look(self) -> AttemptSnapshot:
        """How the attempt stands by now."""
        try:
            snapshot = self._engine.poll() if self._read_on() else None
        except (EngineError, AgentUnreachable):
            snapshot = None
        steps, self._steps = tuple(self._steps), []
        return AttemptSnapshot(snapshot, steps, tuple(self._notes))

    def _read_on(self) -> bool:
        """Read the live file to its end. Whether any agent of the attempt lives."""
        try:
            if not self._engine.adopt(self._placement):
                return False
            for events in iter(self._log.read, None):
                for event in events:
                    self._take(event)
        except (EngineError, AgentUnreachable):
            return False  # its containers are just going away
        return True

    def _take(self, event: Event) -> None:
        match event:
            case StepRecord():
                self._steps.append(event)
            case CheckpointCommitted():
                pass  # the store has it
            case _:
                self._notes.append(event)
