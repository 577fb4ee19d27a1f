"""What happens in an attempt while it runs, as one union of events.

The coordinator must not wait for the object store while training stands still, so it appends a
JSON line to the attempt's live file (the one with the step records) before it acts; whoever
supervises the run copies the events into the ledger. Times are seconds since the epoch.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from training.recovery.events import (
    AttemptEvent,
    LastSave,
    PauseBegan,
    PauseEnded,
    RecoveryBegan,
    RecoveryEnded,
)


class HealthPoint(StrEnum):
    """What is looked at; each alert is about one of them."""

    UTILISATION_LOW = "utilisation_low"
    MEMORY_HIGH = "memory_high"
    DEVICE_UNHEALTHY = "device_unhealthy"
    LINK_DOWN = "link_down"
    LOSS_ABNORMAL = "loss_abnormal"
    STEP_SLOW = "step_slow"
    LATENCY_HIGH = "latency_high"
    STRAGGLER = "straggler"
    DATA_STARVED = "data_starved"
    CHECKPOINT_OLD = "checkpoint_old"
    DISK_FILLING = "disk_filling"
    HEARTBEAT_LOST = "heartbeat_lost"


class AlertRaised(AttemptEvent):
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


class AlertCleared(AttemptEvent):
    """A health point is back inside its limits, or what it is about is gone."""

    kind: Literal["alert_cleared"] = "alert_cleared"


class CheckpointDamaged(AttemptEvent):
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
