"""What happens in an attempt while it runs, as one union of events.

Each is a line of the attempt log (attempt_log.py). Step records go into the store, too; every
other event is copied into the ledger by the supervisor. Times are seconds since the epoch, steps
completed optimizer steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from perdure.training.recovery.healing import ActDone, acts_text
from perdure.training.recovery.protocol import AttemptEvent, RecoveryEvent
from perdure.training.recovery.repair import SkippedBatch
from perdure.training.recovery.rungs import Rung

# A diverged loss is written as Infinity or NaN, not as null.
_LINE = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A completed step; written by the first rank, or by the agent that reads a command's output.

    A dataclass: making a pydantic model takes 3 us longer, once per step. None is what a command
    does not print.

    Attributes:
        step: completed optimizer steps, this one included.
        loss: mean over the global batch; JSON keeps every digit of it.
        grad_norm: before clipping.
        tokens_per_s: of all ranks together.
        mfu: model FLOP/s over peak FLOP/s, 0 to 1; None when the program does not report it.
        at_s: when it was completed, seconds since the epoch.
        step_s: how long it took; 0 where that is not known.
        position: global samples consumed.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _LINE

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float | None
    tokens_per_s: float | None
    mfu: float | None
    at_s: float
    step_s: float
    position: int | None
    epoch: int | None
    placement: int
    attempt: int
    kind: Literal["step"] = "step"

    @property
    def identity(self) -> tuple[int, int, int, float]:
        """Distinguishes a completion of the step from another one's."""
        return self.placement, self.attempt, self.step, self.at_s

    @property
    def loss_text(self) -> str:
        """The loss, for a line about the step; empty where it is not known."""
        return f"loss {self.loss:.4f}" if self.loss is not None else ""


@dataclass(frozen=True, slots=True)
class CheckpointCommitted:
    """The store has a checkpoint; written by the first rank or the checkpoint server beside it."""

    __pydantic_config__: ClassVar[ConfigDict] = _LINE

    step: int
    kind: Literal["checkpoint"] = "checkpoint"


class AlertKind(StrEnum):
    """What is monitored; each alert is about one of them."""

    UTILISATION_LOW = "utilisation_low"
    MEMORY_HIGH = "memory_high"
    DEVICE_UNHEALTHY = "device_unhealthy"
    LINK_DOWN = "link_down"
    LINK_RETRIED = "link_retried"
    LOSS_ABNORMAL = "loss_abnormal"
    STEP_SLOW = "step_slow"
    LATENCY_HIGH = "latency_high"
    STRAGGLER = "straggler"
    DATA_STARVED = "data_starved"
    CHECKPOINT_OLD = "checkpoint_old"
    DISK_FILLING = "disk_filling"
    HANG = "hang"


class AlertRaised(AttemptEvent):
    """A health point left its limits; recorded by the supervisor. `number` counts alerts alone.

    Attributes:
        value: what was measured, in the unit that `text` names.
        limit: what it should not have passed.
        text: for a person.
    """

    kind: Literal["alert_raised"] = "alert_raised"
    point: AlertKind
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
        is_repaired: whether a node that held the same bytes put them into the store again; else
            the step was set aside, and the one before is taken.
    """

    kind: Literal["checkpoint_damaged"] = "checkpoint_damaged"
    step: int
    text: str
    is_repaired: bool


class CheckpointRestored(AttemptEvent):
    """Where the state came from that the attempt began with; written by the first rank.

    `number` is 1: there is one for an attempt, none where it begins at step 0.

    Attributes:
        step: of the checkpoint.
        shares: how many ranks' shares lay in which place, by its name: memory or disk of the
            nodes, the memory of a partner node, the store.
        partners: by node that lacked the shares of its ranks, the node that had copies of them.
        num_fetched: shards that were read in the store, by all ranks together.
        why: what the nodes lacked of a newer save, or why the store was read.
    """

    kind: Literal["checkpoint_restored"] = "checkpoint_restored"
    step: int
    shares: dict[str, int]
    partners: dict[str, str] = Field({})
    num_fetched: int = 0
    why: str = ""

    @property
    def text(self) -> str:
        """Where it came from, on one line."""
        places = ", ".join(f"{place} {num}" for place, num in self.shares.items())
        copies = "; ".join(f"{node} from copies on {of}" for node, of in self.partners.items())
        details = "; ".join(part for part in (copies, self.why) if part)
        return (
            f"step {self.step} restored, shares from {places}{f' ({details})' if details else ''}"
        )


class ChipsHealed(AttemptEvent):
    """What was done about the chips of a node between two attempts in place; the node writes it.

    `number` is 1: there is one for an attempt.

    Attributes:
        rung: that starts processes there again, if they can be.
        succeeded: whether the chips can be used; else the rung has failed.
        seconds: all of it took.
    """

    kind: Literal["chips_healed"] = "chips_healed"
    node: str
    rung: Rung
    succeeded: bool
    acts: tuple[ActDone, ...]
    seconds: float

    @property
    def text(self) -> str:
        """What was done, on one line."""
        went = "can be used" if self.succeeded else "cannot be used"
        return f"{self.node} {went} after {self.seconds:.2f} s ({acts_text(self.acts)})"


class ProgramNotice(AttemptEvent):
    """The program trains otherwise than its author may think; written by the first rank.

    `number` counts within the process.
    """

    kind: Literal["program_notice"] = "program_notice"
    text: str


class BatchSkipped(AttemptEvent):
    """A global batch was passed over; written by the first rank. `number` is `batch.stop`.

    Attributes:
        is_known: it had been skipped before a restart, and was not even tried this time.
    """

    kind: Literal["batch_skipped"] = "batch_skipped"
    batch: SkippedBatch
    is_known: bool = False


_Recorded = (
    RecoveryEvent
    | AlertRaised
    | AlertCleared
    | CheckpointDamaged
    | CheckpointRestored
    | ProgramNotice
    | ChipsHealed
    | BatchSkipped
)
LedgerEvent = Annotated[_Recorded, Field(discriminator="kind")]
Event = Annotated[StepRecord | CheckpointCommitted | _Recorded, Field(discriminator="kind")]
EVENT: TypeAdapter[Event] = TypeAdapter(Event, config=_LINE)
STEP: TypeAdapter[StepRecord] = TypeAdapter(StepRecord)
