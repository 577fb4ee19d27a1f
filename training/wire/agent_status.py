"""The state of a node, as its agent reports it to supervisors.

Times are seconds since the epoch.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from perdure.storage.frozen_model import FrozenModel
from perdure.training.journal.waits import Wait
from perdure.training.wire.node import NodeSample


class AgentState(StrEnum):
    """Activity of an agent."""

    IDLE = "idle"
    STAGING = "staging"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


class Pulse(FrozenModel):
    """Contents of a worker's heartbeat beside step and phase.

    Attributes:
        entered: collectives entered since the process started.
        left: collectives that have come to their end.
        operation: the newest collective entered, with its group, such as "allreduce in world".
        waited_s: between the entering and the end of collectives, all together.
        data_s: spent on waiting for the data loader, all together.
        latency_s: duration of the newest collective with the votes of a step.
        beat_s: since the heartbeat was last written.
        step_age_s: since a step was last completed; None before the first step of the process.
        process_state: the kernel's letter for the state of the process.
        cpu_s: processor time of its session, counted until the process has completed a step.
        io_bytes: read and written by its session, counted until then.
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
        pid: process id.
        exit_code: None while it runs, and for a rank of a command; negative for a signal, as
            subprocess has it.
        step: completed steps by its heartbeat, -1 before the restore, None without heartbeat.
        phase: name of the heartbeat's phase.
        is_recovering: its process has ended, and the coordinator may replace it.
        generation: the process groups' generation, by the heartbeat.
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
        ended_s: time at which the agent noticed the end.
        error: last line of the exception it recorded.
        error_s: time at which the process recorded `error`.
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
        rank: None for a command whose silent rank is not known.
        why: what shows it beside the silence.
        stopped: processes of a command, of no rank, that a signal has stopped.
        ends_attempt: else it is only reported, for as long as it lasts.
        field: of the job, which raises the limit.
        is_slow_start: whether no step of this start is known.
        is_busy: whether its processes have computed meanwhile; None: not known.
    """

    rank: int | None
    silent_s: float
    limit_s: float
    phase: str
    step: int
    why: str = ""
    stopped: tuple[str, ...] = ()
    ends_attempt: bool = True
    field: str = ""
    is_slow_start: bool = False
    is_busy: bool | None = None


class ShownStep(FrozenModel):
    """The newest step that the output of a command shows.

    Attributes:
        step: completed steps.
        age_s: since it was printed.
        target: last step, by the program's output.
        first_step: the first step of the attempt that has a record; None before it.
        first_age_s: since that was printed.
    """

    step: int
    age_s: float
    target: int | None = None
    first_step: int | None = None
    first_age_s: float = 0.0


class SavedCheckpoint(FrozenModel):
    """A complete checkpoint that a command has saved, or the remains of a save.

    Attributes:
        path: file or folder, absolute.
        written_s: modification time of its newest file.
        saved_in: placement and attempt that saved it; None: not known, or it does not matter.
        member: owner of this part, where all members have parts of a checkpoint.
        is_whole: False: its save was cut short.
    """

    step: int
    path: str
    size_bytes: int
    written_s: float
    saved_in: tuple[int, int] | None = None
    member: int | None = None
    is_whole: bool = True


class LeftProcess(FrozenModel):
    """A process that a command has left running when it exited with 0.

    Attributes:
        name: its command line and pid, without secrets.
        trains: whether it is a rank, or a launcher of ranks.
    """

    pid: int
    name: str
    trains: bool


class FormerRank(FrozenModel):
    """A rank of a command's launcher whose process is not there any more.

    Attributes:
        ended_s: when the launcher and other ranks lived on without it; None: it ended with them.
        step: completed steps of the node by then; None: not known.
    """

    rank: int
    local_rank: int | None
    ended_s: float | None = None
    step: int | None = None


class ObstacleKind(StrEnum):
    """Kinds of things that only one process can have."""

    FILE = "file"
    PORT = "port"
    DEVICE = "device"


class Obstacle(FrozenModel):
    """A thing on a node that was in the way of an attempt, by its output.

    Attributes:
        name: path, number of a port, or path or number of a device.
        is_of_run: whether it is a file of this run that nobody holds.
        text: who holds it, or what becomes of it; no whole sentence.
    """

    kind: ObstacleKind
    name: str
    is_of_run: bool = False
    text: str


class CoordinatorEnd(FrozenModel):
    """How the coordinator ended that an agent had started, while its attempt went on.

    Attributes:
        exit_code: negative for a signal, as subprocess has it.
        line: last line of its log, or why the agent ended it.
        was_stopped: whether a signal had stopped it, so that the agent ended it.
    """

    exit_code: int
    ended_s: float
    line: str
    was_stopped: bool = False


class AgentStatus(FrozenModel):
    """The state of a node.

    Attributes:
        workers: the processes that the agent started: one per rank, or a single launcher.
        is_launcher: whether a single process has started the ranks itself.
        ranks: a command's ranks, as far as the agent knows them.
        world_size: ranks in the largest gang of which a launcher here started some; 0: not known.
        output_bytes: length of what the attempt's processes have printed.
        shown: step by the output of a command, where its job says how to read it.
        saved: the newest checkpoints that a command has saved in this attempt.
        left_running: by a command that exited with 0; it was ended with the attempt.
        former_ranks: ranks of a launcher that have ended.
        obstacles: things that the output of a failed attempt says to be taken.
        unwritable: why the node's scratch folder takes no files, once a start or a process has
            failed; empty where it does.
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
    world_size: int = 0
    hang: HangReport | None = None
    staging_error: str | None = None
    oom_kills: int = 0
    output_bytes: int = 0
    shown: ShownStep | None = None
    saved: tuple[SavedCheckpoint, ...] = ()
    left_running: tuple[LeftProcess, ...] = ()
    former_ranks: tuple[FormerRank, ...] = ()
    obstacles: tuple[Obstacle, ...] = ()
    mended_retries: dict[int, int] = Field({}, description="of HCCL, by rank, where there are any")
    sample: NodeSample | None = None
    metrics_url: str | None = Field(None, description="of the coordinator, where it is here")
    is_warm: bool = Field(False, description="whether session programs start without imports")
    coordinator_end: CoordinatorEnd | None = None
    unwritable: str = ""
    store_wait: Wait | None = Field(None, description="of its processes, for the run's store")

    def of_attempt(self, placement: int, attempt: int) -> AgentStatus:
        """Return the state of the node in this attempt: idle until its processes are ordered.

        Until then an agent reports the attempt before, whose steps, checkpoints and ends are none
        of this one.
        """
        if (self.placement, self.attempt) == (placement, attempt):
            return self
        return AgentStatus(
            node=self.node,
            member=self.member,
            state=AgentState.IDLE,
            schedule_cnt=self.schedule_cnt,
            proc_start_cnt=self.proc_start_cnt,
            placement=0,
            attempt=0,
            sample=self.sample,
            is_warm=self.is_warm,
            unwritable=self.unwritable,
            store_wait=self.store_wait,
            is_terminated=self.is_terminated,
            version=self.version,
        )

    is_terminated: bool = Field(False, description="whether SIGTERM, and no order, ends the agent")
    version: str = Field("", description="of Perdure in the container; empty: it names none")

    @property
    def known_ranks(self) -> tuple[RankStatus, ...]:
        """The ranks of this node, of a command as far as they are known."""
        return self.ranks if self.is_command else self.workers

    @property
    def steps(self) -> tuple[int, ...]:
        """Completed steps, by every sign that there is of them: heartbeats and output."""
        beats = (rank.step for rank in self.known_ranks)
        shown = (self.shown.step,) if self.shown is not None else ()
        return (*(step for step in beats if step is not None and step >= 0), *shown)

    @property
    def is_over(self) -> bool:
        """Whether the attempt's processes on this node are gone."""
        return self.state in (AgentState.ENDED, AgentState.IDLE)
