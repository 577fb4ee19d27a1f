"""An attempt as the ledger has it: its start, its end, and its events in between.

Times are seconds, steps completed optimizer steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from perdure.training.journal.events import (
    AlertCleared,
    AlertRaised,
    CheckpointRestored,
    ChipsHealed,
    LedgerEvent,
)
from perdure.training.journal.records import (
    AttemptEnded,
    AttemptStarted,
    FirstStep,
    Member,
    ResumeChosen,
)
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.healing import found_at_fault
from perdure.training.recovery.protocol import (
    AttemptEvent,
    LastSave,
    PauseBegan,
    PauseEnded,
    RecoveryBegan,
    RecoveryEnded,
)
from perdure.training.recovery.rungs import Decision, Rung

Began = TypeVar("Began", bound=AttemptEvent)
Ended = TypeVar("Ended", bound=AttemptEvent)


CUT_OFF = "the attempt ended before it"  # begins the reason of a recovery's end


@dataclass(frozen=True)
class Span(Generic[Began, Ended]):
    """An event that begins an interval, and the event of the same number that ends it.

    Attributes:
        began: the first event.
        ended: the last event; None while it lasts, and when the attempt ended first.
    """

    began: Began
    ended: Ended | None = None


Pause = Span[PauseBegan, PauseEnded]
Alert = Span[AlertRaised, AlertCleared]


class InProcessRecovery(Span[RecoveryBegan, RecoveryEnded]):
    """A recovery inside the processes."""

    @property
    def succeeded(self) -> bool:
        """Whether training continued."""
        return self.ended is not None and self.ended.succeeded

    @property
    def is_cut_off(self) -> bool:
        """Whether its attempt ended before it."""
        return self.ended is None or self.ended.why.startswith(CUT_OFF)

    @property
    def is_sub_healthy(self) -> bool:
        """Whether training continued over a repair that may break again."""
        return self.succeeded and self.began.decision.sub_healthy


def pair_events(
    events: Sequence[LedgerEvent], began: type[Began], ended: type[Ended]
) -> list[Span[Began, Ended]]:
    """Pair the events of two kinds by number, in the order in which they began.

    An end without its beginning (a line that was lost with a node) is left out.
    """
    ends = {event.number: event for event in events if isinstance(event, ended)}
    begins = {event.number: event for event in events if isinstance(event, began)}
    return [Span(event, ends.get(number)) for number, event in begins.items()]


@dataclass(frozen=True, slots=True)
class AttemptView:
    """An attempt, from its start to the decision about its end."""

    started: AttemptStarted
    members: Sequence[Member]
    resume: ResumeChosen | None = None
    first_step: FirstStep | None = None
    ended: AttemptEnded | None = None
    decision: Decision | None = None
    failed_rungs: tuple[Rung, ...] = ()
    events: tuple[LedgerEvent, ...] = ()

    @property
    def key(self) -> tuple[int, int]:
        """(placement, attempt)."""
        return self.started.placement, self.started.attempt

    @property
    def from_step(self) -> int:
        """Step from which it began, by its first step; until then the store's newest.

        The memory of the nodes may have had a newer one than the store.
        """
        return self.first_step.step - 1 if self.first_step is not None else self.started.from_step

    @property
    def recoveries(self) -> list[InProcessRecovery]:
        """Recoveries inside its processes, oldest first."""
        recoveries = pair_events(self.events, RecoveryBegan, RecoveryEnded)
        return [InProcessRecovery(recovery.began, recovery.ended) for recovery in recoveries]

    @property
    def pauses(self) -> list[Pause]:
        """Times at which all its ranks were paused on request, oldest first."""
        return pair_events(self.events, PauseBegan, PauseEnded)

    @property
    def alerts(self) -> list[Alert]:
        """Alerts that were raised, oldest first."""
        return pair_events(self.events, AlertRaised, AlertCleared)

    @property
    def fault(self) -> Fault | None:
        """The fault that ended it, of hardware where the check of its chips failed after it."""
        fault = self.ended.fault if self.ended is not None else None
        if fault is None or self.healed is None or self.healed.succeeded:
            return fault
        return found_at_fault(fault, self.healed.acts)

    @property
    def unreadable_step(self) -> int | None:
        """Step of the checkpoint that a command could not load and is not to be given again."""
        fault = self.ended.fault if self.ended is not None else None
        if fault is None or self.resume is None or self.first_step is not None:
            return None
        is_ruled_out = fault.fault_class is FaultClass.CHECKPOINT_CORRUPT and not fault.user_fault
        return self.resume.step if is_ruled_out else None

    @property
    def healed(self) -> ChipsHealed | None:
        """Repair of its chips after its end; None without a repair."""
        return next((event for event in self.events if isinstance(event, ChipsHealed)), None)

    @property
    def restored(self) -> CheckpointRestored | None:
        """Origin of its state; None before the restore, and for a start at step 0."""
        return next((event for event in self.events if isinstance(event, CheckpointRestored)), None)

    @property
    def last_save(self) -> LastSave | None:
        """Result of its end-of-life checkpoint; None without an attempt at it."""
        return next((event for event in reversed(self.events) if isinstance(event, LastSave)), None)

    @property
    def pause(self) -> Pause | None:
        """The pause that lasts."""
        pauses = self.pauses if self.ended is None else []
        return pauses[-1] if pauses and pauses[-1].ended is None else None
