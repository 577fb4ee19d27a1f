"""What is left of an attempt that has ended: what a diagnosis starts from.

Times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perdure.training.diagnosis.ending import FalseSuccess
from perdure.training.diagnosis.exits import EXIT_DONE
from perdure.training.recovery.faults import FaultClass
from perdure.training.recovery.protocol import AttemptGivenUp
from perdure.training.wire.rank_snapshot import RankSnapshot


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """How one worker ended.

    Attributes:
        rank: None for a command, whose one process has all the ranks of its node.
        device: likewise.
        exit_code: negative for a signal.
        error: last line of the exception it recorded, if it did.
        log: the end of its output.
        stopped: whether it was asked to stop before it ended.
        bad_end: why an exit with 0 was no good end.
        log_path: where its output is, on its node.
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

    @property
    def has_failed(self) -> bool:
        """Whether it ended other than well."""
        return self.exit_code != EXIT_DONE or self.bad_end is not None

    @property
    def name(self) -> str:
        """For messages."""
        return f"rank {self.rank}" if self.rank is not None else f"the command on {self.node}"


@dataclass(frozen=True, slots=True)
class SilentRank:
    """A rank without progress beyond its limit.

    Attributes:
        rank: None for a command: which of its ranks holds the others up is not known by that.
        node: None where nothing tells one from the others.
        why: what shows it.
        stopped: its processes, of no rank, that a signal has stopped.
    """

    rank: int | None
    node: str | None
    silent_s: float
    limit_s: float
    phase: str
    why: str = ""
    stopped: Sequence[str] = ()

    @property
    def line(self) -> str:
        """For the evidence."""
        where = self.node if self.node is not None else "every node"
        who = f"rank {self.rank}" if self.rank is not None else f"the command on {where}"
        if self.stopped:
            return f"{who}: stopped by a signal: {', '.join(self.stopped)}"
        silence = f"no progress for {self.silent_s:.0f} s in phase {self.phase}"
        limit = f"limit {self.limit_s:.0f} s"
        return f"{who}: {silence}, {limit}{f': {self.why}' if self.why else ''}"


@dataclass(frozen=True, slots=True)
class CoordinatorLost:
    """The coordinator of the attempt ended under it.

    Attributes:
        exit_code: negative for a signal.
        line: the last one of its log, or why it was ended.
        was_stopped: whether a signal had stopped it, for which it was ended.
    """

    node: str
    exit_code: int
    ended_s: float
    line: str
    was_stopped: bool = False


@dataclass(frozen=True, slots=True)
class NodeLoss:
    """How the container of a node was lost, as the engine knows it.

    Attributes:
        fault_class: what broke.
        code: symptom code, such as "POD_EVICTED".
        line: what shows it, in the words of the platform.
        why: what that means, one sentence; empty: the meaning of the class.
    """

    node: str
    fault_class: FaultClass
    code: str
    line: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class SlowNode:
    """A node that is left because one of its ranks holds the others up."""

    node: str
    rank: int | None
    device: int | None
    text: str


@dataclass(frozen=True, slots=True)
class NodeOutput:
    """Text of a node that is no worker's output: a device log, or what a health command prints."""

    node: str
    name: str
    text: str
    rank: int | None = None
    device: int | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything known about the end of an attempt.

    Attributes:
        losses: what the engine knows of containers that are gone, or about to be.
        rank_progress: of all ranks when one of them was found to be silent.
        given_up: the fault for which the coordinator had all processes end, before anybody else
            ordered it; None when it did not.
    """

    at_s: float
    step: int | None
    workers: Sequence[WorkerEnd] = ()
    lost_nodes: Sequence[str] = ()
    losses: Sequence[NodeLoss] = ()
    silent: Sequence[SilentRank] = ()
    staging_errors: Mapping[str, str] | None = None
    oom_nodes: Sequence[str] = ()
    refusal: str | None = None
    outputs: Sequence[NodeOutput] = ()
    rank_progress: Sequence[RankSnapshot] = ()
    slow: SlowNode | None = None
    given_up: AttemptGivenUp | None = None
    coordinator: CoordinatorLost | None = None
