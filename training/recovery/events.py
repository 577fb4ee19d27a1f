"""Events that the coordinator of an attempt records: recoveries, last saves, pauses.

Written before it is acted on. Times are seconds since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from storage.model import FrozenModel
from training.recovery.decision import Decision
from training.recovery.faults import Fault
from training.recovery.rungs import Rung


class AttemptEvent(FrozenModel):
    """What happens in an attempt; the coordinator, supervisor or first rank writes it.

    Attributes:
        at_s: when it was written.
        number: of the recovery or pause in its attempt, from 1; ties beginning and end together.
    """

    at_s: float
    number: int = Field(ge=1)


class RecoveryBegan(AttemptEvent):
    """A decision about a fault while processes of the attempt live; written before it is acted on.

    Attributes:
        generation: of the process groups that the fault ended.
        fault: what was noticed; its `at_s` is when.
    """

    kind: Literal["recovery_began"] = "recovery_began"
    generation: int
    fault: Fault
    decision: Decision

    @property
    def replaced(self) -> frozenset[int]:
        """Ranks that get a new process."""
        replaces, rank = self.decision.rung is Rung.PROCESS_REPLACE, self.fault.rank
        return frozenset({rank} if replaces and rank is not None else ())


class RecoveryEnded(AttemptEvent):
    """The recovery came to its end.

    Attributes:
        generation: that training goes on in; the one before when it failed.
        succeeded: whether training goes on.
        why: why it does not.
        step: completed steps that training goes on from.
        replaced: ranks that got a new process.
        repaired: ranks whose state came from a replica.
        steps_lost: completed steps that are done again.
        duration_s: from the notice of the fault to the first rank that trains again.
        cut_short: another fault came before it was carried out.
    """

    kind: Literal["recovery_ended"] = "recovery_ended"
    generation: int
    succeeded: bool
    why: str = ""
    step: int | None = None
    replaced: tuple[int, ...] = ()
    repaired: tuple[int, ...] = ()
    steps_lost: int = 0
    duration_s: float = 0.0
    cut_short: bool = False


class LastSave(AttemptEvent):
    """The end-of-life checkpoint: what the survivors did before their processes ended.

    Attributes:
        step: that was committed, None when nothing was.
        ranks: that wrote it.
        why: why nothing was written.
    """

    kind: Literal["last_save"] = "last_save"
    step: int | None
    ranks: tuple[int, ...] = ()
    why: str = ""


class PauseBegan(AttemptEvent):
    """Every rank is paused at the same step boundary."""

    kind: Literal["pause_began"] = "pause_began"
    step: int


class PauseEnded(AttemptEvent):
    """Training goes on."""

    kind: Literal["pause_ended"] = "pause_ended"
    step: int


RecoveryEvent = RecoveryBegan | RecoveryEnded | LastSave | PauseBegan | PauseEnded
