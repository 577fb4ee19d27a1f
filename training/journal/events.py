"""What is noted of an attempt while it runs: recoveries, pauses, alerts, damaged checkpoints.

The coordinator must not wait for the object store while training stands still, so it appends a
JSON line to the attempt's live file (the one with the step records) before it acts; whoever
supervises the run copies the notes into the ledger. Times are seconds since the epoch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from training.journal.health_point import HealthPoint
from training.recovery.fault_record import FaultRecord
from training.recovery.rungs import Rung


class Note(BaseModel):
    """Common part.

    Attributes:
        at_s: when it was written.
        number: of the recovery or pause in its attempt, from 1; ties beginning and end together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    at_s: float
    number: int = Field(ge=1)


class RecoveryBegan(Note):
    """A decision about a fault while processes of the attempt live; written before it is acted on.

    Attributes:
        generation: of the process groups that the fault ended.
        fault: what was noticed; its `at_s` is when.
    """

    kind: Literal["recovery_began"] = "recovery_began"
    generation: int
    fault: FaultRecord
    rung: Rung
    reason: str
    skipped: tuple[str, ...] = ()
    accept_abnormal: bool = False
    sub_healthy: bool = False


class RecoveryEnded(Note):
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


class LastSave(Note):
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


class PauseBegan(Note):
    """Every rank stands at the same step boundary."""

    kind: Literal["pause_began"] = "pause_began"
    step: int


class PauseEnded(Note):
    """Training goes on."""

    kind: Literal["pause_ended"] = "pause_ended"
    step: int


class AlertRaised(Note):
    """A health point left its limits; written by the supervisor. `number` counts alerts alone.

    Attributes:
        value: what was measured, in the unit that `text` names.
        limit: what it should not have passed.
        text: for a person.
    """

    kind: Literal["alert_raised"] = "alert_raised"
    point: HealthPoint
    text: str
    value: float
    limit: float
    node: str | None = None
    rank: int | None = None
    device: int | None = None
    step: int | None = None


class AlertCleared(Note):
    """A health point is back inside its limits, or what it is about is gone."""

    kind: Literal["alert_cleared"] = "alert_cleared"


class CheckpointDamaged(Note):
    """A restore met a committed checkpoint that is not as published; written by the first rank.

    `number` counts within the attempt.

    Attributes:
        step: of the checkpoint.
        text: what is wrong with which file.
        is_mended: whether a node that held the same bytes put them into the store again; else
            the step was set aside, and the one before is taken.
    """

    kind: Literal["checkpoint_damaged"] = "checkpoint_damaged"
    step: int
    text: str
    is_mended: bool


AnyNote = Annotated[
    RecoveryBegan
    | RecoveryEnded
    | LastSave
    | PauseBegan
    | PauseEnded
    | AlertRaised
    | AlertCleared
    | CheckpointDamaged,
    Field(discriminator="kind"),
]

NOTE: TypeAdapter[AnyNote] = TypeAdapter(AnyNote)
NOTE_KINDS = frozenset(
    {
        "recovery_began",
        "recovery_ended",
        "last_save",
        "pause_began",
        "pause_ended",
        "alert_raised",
        "alert_cleared",
        "checkpoint_damaged",
    }
)


class PastRecovery(BaseModel):
    """One past recovery of the run, as a start order carries it to the coordinator.

    Attributes:
        fault: what it answered.
        rung: what was done.
        progressed: whether a new step was committed after it.
        failed: whether the rung itself could not be carried out.
        cut_short: whether another fault came before it was.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    fault: FaultRecord
    rung: Rung
    progressed: bool
    failed: bool = False
    cut_short: bool = False
