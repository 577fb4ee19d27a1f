"""The messages of supervisors and node agents, and the configuration of an agent.

One JSON object per line over TCP, request then reply. Every request carries the agent's token
and the supervisor's epoch; an agent that has received a higher epoch refuses a lower one, so a
superseded supervisor cannot start or stop anything. Times are seconds since the epoch.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, SecretStr, SerializationInfo, TypeAdapter, field_serializer

from perdure.storage.frozen_model import FrozenModel
from perdure.training.config.command import ProgramCheckpointsSpec
from perdure.training.config.drill import Victim
from perdure.training.config.job import Job
from perdure.training.recovery.protocol import NodeGone, NotReplaced, RecoveryBegan
from perdure.training.recovery.rungs import Recovery, Rung
from perdure.training.wire.coordinator import CoordinatorAddress
from perdure.training.wire.logs import (
    Collected,
    CollectOrder,
    LogPiece,
    LogsQuery,
    ReadLogsQuery,
    WorkerLog,
)
from perdure.training.wire.node import (
    Check,
    DevicesQuery,
    HealOrder,
    HealReply,
    NodeDevices,
    NodeSample,
)
from perdure.training.wire.transport import INTO_A_CONNECTION

NO_MEMBER = -1  # of a container that stands by


class AgentConfig(FrozenModel):
    """What the engine writes into a container for its agent; holds the token, mode 0600."""

    run_id: str
    node: str
    member: int = Field(description="whose container it is; NO_MEMBER: it stands by for one")
    schedule_cnt: int
    token: str
    epoch: int = Field(
        description="of the supervisor that made the container; lower ones are refused"
    )
    host: str = "127.0.0.1"
    port: int = Field(0, description="that it listens on; 0: one that is free")
    on_loopback: bool = Field(
        False, description="whether it listens there, too, where a port-forward comes from"
    )
    orphan_timeout_s: float
    start_timeout_s: float
    hang_timeout_s: float | None
    save_timeout_s: float | None = None
    restore_timeout_s: float | None = None
    evaluate_timeout_s: float = 3600.0
    command_quiet_s: float = 1800.0
    detect_hangs: bool
    hangs_end_attempt: bool = Field(True, description="else a hang is only reported")
    node_folder: str | None = Field(
        None, description="folder of the node that outlives its containers"
    )
    variables: dict[str, str] | None = Field(
        None, description="of session programs, for which a fork server is started at once"
    )
    is_drill: bool = Field(False, description="whether orders to kill are obeyed")


class AgentAddress(FrozenModel):
    """Where a living agent listens, and which process it is."""

    pid: int
    process_started_s: float
    host: str
    port: int


class StartOrder(FrozenModel):
    """Start the processes of an attempt."""

    op: Literal["start"] = "start"
    placement: int
    attempt: int
    num_nodes: int
    slots_per_node: int
    hosts: tuple[str, ...]
    master_addr: str
    master_port: int
    command: tuple[str, ...]
    is_command: bool
    is_launcher: bool = Field(description="the command is started once per node")
    cwd: str
    grace_s: float
    failover_grace_s: int = Field(3, description="for those that a fault has left; -1: no force")
    log_path: str | None
    variables: dict[str, str]
    job: Job = Field(description="it holds no secrets")
    data_manifest_key: str | None
    past: tuple[Recovery, ...] = Field((), description="recoveries so far, oldest first")
    coordinator: CoordinatorAddress | None = None
    generation: int | None = Field(
        None, description="of the process groups, where its ranks join the living ones of others"
    )
    rejoin_s: float = Field(
        0.0, description="for another coordinator to come when the one before is gone; 0: none"
    )
    rank_table: str | None = Field(None, description="hccl.json; None: none is asked for")
    resume_step: int | None = Field(
        None, description="of the command's checkpoint from which it goes on"
    )
    resume_attempt: tuple[int, int] | None = Field(
        None, description="placement and attempt that saved it, where that has to be the same one"
    )
    created_s: float = Field(0.0, description="when the run was; what is older is none of it")
    secrets: dict[str, SecretStr] = Field(
        {}, description="values of the job's env_from that are in Prefect blocks, by variable"
    )

    @field_serializer("secrets", when_used="json")
    def _secrets_into_connections(
        self, secrets: dict[str, SecretStr], info: SerializationInfo
    ) -> dict[str, str]:
        """In clear text on the way to an agent alone: whatever else writes an order has a mask."""
        is_shown = info.context == INTO_A_CONNECTION
        return {n: one.get_secret_value() if is_shown else str(one) for n, one in secrets.items()}

    @property
    def delivered(self) -> dict[str, str]:
        """The secrets in clear text."""
        return {name: one.get_secret_value() for name, one in self.secrets.items()}

    def without_secrets(self) -> StartOrder:
        """The same order for those that start no worker."""
        return self.model_copy(update={"secrets": {}})


class AssignOrder(FrozenModel):
    """Become the container of a member; the container has stood by until now.

    Attributes:
        schedule_cnt: how many times the member has been scheduled with it.
    """

    op: Literal["assign"] = "assign"
    member: int = Field(ge=0)
    schedule_cnt: int


class StopOrder(FrozenModel):
    """Stop the processes: SIGTERM, and SIGKILL after the grace period; below 0 it never ends."""

    op: Literal["stop"] = "stop"
    grace_s: float


class RendezvousOrder(FrozenModel):
    """Open the rendezvous of an attempt on this node (node rank 0 only).

    For commands that is a free port. For session programs it is the coordinator, which has the
    store. Repeated for the same attempt it gives the same answer: workers may be using it
    already.

    Attributes:
        start: the attempt that it is for, as far as it is known yet.
        supported: rungs that the engine can do.
        resumes: the recovery that a coordinator takes up which was on a node that is lost; None:
            it is the attempt's first.
    """

    op: Literal["rendezvous"] = "rendezvous"
    port: int
    start: StartOrder
    supported: tuple[Rung, ...]
    resumes: RecoveryBegan | None = None


class StatusQuery(FrozenModel):
    """Ask for the state of the node."""

    op: Literal["status"] = "status"


class MetricsQuery(FrozenModel):
    """Ask for the step records written after `offset` bytes."""

    op: Literal["metrics"] = "metrics"
    offset: int


class EvidenceQuery(FrozenModel):
    """Ask for device logs and for what the driver's tools report; takes seconds."""

    op: Literal["evidence"] = "evidence"
    tail_bytes: int = Field(ge=1, le=1 << 20)


class StacksQuery(FrozenModel):
    """Ask for the stacks of every worker's threads; takes seconds."""

    op: Literal["stacks"] = "stacks"


class ClockQuery(FrozenModel):
    """Ask for the node's clock, and for a port of it that is free."""

    op: Literal["greet"] = "greet"


class CheckOrder(FrozenModel):
    """Check the node, and the gang with the others; takes seconds.

    Attributes:
        state_bytes: model and optimizer state of the whole job; None: not known.
        is_new: whether the node itself is checked; otherwise it takes part in the gang alone.
        gang_host: where the first node's first rank listens; None: no check of the gang.
        variables: environment of the workers.
    """

    op: Literal["check"] = "check"
    job: Job
    num_nodes: int
    slots_per_node: int
    state_bytes: int | None
    is_new: bool
    gang_host: str | None
    gang_port: int = 0
    variables: dict[str, str]
    timeout_s: float


class ShutdownOrder(FrozenModel):
    """Stop the processes and end the agent: the container goes away."""

    op: Literal["shutdown"] = "shutdown"
    grace_s: float


class NoticeOrder(FrozenModel):
    """Pass on to the coordinator of the attempt what only the supervisor knows."""

    op: Literal["notice"] = "notice"
    placement: int
    attempt: int
    message: NodeGone | NotReplaced


class RejoinOrder(FrozenModel):
    """The coordinator of the attempt is on another node: agent and ranks go over to it."""

    op: Literal["rejoin"] = "rejoin"
    placement: int
    attempt: int
    coordinator: CoordinatorAddress


class SavedQuery(FrozenModel):
    """Ask for the complete checkpoints that a command has saved where this node sees them.

    Attributes:
        spec: where, and of which kind.
        cwd: folder of the command.
        variables: its own, for the path.
        run_id: of the command.
        since_s: what was written before is none of the run.
        until_s: when the command ended; what was just written then may be half of a checkpoint.
        is_in_parts: whether each node has a part of its own.
    """

    op: Literal["saved"] = "saved"
    spec: ProgramCheckpointsSpec
    cwd: str
    variables: dict[str, str]
    run_id: str
    since_s: float
    until_s: float
    is_in_parts: bool = False


class KillOrder(FrozenModel):
    """SIGKILL something of this container; refused unless the run is a drill.

    Attributes:
        rank: global rank, where a rank is the victim.
    """

    op: Literal["kill"] = "kill"
    victim: Victim
    rank: int | None = None


Order = Annotated[
    StartOrder
    | AssignOrder
    | StopOrder
    | RendezvousOrder
    | StatusQuery
    | MetricsQuery
    | LogsQuery
    | ReadLogsQuery
    | EvidenceQuery
    | StacksQuery
    | CollectOrder
    | ClockQuery
    | DevicesQuery
    | CheckOrder
    | SavedQuery
    | HealOrder
    | KillOrder
    | NoticeOrder
    | RejoinOrder
    | ShutdownOrder,
    Field(discriminator="op"),
]


class Request(FrozenModel):
    """One line from a supervisor."""

    token: SecretStr
    epoch: int
    order: Order


class AgentState(StrEnum):
    """What an agent is doing."""

    IDLE = "idle"
    STAGING = "staging"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


class Pulse(FrozenModel):
    """What a worker's heartbeat holds beside step and phase.

    Attributes:
        entered: collectives entered since the process started.
        left: collectives that have come to their end.
        operation: the newest one entered, with its group, such as "allreduce in world".
        waited_s: between the entering and the end of collectives, all together.
        data_s: spent on waiting for the data loader, all together.
        latency_s: of the newest collective that carries the votes of a step.
        beat_s: since the heartbeat was last written.
        step_age_s: since a step was last completed; None before the first one of the process.
        process_state: the kernel's letter for the state of the process.
        cpu_s: processor time of its session, counted until the process has completed a step.
        io_bytes: read and written by its session, likewise.
    """

    entered: int
    left: int
    operation: str = ""
    waited_s: float = 0.0
    data_s: float = 0.0
    latency_s: float = 0.0
    beat_s: float = 0.0
    step_age_s: float | None = None
    process_state: str = ""
    cpu_s: float = 0.0
    io_bytes: int = 0


class RankStatus(FrozenModel):
    """One rank.

    Attributes:
        rank: global rank; None for a process of a command that has none.
        local_rank: device; None where a command's launcher does not name it.
        pid: of its process.
        exit_code: None while it runs, and for a rank of a command; negative for a signal, as
            subprocess has it.
        step: completed steps by its heartbeat, -1 before the restore, None without heartbeat.
        phase: name of the heartbeat's phase.
        is_recovering: its process has ended, and the coordinator may replace it.
        generation: of the process groups, by its heartbeat.
        pulse: what else its heartbeat holds.
    """

    rank: int | None
    local_rank: int | None
    pid: int
    exit_code: int | None = None
    step: int | None = None
    phase: str | None = None
    is_recovering: bool = False
    generation: int | None = None
    pulse: Pulse | None = None


class WorkerStatus(RankStatus):
    """One process that the agent started.

    Attributes:
        rank: global rank; of a launcher the index of the node.
        ended_s: when its end was noticed.
        error: last line of the exception it recorded.
        error_s: when it recorded it.
        stopped_by_agent: whether the agent had asked it to stop before it ended.
        ended_early: a session program that exited with 0 before its target; see `error`.
    """

    rank: int
    local_rank: int
    ended_s: float | None = None
    error: str | None = None
    error_s: float | None = None
    stopped_by_agent: bool = False
    ended_early: bool = False


class HangReport(FrozenModel):
    """A local rank that has been silent beyond its limit.

    Attributes:
        rank: None for a command, none of whose ranks is known to be the one.
        why: what shows it beside the silence.
        stopped: processes of a command, of no rank, that a signal has stopped.
        ends_attempt: else it is only reported, for as long as it lasts.
    """

    rank: int | None
    silent_s: float
    limit_s: float
    phase: str
    step: int
    why: str = ""
    stopped: tuple[str, ...] = ()
    ends_attempt: bool = True


class ShownStep(FrozenModel):
    """The newest step that the output of a command shows.

    Attributes:
        step: completed steps.
        age_s: since it was printed.
        target: where the program says that it ends.
    """

    step: int
    age_s: float
    target: int | None = None


class SavedCheckpoint(FrozenModel):
    """A complete checkpoint that a command has saved.

    Attributes:
        path: file or folder, absolute.
        written_s: when the newest of its files was.
        saved_in: placement and attempt that saved it; None: not known, or it does not matter.
        member: whose part it is, of a checkpoint that consists of all members' parts.
    """

    step: int
    path: str
    size_bytes: int
    written_s: float
    saved_in: tuple[int, int] | None = None
    member: int | None = None


class LeftProcess(FrozenModel):
    """A process that a command has left running when it exited with 0.

    Attributes:
        name: its command line and pid, without secrets.
        trains: whether it is a rank, or a launcher of ranks.
    """

    pid: int
    name: str
    trains: bool


class CoordinatorEnd(FrozenModel):
    """How the coordinator ended that an agent had started, while its attempt went on.

    Attributes:
        exit_code: negative for a signal, as subprocess has it.
        line: the last one of its log, or why the agent ended it.
        was_stopped: whether a signal had stopped it, so that the agent ended it.
    """

    exit_code: int
    ended_s: float
    line: str
    was_stopped: bool = False


class AgentStatus(FrozenModel):
    """The state of a node.

    Attributes:
        workers: the processes that the agent started: one per rank, of a launcher one in all.
        is_launcher: whether that one process has started the ranks itself.
        ranks: of a command, as far as they are known.
        output_bytes: length of what the attempt's processes have printed.
        shown: step by the output of a command, where its job says how to read it.
        saved: the newest checkpoints that a command has saved in this attempt.
        left_running: by a command that exited with 0; it was ended with the attempt.
    """

    node: str
    member: int
    state: AgentState
    schedule_cnt: int
    proc_start_cnt: int
    placement: int
    attempt: int
    workers: tuple[WorkerStatus, ...] = ()
    is_command: bool = False
    is_launcher: bool = False
    ranks: tuple[RankStatus, ...] = ()
    hang: HangReport | None = None
    staging_error: str | None = None
    oom_kills: int = 0
    output_bytes: int = 0
    shown: ShownStep | None = None
    saved: tuple[SavedCheckpoint, ...] = ()
    left_running: tuple[LeftProcess, ...] = ()
    mended_retries: dict[int, int] = Field({}, description="of HCCL, by rank, where there are any")
    sample: NodeSample | None = None
    metrics_url: str | None = Field(None, description="of the coordinator, where it is here")
    is_warm: bool = Field(False, description="whether session programs start without imports")
    coordinator_end: CoordinatorEnd | None = None

    @property
    def known_ranks(self) -> tuple[RankStatus, ...]:
        """The ranks of this node, of a command as far as they are known."""
        return self.ranks if self.is_command else self.workers

    @property
    def steps(self) -> tuple[int, ...]:
        """Completed steps, by every sign that there is of them: heartbeats and output."""
        beats = (one.step for one in self.known_ranks)
        shown = (self.shown.step,) if self.shown is not None else ()
        return (*(step for step in beats if step is not None and step >= 0), *shown)

    @property
    def is_over(self) -> bool:
        """Whether the attempt's processes on this node are gone."""
        return self.state in (AgentState.ENDED, AgentState.IDLE)


class NodeLog(FrozenModel):
    """Text of a node that is no worker's output.

    Attributes:
        name: file, or command that printed it.
        rank: global rank that it is about, when known.
        device: local device index that it is about, when known.
    """

    name: str
    rank: int | None = None
    device: int | None = None
    text: str


class AgentReply(FrozenModel):
    """One line back; `error` is set when the request was refused."""

    error: str | None = None
    status: AgentStatus | None = None
    port: int | None = None
    coordinator: CoordinatorAddress | None = None
    text: str | None = None
    offset: int | None = None
    logs: tuple[WorkerLog, ...] = ()
    texts: tuple[NodeLog, ...] = ()
    pieces: tuple[LogPiece, ...] = ()
    checks: tuple[Check, ...] = ()
    healing: HealReply | None = None
    devices: NodeDevices | None = None
    at_s: float | None = None
    collected: Collected | None = None
    saved: tuple[SavedCheckpoint, ...] = ()
    num_killed: int = 0


REQUEST: TypeAdapter[Request] = TypeAdapter(Request)
