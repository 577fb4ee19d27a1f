"""The records of the ledger: a frozen record per event in the life of a run.

Other processes and later versions read the ledger, so every record is a pydantic model with a
`kind` and refuses unknown fields. Times are seconds since the epoch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from perdure.storage.frozen_model import FrozenModel
from perdure.training.journal.events import LedgerEvent
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.rungs import Decision, Rung


class Record(FrozenModel):
    """The part of all records: their time, and the supervisor that wrote them."""

    at_s: float
    epoch: int = Field(ge=1, description="of the supervisor that wrote it, from 1")


class AttemptRecord(Record):
    """The part of all records about an attempt."""

    placement: int
    attempt: int


class RunCreated(Record):
    """First record of a run."""

    kind: Literal["run_created"] = "run_created"
    job: dict[str, Any]
    cwd: str | None = None


class SupervisorAcquired(Record):
    """A supervisor took the run; its epoch is higher than every one before.

    Attributes:
        flow_run: id of the flow run of the process; None without Prefect.
    """

    kind: Literal["supervisor_took"] = "supervisor_took"
    supervisor: str
    host: str
    pid: int
    flow_run: str | None = None


class DataReady(Record):
    """Token shards and their manifest are committed."""

    kind: Literal["data_ready"] = "data_ready"
    manifest_key: str
    num_tokens: int
    skipped: bool
    written_shards: int
    damaged_shards: int
    duration_s: float


class Member(FrozenModel):
    """A container of a placement.

    Attributes:
        index: node rank in the gang (VC_TASK_INDEX).
        node: name of its node.
        schedule_cnt: number of times that it was scheduled (MA_SCHEDULE_CNT).
    """

    index: int
    node: str
    schedule_cnt: int


class PlacementCreated(Record):
    """A new placement: the gang of containers of the next attempts.

    Attributes:
        host: host of the supervisor that made it; an engine of this machine is bound to it.
        boot_id: boot of that host; after a reboot nothing of the placement is left.
        home: Perdure's folder there.
        waited_s: wait for a free node before it.
        sub_healthy: reasons by node for the last place among the candidates.
    """

    kind: Literal["placed"] = "placed"
    placement: int
    members: tuple[Member, ...]
    avoid: tuple[str, ...]
    host: str = ""
    boot_id: str = ""
    home: str = ""
    waited_s: float = 0.0
    sub_healthy: dict[str, str] = Field({})


class NodeRefused(Record):
    """A node failed its checks before the first step: it is isolated, its member moves."""

    kind: Literal["node_refused"] = "node_refused"
    placement: int
    node: str
    why: str


class NodeReleased(Record):
    """The release of an isolated node; written without taking the run.

    By a user, who is taken to have repaired it, or by the node itself, which was lost and is back.
    Its earlier faults count no more.
    """

    kind: Literal["node_released"] = "node_released"
    node: str


class AttemptStarted(AttemptRecord):
    """The processes of an attempt were ordered to start."""

    kind: Literal["attempt_started"] = "attempt_started"
    from_step: int


class SetAsideCheckpoint(FrozenModel):
    """A checkpoint of a command that is renamed: kept, and found by no program again.

    Attributes:
        path: its place before.
        why: the reason, without the path.
    """

    step: int
    path: str
    why: str


class ResumeChosen(AttemptRecord):
    """The checkpoint that a command goes on from; written before it is used.

    Attributes:
        step: None: the command starts anew.
        path: its place on the nodes.
        set_aside: checkpoints that are renamed before the start.
    """

    kind: Literal["resume_chosen"] = "resume_chosen"
    step: int | None = None
    path: str | None = None
    set_aside: tuple[SetAsideCheckpoint, ...] = ()


class FirstStep(AttemptRecord):
    """An attempt completed its first step: the recovery before it is over."""

    kind: Literal["first_step"] = "first_step"
    step: int
    stepped_s: float


class AttemptEnded(AttemptRecord):
    """The end of an attempt: completed, failed, stopped on request, restarted, or from outside.

    The job asks for `restarted` at intervals. `ended from outside` is the end of everything at
    once, as at the end of an allocation. Neither has a fault, a decision or a budget.

    Attributes:
        runners_up: other causes that the evidence allows, most likely first.
        noticed_s: time of the notice of a fault that ended it; `fault.at_s` is its first symptom.
        stepped_s: time of the last step that the supervisor saw.
        lived_s: time of its last process's end; None where no agent has reported it.
        notes: warnings for the user about a good end.
        shown_target: last step of the training, as the output of a command has it.
    """

    kind: Literal["attempt_ended"] = "attempt_ended"
    outcome: Literal["completed", "failed", "stopped", "restarted", "ended from outside"]
    to_step: int | None
    proc_start_cnt: dict[str, int]
    fault: Fault | None = None
    runners_up: tuple[Fault, ...] = ()
    duration_s: float
    noticed_s: float | None = None
    stepped_s: float | None = None
    lived_s: float | None = None
    notes: tuple[str, ...] = ()
    shown_target: int | None = None

    @property
    def is_fault(self) -> bool:
        """Whether it failed, and did not merely ask to be started again."""
        asks = self.fault is not None and self.fault.fault_class is FaultClass.RESTART_REQUESTED
        return self.outcome == "failed" and not asks


class DecisionMade(AttemptRecord):
    """The decision about a fault; written before the action starts."""

    kind: Literal["decided"] = "decided"
    decision: Decision


class RungFailed(AttemptRecord):
    """The chosen rung could not be carried out; the ladder is asked again.

    Attributes:
        waited_s: wait for a free node before it.
    """

    kind: Literal["rung_failed"] = "rung_failed"
    rung: Rung
    why: str
    waited_s: float = 0.0


class CheckpointRecorded(AttemptRecord):
    """A checkpoint that an attempt committed.

    Attributes:
        path: place where a command has saved it; None where the store has it.
        size_bytes: size of the files there.
        written_s: time of the newest of its files.
    """

    kind: Literal["checkpoint"] = "checkpoint"
    step: int
    path: str | None = None
    size_bytes: int | None = None
    written_s: float | None = None


class AttemptEventRecorded(AttemptRecord):
    """An event of an attempt, copied from its log.

    The event has a time of its own; `at_s` is the time of the supervisor's reading.
    """

    kind: Literal["event"] = "event"
    event: LedgerEvent


class RunEnded(Record):
    """The run reached its end; a run that was cancelled or failed may be taken up again.

    Attributes:
        target_step: target of the job by then; None for a command without one.
        command: command of the job by then; None for a session.
        leftovers: what could not be taken down, and why; a later record without it: it is gone.
    """

    kind: Literal["run_ended"] = "run_ended"
    outcome: Literal["completed", "failed", "cancelled"]
    message: str
    target_step: int | None = None
    command: tuple[str, ...] | None = None
    leftovers: str = ""


class RunReopened(Record):
    """The wish of a user that a completed run goes on; written without taking the run."""

    kind: Literal["run_reopened"] = "run_reopened"


AnyRecord = Annotated[
    RunCreated
    | SupervisorAcquired
    | DataReady
    | PlacementCreated
    | NodeRefused
    | NodeReleased
    | AttemptStarted
    | ResumeChosen
    | FirstStep
    | AttemptEnded
    | DecisionMade
    | RungFailed
    | CheckpointRecorded
    | AttemptEventRecorded
    | RunEnded
    | RunReopened,
    Field(discriminator="kind"),
]

RECORD: TypeAdapter[AnyRecord] = TypeAdapter(AnyRecord)
