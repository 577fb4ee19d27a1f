"""The observer of an attempt: it supervises nothing, records nothing, and orders only drills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from perdure.training.config.drill import Victim
from perdure.training.engines.base import Placement, Snapshot
from perdure.training.engines.fleet import Fleet
from perdure.training.errors import AgentUnreachable, EngineError
from perdure.training.journal.attempt_log import Follower
from perdure.training.journal.attempt_view import AttemptView, Pause, pair_events
from perdure.training.journal.events import LedgerEvent, StepRecord
from perdure.training.journal.history import RunHistory
from perdure.training.recovery.protocol import PauseBegan, PauseEnded
from perdure.training.supervisor.watch import Progress
from perdure.training.wire.logs import LogPiece, ReadLogsQuery


def placement_of(history: RunHistory) -> Placement | None:
    """Return the placement in effect."""
    placed = history.placement
    return Placement(placed.placement, placed.members) if placed is not None else None


def staying_members(history: RunHistory, placement: Placement) -> set[int]:
    """List the indices of members whose container was there in the placement before."""
    previous = history.placements[-2].members if len(history.placements) > 1 else ()
    return {member.index for member in placement.members if member in previous}


@dataclass(frozen=True, slots=True)
class AttemptSnapshot:
    """The state of an attempt by its own report.

    Attributes:
        snapshot: None when no agent of the attempt can be reached from here.
        steps: completed since the last observation.
        events: the coordinator's, from the beginning.
    """

    snapshot: Snapshot | None
    steps: tuple[StepRecord, ...] = ()
    events: tuple[LedgerEvent, ...] = ()


class AttemptObserver:
    """Reads the log of an attempt without supervising it; records nothing.

    Args:
        fleet: where the attempt runs.
        placement: the attempt's.
        key: placement and attempt; what agents report of an earlier attempt is left out. None:
            the newest that they know.
    """

    def __init__(
        self, fleet: Fleet, placement: Placement, *, key: tuple[int, int] | None = None
    ) -> None:
        self._fleet = fleet
        self._key = key
        self._placement = placement
        self._events: list[LedgerEvent] = []
        self._steps: list[StepRecord] = []
        self._log, self._log_container = self._follower(), ""

    def _follower(self) -> Follower:
        return Follower(partial(self._fleet.metrics, of_attempt=self._key))

    def pause(self, view: AttemptView) -> Pause | None:
        """Find the pause that the attempt is in by now.

        Args:
            view: the attempt as it is on record; its log may be out of reach.
        """
        self._read_on()
        pauses = pair_events((*view.events, *self._events), PauseBegan, PauseEnded)
        return pauses[-1] if pauses and pauses[-1].ended is None else None

    def observe(self) -> AttemptSnapshot:
        """Return the state of the attempt by now."""
        try:
            # First: it shows on which node the log of a command is.
            snapshot = self._fleet.poll() if self._fleet.adopt(self._placement) else None
        except (EngineError, AgentUnreachable):
            snapshot = None
        if snapshot is not None and not self._read_on():
            snapshot = None
        if snapshot is not None and self._key is not None:
            snapshot = snapshot.of_attempt(*self._key)
        steps, self._steps = tuple(self._steps), []
        return AttemptSnapshot(snapshot, steps, tuple(self._events))

    def read_logs(self, query: ReadLogsQuery) -> Sequence[tuple[str, LogPiece]] | None:
        """Read its logs, with the names of their nodes; None: no node is in reach."""
        try:
            if not self._fleet.adopt(self._placement):
                return None
            return self._fleet.read_logs(query)
        except (EngineError, AgentUnreachable):
            return None

    def kill(self, victim: Victim, index: int) -> bool:
        """Have something killed in a drill. Returns whether it was there.

        Raises:
            EngineError: the run is no drill.
        """
        return bool(self._fleet.adopt(self._placement)) and self._fleet.kill(victim, index)

    def _read_on(self) -> bool:
        """Read the log to its end. Returns whether any agent of the attempt lives."""
        try:
            if not self._fleet.adopt(self._placement):
                return False
            if (
                self._fleet.first_container != self._log_container
            ):  # another log begins on another node
                self._log, self._log_container = self._follower(), self._fleet.first_container
            for events in iter(self._log.read, None):
                progress = Progress()
                progress.take(events)
                self._events += progress.events
                self._steps += progress.steps
        except (EngineError, AgentUnreachable):
            return False  # its containers are just going away
        return True
