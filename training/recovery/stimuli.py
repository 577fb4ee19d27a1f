"""Everything that an attempt can be told: one frozen dataclass for each stimulus.

`Attempt.handle` takes any of them with its time, and nothing else changes an attempt. As JSON
(`STIMULUS`) they are the history from which an attempt is replayed (replay.py), so each has a
`kind`. Times are seconds since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import Field, TypeAdapter

from perdure.training.recovery.faults import Fault
from perdure.training.recovery.protocol import LastSaved, Reconnected, RecoveryBegan, WorkerFault
from perdure.training.recovery.repair import RankReport
from perdure.training.recovery.replicas import ParallelLayout


@dataclass(frozen=True, slots=True)
class RecoveryResumed:
    """The coordinator before this one is lost with its node, in the middle of a recovery."""

    began: RecoveryBegan
    kind: Literal["recovery_resumed"] = "recovery_resumed"


@dataclass(frozen=True, slots=True)
class AgentConnected:
    """The agent of a node has connected, with the ranks that it has from now on."""

    node: str
    ranks: tuple[int, ...]
    kind: Literal["agent_connected"] = "agent_connected"


@dataclass(frozen=True, slots=True)
class AgentDisconnected:
    """The connection of a node's agent is closed."""

    node: str
    kind: Literal["agent_disconnected"] = "agent_disconnected"


@dataclass(frozen=True, slots=True)
class RankConnected:
    """A worker has connected.

    Attributes:
        layout: of its program, the same on every rank; None: the job's.
    """

    rank: int
    layout: ParallelLayout | None = None
    kind: Literal["rank_connected"] = "rank_connected"


@dataclass(frozen=True, slots=True)
class RankDisconnected:
    """The connection of a worker is closed: its process has ended, or is about to."""

    rank: int
    kind: Literal["rank_disconnected"] = "rank_disconnected"


@dataclass(frozen=True, slots=True)
class RankTrains:
    """A rank is in its loop, in a generation.

    Attributes:
        layout: of its program, the same on every rank; None: as before.
    """

    rank: int
    generation: int
    step: int
    layout: ParallelLayout | None = None
    kind: Literal["rank_trains"] = "rank_trains"


@dataclass(frozen=True, slots=True)
class RankPaused:
    """A rank is paused at a step boundary, or continues from it."""

    rank: int
    step: int
    is_paused: bool
    kind: Literal["rank_paused"] = "rank_paused"


@dataclass(frozen=True, slots=True)
class StepRecorded:
    """A step is in the attempt log."""

    step: int
    kind: Literal["step_recorded"] = "step_recorded"


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """A checkpoint of this step was committed."""

    step: int
    kind: Literal["step_committed"] = "step_committed"


@dataclass(frozen=True, slots=True)
class FaultReported:
    """A worker reports a fault that its process outlived."""

    rank: int
    report: WorkerFault
    kind: Literal["fault_reported"] = "fault_reported"


@dataclass(frozen=True, slots=True)
class ConnectionsRestored:
    """A rank has re-established its connections, or could not."""

    rank: int
    report: Reconnected
    kind: Literal["connections_restored"] = "connections_restored"


@dataclass(frozen=True, slots=True)
class StateReported:
    """A rank reports its state for a generation."""

    generation: int
    report: RankReport
    kind: Literal["state_reported"] = "state_reported"


@dataclass(frozen=True, slots=True)
class LastSaveReported:
    """A survivor's part in the end-of-life checkpoint is over."""

    rank: int
    report: LastSaved
    kind: Literal["last_save_reported"] = "last_save_reported"


@dataclass(frozen=True, slots=True)
class LoopEnded:
    """A rank came to the end of its loop."""

    rank: int
    kind: Literal["loop_ended"] = "loop_ended"


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """A worker's process has ended; `fault` is what its exit shows."""

    rank: int
    fault: Fault
    kind: Literal["process_ended"] = "process_ended"


@dataclass(frozen=True, slots=True)
class ReplacementFailed:
    """The new process of a rank could not be started, or its new node is not to be had."""

    rank: int
    why: str
    kind: Literal["replacement_failed"] = "replacement_failed"


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node is lost with all its ranks: `fault` says which and why."""

    fault: Fault
    ranks: tuple[int, ...]
    kind: Literal["node_lost"] = "node_lost"


@dataclass(frozen=True, slots=True)
class NodeSlow:
    """A node lives and is to be left, for it holds all others up."""

    fault: Fault
    ranks: tuple[int, ...]
    kind: Literal["node_slow"] = "node_slow"


@dataclass(frozen=True, slots=True)
class ChipFailed:
    """A chip reports a fault, and its process lives, or waits for it.

    Attributes:
        no_other_node: why no other node can take the place of the fault's, None where one may.
    """

    fault: Fault
    no_other_node: str | None = None
    kind: Literal["chip_failed"] = "chip_failed"


@dataclass(frozen=True, slots=True)
class PauseWanted:
    """The user wants the ranks to pause, or to continue."""

    is_wanted: bool
    kind: Literal["pause_wanted"] = "pause_wanted"


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Something may be due by now (`Attempt.is_due`), without any message."""

    kind: Literal["time_passed"] = "time_passed"


Stimulus = (
    RecoveryResumed
    | AgentConnected
    | AgentDisconnected
    | RankConnected
    | RankDisconnected
    | RankTrains
    | RankPaused
    | StepRecorded
    | StepCommitted
    | FaultReported
    | ConnectionsRestored
    | StateReported
    | LastSaveReported
    | LoopEnded
    | ProcessEnded
    | ReplacementFailed
    | NodeLost
    | NodeSlow
    | ChipFailed
    | PauseWanted
    | TimePassed
)
STIMULUS: TypeAdapter[Stimulus] = TypeAdapter(Annotated[Stimulus, Field(discriminator="kind")])


# What the passing of time turns out to be; an attempt tells itself.


@dataclass(frozen=True, slots=True)
class FaultSettled:
    """No end of a process has explained a fault that a rank reported, or none can."""

    rank: int
    report: WorkerFault
    kind: Literal["fault_settled"] = "fault_settled"


@dataclass(frozen=True, slots=True)
class NodeSilent:
    """A node's agent and ranks are gone, and no supervisor has reported what became of it."""

    node: str
    kind: Literal["node_silent"] = "node_silent"


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """Ranks did not do in time what was asked of them."""

    kind: Literal["deadline_passed"] = "deadline_passed"


InnerStimulus = FaultSettled | NodeSilent | DeadlinePassed
AnyStimulus = Stimulus | InnerStimulus
STIMULI: tuple[type[AnyStimulus], ...] = get_args(AnyStimulus)
