"""The evidence of an attempt that has ended, from which a diagnosis starts.

Times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from perdure.training.diagnosis.ending import FalseSuccess
from perdure.training.diagnosis.exits import EXIT_DONE
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.protocol import AttemptGivenUp
from perdure.training.wire.agent_status import Obstacle
from perdure.training.wire.rank_snapshot import RankSnapshot


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """The end of a worker.

    Attributes:
        rank: None for a command, whose process has all the ranks of its node.
        device: None for a command.
        exit_code: negative for a signal.
        error: last line of the exception that it recorded; None without an exception.
        log: the end of its output.
        stopped: whether a request to stop came before its end.
        bad_end: the reason why its exit with 0 was a failure.
        log_path: path of its output on its node.
        is_command: whether its exit codes are its own, not those agreed with the runtime.
    """

    rank: int | None
    node: str
    device: int | None
    exit_code: int
    ended_s: float
    error: str | None = None
    log: str = ""
    stopped: bool = False
    log_path: str | None = None
    bad_end: FalseSuccess | None = None
    is_command: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether its end was a failure."""
        return self.exit_code != EXIT_DONE or self.bad_end is not None

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"rank {self.rank}" if self.rank is not None else f"the command on {self.node}"


@dataclass(frozen=True, slots=True)
class EndedRank:
    """A rank of a command, or its launcher on a node, that exited with 0 before the others.

    Attributes:
        rank: None for a launcher, which has all the ranks of its node.
        ended_s: None: at the same time as its launcher, which lists the ranks that failed.
        step: the newest step when it ended; None: not known.
        went_on: whether other ranks have completed further steps without it.
    """

    rank: int | None
    node: str
    device: int | None
    ended_s: float | None
    step: int | None = None
    went_on: bool = False

    @property
    def line(self) -> str:
        """The text of its evidence."""
        place = f" after step {self.step}" if self.step is not None else ""
        peers = "trained on" if self.went_on else "had not come to their end"
        return f"{self.name} ended with exit code 0{place}, while the other ranks {peers}"

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"rank {self.rank}" if self.rank is not None else f"the command on {self.node}"


@dataclass(frozen=True, slots=True)
class SilentRank:
    """A rank without progress beyond its limit.

    Attributes:
        rank: None for a command: its silence does not show which rank holds the others up.
        node: None where the nodes do not differ.
        why: the sign of the silence.
        stopped: its processes, of no rank, that a signal has stopped.
        field: of the job, which raises the limit.
        is_slow_start: whether no step of this start is known.
        is_busy: whether its processes have computed meanwhile; None: not known.
    """

    rank: int | None
    node: str | None
    silent_s: float
    limit_s: float
    phase: str
    why: str = ""
    stopped: Sequence[str] = ()
    field: str = ""
    is_slow_start: bool = False
    is_busy: bool | None = None

    @property
    def limit(self) -> str:
        """The limit and its field."""
        longer = f" (raise {self.field} if it needs longer)" if self.field else ""
        return f"limit {self.limit_s:.0f} s{longer}"

    @property
    def line(self) -> str:
        """The text of its evidence."""
        where = self.node if self.node is not None else "every node"
        subject = f"rank {self.rank}" if self.rank is not None else f"the command on {where}"
        if self.stopped:
            return f"{subject}: stopped by a signal: {', '.join(self.stopped)}"
        silence = f"no progress for {self.silent_s:.0f} s in phase {self.phase}"
        return f"{subject}: {silence}, {self.limit}{f': {self.why}' if self.why else ''}"


@dataclass(frozen=True, slots=True)
class CoordinatorLost:
    """A coordinator that ended before its attempt.

    Attributes:
        exit_code: negative for a signal.
        line: last line of its log, or the reason why the supervisor ended it.
        was_stopped: whether the supervisor ended it because a signal had stopped it.
    """

    node: str
    exit_code: int
    ended_s: float
    line: str
    was_stopped: bool = False


@dataclass(frozen=True, slots=True)
class NodeLoss:
    """The loss of a node's container, as the engine knows it.

    Attributes:
        code: symptom code, such as "POD_EVICTED".
        line: its evidence in the words of the platform.
        why: its meaning, a sentence; empty for the meaning of the class.
    """

    node: str
    fault_class: FaultClass
    code: str
    line: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class SlowNode:
    """A node that is evacuated because its rank holds the other ranks up."""

    node: str
    rank: int | None
    device: int | None
    text: str


@dataclass(frozen=True, slots=True)
class SmallWorld:
    """A gang of a launcher's ranks that is smaller than the job's.

    Attributes:
        size: ranks of the largest gang.
        nodes: of the job.
        slots: of each node.
        separate_nodes: nodes with a rank 0; more than one train separately.
    """

    size: int
    nodes: int
    slots: int
    separate_nodes: tuple[str, ...]

    @property
    def line(self) -> str:
        """The text of its evidence, with the numbers."""
        ranks = f"{self.size} {'rank' if self.size == 1 else 'ranks'}"
        job = f"the job has {self.nodes * self.slots} (engine.nodes {self.nodes} x "
        text = f"the launcher started a gang of {ranks}, {job}slots_per_node {self.slots})"
        if len(self.separate_nodes) < 2:
            return text
        return f"{text}: {', '.join(self.separate_nodes)} trained separately"


@dataclass(frozen=True, slots=True)
class NodeOutput:
    """Text of a node beside its workers' output: a device log, or a health command's output."""

    node: str
    name: str
    text: str
    rank: int | None = None
    device: int | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """All facts about the end of an attempt.

    Attributes:
        losses: containers that the engine has lost, or is about to lose.
        chip: fault that a chip reported while processes lived, and that they were ended for.
        chips: all such faults of the attempt; a hang that began with one is that one.
        rank_progress: progress of all ranks at the moment when a rank was silent.
        unwritable: nodes whose scratch folder takes no files, with the reason and the path.
        is_late_start: whether `refusal` is that nodes took too long to start their processes.
        given_up: the fault for which the coordinator ended all processes before any other order
            to end them; None where there was none.
        ended_ranks: ranks of a command that left before the others.
        restart_codes: exit codes by which the program asks to be started again.
        obstacles: things that its output says to be taken.
        small_world: what the launchers of a command started instead of the job's gang.
    """

    at_s: float
    step: int | None
    workers: Sequence[WorkerEnd] = ()
    lost_nodes: Sequence[str] = ()
    losses: Sequence[NodeLoss] = ()
    silent: Sequence[SilentRank] = ()
    staging_errors: Mapping[str, str] | None = None
    unwritable: Mapping[str, str] | None = None
    oom_nodes: Sequence[str] = ()
    refusal: str | None = None
    is_late_start: bool = False
    outputs: Sequence[NodeOutput] = ()
    rank_progress: Sequence[RankSnapshot] = ()
    slow: SlowNode | None = None
    chip: Fault | None = None
    chips: Sequence[Fault] = ()
    given_up: AttemptGivenUp | None = None
    coordinator: CoordinatorLost | None = None
    ended_ranks: Sequence[EndedRank] = ()
    restart_codes: Collection[int] = ()
    obstacles: Sequence[Obstacle] = ()
    small_world: SmallWorld | None = None
