"""The events of an attempt while it runs, as a union.

Each is a line of the attempt log (attempt_log.py). Step records go into the store, too; the
supervisor copies every other event into the ledger. Times are seconds since the epoch, steps
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

    It is a dataclass because a pydantic model takes 3 us longer, once per step. None stands for a
    value that a command does not print.

    Attributes:
        step: completed optimizer steps, this one included.
        loss: mean over the global batch; JSON keeps every digit of it.
        grad_norm: before clipping.
        tokens_per_s: of all ranks together.
        mfu: model FLOP/s over peak FLOP/s, 0 to 1; None when the program does not report it.
        at_s: time of its completion, seconds since the epoch.
        step_s: its duration; 0 where that is unknown.
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
        """Key that differs between two completions of the same step."""
        return self.placement, self.attempt, self.step, self.at_s

    @property
    def loss_text(self) -> str:
        """The loss, for a line about the step; empty where it is unknown."""
        return f"loss {self.loss:.4f}" if self.loss is not None else ""


@dataclass(frozen=True, slots=True)
class CheckpointCommitted:
    """A commit to the store; written by the first rank or its checkpoint server."""

    __pydantic_config__: ClassVar[ConfigDict] = _LINE

    step: int
    kind: Literal["checkpoint"] = "checkpoint"


class AlertKind(StrEnum):
    """The subjects of alerts."""

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
    """A reading left its limits; recorded by the supervisor. `number` counts alerts alone.

    Attributes:
        value: the reading, in the unit that `text` names.
        limit: the bound that the reading passed.
        text: a sentence for a person.
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
    """A reading is inside its limits again, or its subject is gone."""

    kind: Literal["alert_cleared"] = "alert_cleared"


class CheckpointDamaged(AttemptEvent):
    """A committed checkpoint that a restore found damaged; written by the first rank.

    `number` counts within the attempt.

    Attributes:
        step: step of the checkpoint.
        text: the file and its damage.
        is_repaired: whether a node that held the same bytes put them into the store again; else
            the step was set aside, and the restore takes the previous step.
    """

    kind: Literal["checkpoint_damaged"] = "checkpoint_damaged"
    step: int
    text: str
    is_repaired: bool


class CheckpointRestored(AttemptEvent):
    """The origin of the state with which the attempt began; written by the first rank.

    `number` is 1: an attempt has a single such event, and none where it begins at step 0.

    Attributes:
        step: step of the checkpoint.
        shares: number of ranks' shares by place: memory or disk of the nodes, the memory of a
            partner node, the store.
        partners: the node with copies, by the node that lacked the shares of its ranks.
        num_fetched: number of shards that all ranks together read from the store.
        why: the parts of a newer save that the nodes lacked, or the reason for reading the store.
    """

    kind: Literal["checkpoint_restored"] = "checkpoint_restored"
    step: int
    shares: dict[str, int]
    partners: dict[str, str] = Field({})
    num_fetched: int = 0
    why: str = ""

    @property
    def text(self) -> str:
        """The origin, on a single line."""
        places = ", ".join(f"{place} {num}" for place, num in self.shares.items())
        copies = "; ".join(f"{node} from copies on {of}" for node, of in self.partners.items())
        details = "; ".join(part for part in (copies, self.why) if part)
        return (
            f"step {self.step} restored, shares from {places}{f' ({details})' if details else ''}"
        )


class ChipsHealed(AttemptEvent):
    """A repair of a node's chips between two attempts in place; the node writes it.

    `number` is 1: an attempt has a single such event.

    Attributes:
        rung: rung that starts processes on the chips again, if they can be used.
        succeeded: whether the chips can be used; else the rung has failed.
        seconds: duration of all acts.
    """

    kind: Literal["chips_healed"] = "chips_healed"
    node: str
    rung: Rung
    succeeded: bool
    acts: tuple[ActDone, ...]
    seconds: float

    @property
    def text(self) -> str:
        """The acts, on a single line."""
        went = "can be used" if self.succeeded else "cannot be used"
        return f"{self.node} {went} after {self.seconds:.2f} s ({acts_text(self.acts)})"


class ProgramNotice(AttemptEvent):
    """A hint that the program trains otherwise than its author may think; by the first rank.

    `number` counts within the process.
    """

    kind: Literal["program_notice"] = "program_notice"
    text: str


class BatchSkipped(AttemptEvent):
    """A global batch that was skipped; written by the first rank. `number` is `batch.stop`.

    Attributes:
        is_known: whether it was skipped before a restart, and not even tried this time.
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
