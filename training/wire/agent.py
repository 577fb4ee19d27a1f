"""The messages of supervisors and node agents, and the configuration of an agent.

One JSON object per line over TCP, request then reply. Every request carries the agent's token
and the supervisor's epoch; an agent that has received an epoch refuses a lower epoch, so a
superseded supervisor cannot start or stop anything. Times are seconds since the epoch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SecretStr, SerializationInfo, TypeAdapter, field_serializer

from perdure.storage.frozen_model import FrozenModel
from perdure.training.config.command import ProgramCheckpointsSpec
from perdure.training.config.drill import Victim
from perdure.training.config.job import Job
from perdure.training.recovery.protocol import ChipReported, NodeGone, NotReplaced, RecoveryBegan
from perdure.training.recovery.rungs import Recovery, Rung
from perdure.training.wire.agent_status import AgentStatus, SavedCheckpoint
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
    PingTarget,
)
from perdure.training.wire.preparation import PrepareOrder, PrepareReply
from perdure.training.wire.transport import INTO_A_CONNECTION

NO_MEMBER = -1  # the member of a warm spare


class AgentConfig(FrozenModel):
    """Configuration of an agent, from the engine in its container; holds the token, mode 0600."""

    run_id: str
    node: str
    member: int = Field(description="member of the container; NO_MEMBER: it is a warm spare")
    schedule_cnt: int
    token: str
    epoch: int = Field(
        description="of the supervisor that made the container; lower ones are refused"
    )
    host: str = "127.0.0.1"
    port: int = Field(0, description="port to listen on; 0: a free port")
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
        0.0,
        description="limit for another coordinator to come after the loss of the first; 0: none",
    )
    rank_table: str | None = Field(None, description="hccl.json; None: none is asked for")
    resume_step: int | None = Field(
        None, description="of the command's checkpoint from which it goes on"
    )
    resume_attempt: tuple[int, int] | None = Field(
        None, description="placement and attempt that saved it, where that has to be the same"
    )
    created_s: float = Field(0.0, description="when the run was; what is older is none of it")
    leftovers: tuple[str, ...] = Field(
        (), description="files that were in the way of earlier attempts, removed before the start"
    )
    start_factor: float = Field(1.0, ge=1, description="times the limits before the first step")
    ends_slow_start: bool = Field(
        True,
        description="whether a hang before the first step ends the attempt; else it is "
        "reported, and the supervisor decides by all nodes",
    )
    secrets: dict[str, SecretStr] = Field(
        {}, description="values of the job's env_from that are in Prefect blocks, by variable"
    )

    @field_serializer("secrets", when_used="json")
    def _secrets_into_connections(
        self, secrets: dict[str, SecretStr], info: SerializationInfo
    ) -> dict[str, str]:
        """Show secrets on the way to an agent alone; all other text of an order has a mask."""
        is_shown = info.context == INTO_A_CONNECTION
        return {
            n: secret.get_secret_value() if is_shown else str(secret)
            for n, secret in secrets.items()
        }

    @property
    def delivered(self) -> dict[str, str]:
        """The secrets in clear text."""
        return {name: secret.get_secret_value() for name, secret in self.secrets.items()}

    def without_secrets(self) -> StartOrder:
        """Copy the order for processes that start no worker."""
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
    """Ask for the step records written after `offset` bytes.

    Attributes:
        of_attempt: placement and attempt, so that the log of an earlier attempt is not read;
            None: the newest.
    """

    op: Literal["metrics"] = "metrics"
    offset: int
    of_attempt: tuple[int, int] | None = None


class EvidenceQuery(FrozenModel):
    """Ask for device logs and for what the driver's tools report; takes seconds.

    Attributes:
        of_attempt: placement and attempt; a node that has not begun it has nothing; None: the
            newest.
    """

    op: Literal["evidence"] = "evidence"
    tail_bytes: int = Field(ge=1, le=1 << 20)
    of_attempt: tuple[int, int] | None = None


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
        pings: ports of other nodes, whose answers are checked.
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
    pings: tuple[PingTarget, ...] = ()


class ShutdownOrder(FrozenModel):
    """Stop the processes and end the agent: the container goes away."""

    op: Literal["shutdown"] = "shutdown"
    grace_s: float


class NoticeOrder(FrozenModel):
    """Pass on to the coordinator of the attempt what only the supervisor knows."""

    op: Literal["notice"] = "notice"
    placement: int
    attempt: int
    message: NodeGone | ChipReported | NotReplaced


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
        variables: the command's variables, for the path.
        run_id: name of the run.
        since_s: what was written before is none of the run.
        until_s: when the command ended; what was just written then may be half of a checkpoint.
        is_over: whether its processes are known to have ended: nothing is written any more.
        is_in_parts: whether each node has a part of its own.
        torn: paths to rename where this node finds a save there that was cut short.
        unreadable: paths of checkpoints to rename, so that no program finds them.
    """

    op: Literal["saved"] = "saved"
    spec: ProgramCheckpointsSpec
    cwd: str
    variables: dict[str, str]
    run_id: str
    since_s: float
    until_s: float
    is_over: bool = False
    is_in_parts: bool = False
    torn: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()


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
    | PrepareOrder
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
    preparation: PrepareReply | None = None
    devices: NodeDevices | None = None
    at_s: float | None = None
    collected: Collected | None = None
    saved: tuple[SavedCheckpoint, ...] = ()
    num_killed: int = 0


REQUEST: TypeAdapter[Request] = TypeAdapter(Request)
