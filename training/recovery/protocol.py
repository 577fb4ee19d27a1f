"""What ranks report, what the coordinator orders them to do, and what it puts on record.

The state machine in attempt.py uses these; training/wire carries the messages between processes,
and the attempt log keeps the events, each written before it is acted on. Times are seconds since
the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from perdure.storage.frozen_model import FrozenModel
from perdure.training.recovery.faults import Fault
from perdure.training.recovery.healing import HealPlan
from perdure.training.recovery.repair import RankReport, RepairPlan
from perdure.training.recovery.replicas import ParallelLayout
from perdure.training.recovery.rungs import Decision, Rung


class CoordinatorMessage(FrozenModel):
    """Immutable, and an unknown field is an error."""


class WorkerFaultKind(StrEnum):
    """What a worker noticed, as far as it knows."""

    CONNECTION = "connection"  # a connection to another rank broke
    LINK = "link"  # a link between devices failed, as the device says; the state is whole (HCCE)
    COLLECTIVE = "collective"  # a collective failed or timed out; the state is whole (HCCE)
    MEMORY = "memory"  # this rank's device memory is not to be trusted (UCE)
    NUMERIC = "numeric"  # loss or gradient norm is abnormal (TRE)
    REPAIR = "repair"  # a recovery failed here


class WorkerFault(CoordinatorMessage):
    """A fault that the worker's process outlived."""

    op: Literal["worker_fault"] = "worker_fault"
    generation: int
    kind: WorkerFaultKind
    text: str
    step: int
    at_s: float
    code: str | None = None
    grad_norm: float | None = Field(None, description="of the step, where it was agreed on")
    culprit: int | None = Field(None, description="rank whose own loss made the step abnormal")
    is_finite: bool = True
    connection: int | None = Field(
        None,
        description="how often the connections that broke had been re-established before, "
        "where they can be again; None: a new generation is needed",
    )


class Reconnected(CoordinatorMessage):
    """A rank has re-established its connections, and what was cut short runs again.

    Attributes:
        operations: how many were run again here.
        problem: why it did not work, None when it did.
    """

    op: Literal["reconnected"] = "reconnected"
    generation: int
    connection: int
    operations: int = 0
    problem: str | None = None


class GenerationReport(CoordinatorMessage):
    """A rank's report for a generation."""

    op: Literal["generation_report"] = "generation_report"
    generation: int
    report: RankReport


class Trains(CoordinatorMessage):
    """A rank trains in a generation, from a step on.

    Attributes:
        layout: of its program, where it was known after the rank had joined; None: as before.
    """

    op: Literal["trains"] = "trains"
    generation: int
    step: int
    layout: ParallelLayout | None = None


class Paused(CoordinatorMessage):
    """A rank is paused at a step boundary, or continues from it."""

    op: Literal["paused"] = "paused"
    step: int
    is_paused: bool


class LastSaved(CoordinatorMessage):
    """A survivor's part in the end-of-life checkpoint is over.

    Attributes:
        problem: why it was not written, None when it was.
    """

    op: Literal["last_saved"] = "last_saved"
    step: int
    problem: str | None = None


class Ending(CoordinatorMessage):
    """A rank came to the end of its loop: from here on nothing is recovered inside processes."""

    op: Literal["ending"] = "ending"
    step: int


class WorkerEnded(CoordinatorMessage):
    """A worker process ended other than well.

    Attributes:
        exit_code: negative for a signal, as subprocess has it.
        device: local rank on the node.
        error: last line of the exception that it recorded.
        is_oom: the kernel killed something in the container for memory.
    """

    op: Literal["worker_ended"] = "worker_ended"
    rank: int
    device: int
    exit_code: int
    error: str | None = None
    is_oom: bool = False
    at_s: float


class NotReplaced(CoordinatorMessage):
    """The agent cannot start the process that it was ordered to start."""

    op: Literal["not_replaced"] = "not_replaced"
    rank: int
    why: str


class NodeGone(CoordinatorMessage):
    """A node of the attempt is lost, or to be left, as the supervisor knows it.

    Attributes:
        fault: with the node; what shows it.
        ranks: of the node, as it was placed; a coordinator may never have heard of them.
    """

    op: Literal["node_gone"] = "node_gone"
    fault: Fault
    ranks: tuple[int, ...]


class ChipReported(CoordinatorMessage):
    """A chip reports a fault while its process lives, as the supervisor knows it.

    Attributes:
        fault: with node, device and code.
        no_other_node: why no other node can take the place of the fault's, None where one may.
    """

    op: Literal["chip_reported"] = "chip_reported"
    fault: Fault
    no_other_node: str | None = None


class NewGeneration(CoordinatorMessage):
    """A generation of the process groups begins; the one before is over."""

    op: Literal["generation"] = "generation"
    number: int


class Plan(CoordinatorMessage):
    """What every rank does in a new generation before it trains."""

    op: Literal["plan"] = "plan"
    generation: int
    plan: RepairPlan


class Reconnect(CoordinatorMessage):
    """Re-establish connections in the same generation, and run again what was cut short."""

    op: Literal["reconnect"] = "reconnect"
    generation: int
    connection: int


class PauseRequest(CoordinatorMessage):
    """Pause at the next step boundary, or continue."""

    op: Literal["pause"] = "pause"
    wanted: bool


class ReplaceWorker(CoordinatorMessage):
    """End the process of a rank if it still lives, and start a new one.

    Attributes:
        check: of its chip in between, where hardware was at fault; None: none.
    """

    op: Literal["replace"] = "replace"
    rank: int
    generation: int
    check: HealPlan | None = None


class GiveUp(CoordinatorMessage):
    """Nothing inside the processes saves the attempt: report their ends and stop the rest."""

    op: Literal["give_up"] = "give_up"
    why: str


class Gathered(CoordinatorMessage):
    """The documents of all ranks, by rank, for ranks that have each sent one.

    Attributes:
        number: of the exchange in this attempt.
    """

    op: Literal["gathered"] = "gathered"
    number: int
    documents: tuple[str, ...]


ToMember = Annotated[
    NewGeneration | Plan | Reconnect | PauseRequest | ReplaceWorker | GiveUp | Gathered,
    Field(discriminator="op"),
]


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
        moved: ranks whose node is left, all of its.
    """

    kind: Literal["recovery_began"] = "recovery_began"
    generation: int
    fault: Fault
    decision: Decision
    moved: tuple[int, ...] = ()

    @property
    def replaced(self) -> frozenset[int]:
        """Ranks that get a new process."""
        replaces, rank = self.decision.rung is Rung.PROCESS_REPLACE, self.fault.rank
        return frozenset({rank} if replaces and rank is not None else self.moved)


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


class AttemptGivenUp(AttemptEvent):
    """No rung inside the processes answers a fault: they are about to end.

    Attributes:
        fault: as far as ends of processes and reports of ranks show it; a rank that was replaced
            before has left no other trace.
        why: nothing answers it here.
    """

    kind: Literal["given_up"] = "given_up"
    fault: Fault
    why: str


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


RecoveryEvent = RecoveryBegan | RecoveryEnded | AttemptGivenUp | LastSave | PauseBegan | PauseEnded
