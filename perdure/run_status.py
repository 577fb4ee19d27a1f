"""The state of a run as a document: `perdure status --json`, whose schema scripts can rely on.

Times are seconds since the epoch, durations seconds, steps completed optimizer steps, sizes bytes.
Null means that a fact is not known, or does not apply.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    field_serializer,
    model_serializer,
)

from perdure.storage.frozen_model import FrozenModel
from perdure.training.journal.attempt_view import AttemptView
from perdure.training.journal.events import CheckpointRestored
from perdure.training.journal.waits import Wait
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.rungs import Rung
from perdure.training.reporting.facts import FaultFacts, RecoveryFacts
from perdure.training.reporting.rows import AlertRow, AttemptRow
from perdure.training.reporting.summary import AbnormalSteps
from perdure.training.supervisor.store_outage import Outage
from perdure.training.wire.agent_status import AgentState, RankStatus
from perdure.training.wire.node import NodeSample

_FAULT = TypeAdapter(Fault)


class RunState(StrEnum):
    """The state of a run."""

    NOT_STARTED = "not started"
    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class PauseStatus(FrozenModel):
    """A pause under way."""

    at_s: float = Field(description="time at which every rank had stopped")
    step: int = Field(description="step after which every rank waits")


class RestoredState(FrozenModel):
    """The checkpoint that an attempt began with, and the places its shares came from."""

    attempt: str = Field(description="placement and attempt, such as 1.2")
    at_s: float
    step: int
    shares: dict[str, int] = Field(
        description="number of ranks' shares by place: memory, disk, memory of a partner, store"
    )
    partners: dict[str, str] = Field(
        description="for each node that lacked shares, the node whose copies it received"
    )
    num_fetched: int = Field(description="shards that all ranks together read from the store")
    why: str = Field(description="why nothing newer or nearer was used")
    text: str = Field(description="the same on one line")

    @classmethod
    def of(cls, view: AttemptView, event: CheckpointRestored) -> Self:
        """The state that an attempt began with."""
        facts = event.model_dump(exclude={"kind", "number"})
        return cls(attempt="{}.{}".format(*view.key), **facts, text=event.text)


class RecentFault(FrozenModel):
    """A fault and the answer to it, on one line of a list."""

    at_s: float
    attempt: str = Field(description="placement and attempt, such as 1.2")
    fault_class: FaultClass
    name: str = Field("", description="of the class in plain words")
    name_zh: str = Field("", description="of the class in Chinese")
    title: str = Field("", description="of the code in its code book; empty if it has none")
    where: str = Field(description="rank and node, for people")
    step: int | None
    evidence: str
    rung: Rung | None = Field(description="recovery action; null while undecided")
    outcome: str

    @classmethod
    def of(cls, facts: FaultFacts) -> Self:
        """The line about a fault."""
        return cls(
            at_s=facts.at_s,
            attempt=f"{facts.placement}.{facts.attempt}",
            fault_class=facts.fault_class,
            name=facts.name,
            name_zh=facts.name_zh,
            title=facts.title,
            where=facts.where,
            step=facts.step,
            evidence=facts.evidence,
            rung=facts.rung,
            outcome=facts.outcome,
        )


class HeldCheckpoints(FrozenModel):
    """The checkpoints that one tier holds."""

    newest: int | None = Field(description="step of the newest; null if there is none")
    count: int


class RankFacts(FrozenModel):
    """A rank on a node that answers."""

    rank: int | None = Field(description="null for a command's process without a rank")
    local_rank: int | None
    pid: int
    exit_code: int | None = Field(description="null while it runs; negative for a signal")
    step: int | None = Field(description="completed steps by its heartbeat; -1 before the restore")
    phase: str | None

    @classmethod
    def of(cls, worker: RankStatus) -> Self:
        """A rank as its agent reports it."""
        return cls.model_validate(worker.model_dump(include=set(cls.model_fields)))


class NodeStatus(FrozenModel):
    """A node of the open attempt; without an answer from its agent, few fields are present."""

    node: str
    state: AgentState | Literal["lost"] | None = Field(
        description="null if its agent cannot be reached or does not answer"
    )
    health: str = Field("", description='what is wrong with it; "ok" if nothing is known to be')
    ranks: tuple[RankFacts, ...] = ()
    shown_step: int | None = Field(None, description="step that a command's output shows")
    sample: NodeSample | None = Field(None, description="newest sample of devices and host")

    @model_serializer(mode="wrap")
    def _without_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: v for name, v in handler(self).items() if name in self.model_fields_set}


class RunStatus(FrozenModel):
    """The state of a run, as `perdure status --json` prints it."""

    run_id: str = Field(description="name of the run")
    state: RunState = Field(description="state by its ledger")
    ledger_unwritable: Outage | None = Field(
        description="why the run's ledger cannot be written, and since when"
    )
    supervised: bool = Field(description="whether a process supervises the run now")
    step: int | None = Field(
        description="newest known step; of a command the step that heartbeats or output show"
    )
    committed_step: int | None = Field(description="newest step in a committed checkpoint")
    target_step: int | None = Field(description="step at which the run ends")
    eta_s: float | None = Field(description="time to the target at the pace of the newest steps")
    tokens_per_s: float | None = Field(description="speed of the newest step")
    loss: float | None = Field(description="loss of the newest step; null if it is not finite")
    grad_norm: float | None = Field(description="gradient norm of the newest step, if finite")
    lr: float | None = Field(description="learning rate of the newest step")
    last_step_age_s: float | None = Field(description="time since the newest step")
    isolated: tuple[str, ...] = Field(description="nodes that no placement uses")
    sub_healthy: int = Field(description="collectives that were repeated after a broken connection")
    pause_wanted: bool = Field(description="whether a pause has been requested")
    pause: PauseStatus | None = Field(description="the pause under way")
    waits: Wait | None = Field(description="what the run waits for, since when, and why")
    attempts: tuple[AttemptRow, ...] = Field(description="oldest first")
    abnormal: AbnormalSteps | None = Field(
        description="steps of abnormal loss or gradient norm, and skipped batches"
    )
    notices: tuple[str, ...] = Field(description="notices to the author of the program")
    recoveries: tuple[RecoveryFacts, ...] = Field(
        description="recoveries inside the processes, oldest first"
    )
    restored: tuple[RestoredState, ...] = Field(
        description="for each attempt that began from a checkpoint, oldest first"
    )
    fault: Fault | None = Field(
        description="newest fault that ended an attempt, without fields at their defaults"
    )
    faults: tuple[RecentFault, ...] = Field(description="newest five, newest first")
    alerts: tuple[AlertRow, ...] = Field(description="open ones first, then the newest first")
    ettr: float | None = Field(description="time on steps that were kept over wall time, 0 to 1")
    wall_s: float = Field(description="time since the run was created, or until it ended")
    time_s: dict[str, float] = Field(description="wall time of each category that has any")
    checkpoints: dict[str, HeldCheckpoints] = Field(
        description="for each tier, or `program` for those that a command saves"
    )
    nodes: tuple[NodeStatus, ...] = Field(description="nodes of the placement; none once it ended")
    metrics_url: str | None = Field(
        description="address at which the open attempt serves Prometheus metrics"
    )

    @field_serializer("fault")
    def _without_defaults(self, fault: Fault | None) -> dict[str, Any] | None:
        if fault is None:
            return None
        facts: dict[str, Any] = _FAULT.dump_python(fault, mode="json", exclude_defaults=True)
        return facts

    @property
    def document(self) -> dict[str, Any]:
        """Plain values for scripts."""
        return self.model_dump(mode="json")
