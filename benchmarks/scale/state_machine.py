"""A node replacement through the state machine of an attempt, with as many ranks as one likes.

No processes and no I/O: ranks answer as workers do (training/runtime/step_loop/rank_recovery.py),
and every message in and out is counted, with the bytes of its line. What the machine takes is
measured around its calls. Times are seconds of CPU, sizes bytes, steps completed optimizer steps.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel

from perdure.training.recovery.actions import Action, LogEvent, ToRank
from perdure.training.recovery.attempt import Attempt
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.ladder import InProcessDecider
from perdure.training.recovery.memory import AttemptSettings, Memory
from perdure.training.recovery.protocol import (
    GenerationReport,
    NewGeneration,
    NodeGone,
    Plan,
    Trains,
    WorkerFault,
    WorkerFaultKind,
)
from perdure.training.recovery.repair import Move, RankReport, StepPhase, Vote
from perdure.training.recovery.rungs import Policy, Rung
from perdure.training.recovery.stages import Stage
from perdure.training.recovery.stimuli import (
    AgentConnected,
    FaultReported,
    NodeLost,
    RankConnected,
    RankDisconnected,
    RankTrains,
    StateReported,
    Stimulus,
)
from perdure.training.wire.transport import dump_line

STEP = 1200
START_S = 1_000_000.0
LOST_NODE = 1
LIMIT_S = 600.0
BROKEN = (  # what gloo says, as workers report it
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[10.0.0.1]:21345. This is typically caused by a remote worker crashing."
)


@dataclass(slots=True)
class Course:
    """What one replacement took.

    Attributes:
        num_ranks: of the job.
        received: messages that came to the coordinator, by their name.
        sent: messages that went out, by their name.
        received_bytes: of all that came.
        sent_bytes: of all that went out.
        largest_bytes: of the largest message that went out.
        machine_s: CPU time inside of the state machine.
        moves: states that were copied.
        stage: of the attempt at the end.
    """

    num_ranks: int
    received: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    received_bytes: int = 0
    sent_bytes: int = 0
    largest_bytes: int = 0
    machine_s: float = 0.0
    moves: tuple[Move, ...] = ()
    stage: Stage = Stage.STARTING

    @property
    def num_messages(self) -> int:
        """In both directions, to and from ranks, agents and the log."""
        return self.received.total() + self.sent.total()

    def is_received(self, message: BaseModel) -> None:
        """Count one that came."""
        self.received[_name(message)] += 1
        self.received_bytes += len(dump_line(message))

    def is_sent(self, message: BaseModel, size_bytes: int) -> None:
        """Count one that went out."""
        self.sent[_name(message)] += 1
        self.sent_bytes += size_bytes
        self.largest_bytes = max(self.largest_bytes, size_bytes)


def _name(message: BaseModel) -> str:
    return str(getattr(message, "op", type(message).__name__))


@dataclass(slots=True)
class Replacement:
    """One node of a job is lost and replaced.

    Attributes:
        num_ranks: of the job.
        ranks_per_node: neighbouring ones.
        groups: ranks that hold the same state; all of them, as with DDP, where none are given.
        phase: of the step in flight of every survivor.
    """

    num_ranks: int
    ranks_per_node: int
    groups: Sequence[Sequence[int]] | None = None
    phase: StepPhase = StepPhase.RUN
    course: Course = field(init=False)
    _attempt: Attempt = field(init=False)
    _sizes: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Have all ranks train."""
        ranks = range(self.num_ranks)
        groups = self.groups if self.groups is not None else (tuple(ranks),)
        nodes = {rank: f"node-{rank // self.ranks_per_node}" for rank in ranks}
        self._attempt = Attempt(
            Memory(self.num_ranks, tuple(map(tuple, groups)), nodes),
            AttemptSettings(LIMIT_S, LIMIT_S),
            InProcessDecider(Policy(), frozenset(Rung)),
        )
        for rank in ranks:
            self._attempt.handle(RankConnected(rank), now_s=START_S)
        for rank in ranks:
            self._attempt.handle(RankTrains(rank, 1, STEP), now_s=START_S)
        self.course = Course(self.num_ranks)

    def run(self) -> Course:
        """Lose the node and go on until all ranks train again."""
        attempt, first = self._attempt, LOST_NODE * self.ranks_per_node
        lost = tuple(range(first, first + self.ranks_per_node))
        living = [rank for rank in range(self.num_ranks) if rank not in lost]
        for rank in lost:
            self._timed(RankDisconnected(rank))
        for rank in living:
            self._worker_fault(rank)
        self._node_lost(lost)
        generation = attempt.generation
        for rank in living:
            self._report(RankReport(rank=rank, step=STEP, phase=self.phase, votes=(_vote(),)))
        self._timed(AgentConnected(f"node-{self.num_ranks}", lost))
        for rank in lost:
            self._timed(RankConnected(rank))
            self._report(RankReport(rank=rank, step=0, is_fresh=True))
        for rank in range(self.num_ranks):
            message = Trains(generation=generation, step=STEP)
            self.course.is_received(message)
            self._timed(RankTrains(rank, generation, STEP), now_s=START_S + 1)
        self.course.stage = attempt.stage
        return self.course

    def _worker_fault(self, rank: int) -> None:
        kind = WorkerFaultKind.CONNECTION
        report = WorkerFault(generation=1, kind=kind, text=BROKEN, step=STEP, at_s=START_S)
        self.course.is_received(report)
        self._timed(FaultReported(rank, report))

    def _node_lost(self, ranks: tuple[int, ...]) -> None:
        node = f"node-{LOST_NODE}"
        fault = Fault(FaultClass.NODE_LOST, START_S, "its agent is silent", node=node, step=STEP)
        self.course.is_received(NodeGone(fault=fault, ranks=ranks))
        self._timed(NodeLost(fault, ranks))

    def _report(self, report: RankReport) -> None:
        generation = self._attempt.generation
        self.course.is_received(GenerationReport(generation=generation, report=report))
        self._timed(StateReported(generation, report), now_s=START_S + 0.5)

    def _timed(self, stimulus: Stimulus, *, now_s: float = START_S) -> None:
        """Have one handled, as the server does with each message."""
        began_s = time.process_time()
        actions = self._attempt.handle(stimulus, now_s=now_s)
        self.course.machine_s += time.process_time() - began_s
        for action in actions:
            self._count(action)

    def _count(self, action: Action) -> None:
        match action:
            case LogEvent():
                self.course.sent[action.event.kind] += 1
            case ToRank():
                message = action.message
                if isinstance(message, Plan):
                    self.course.moves = message.plan.moves
                self.course.is_sent(message, self._size_of(message))
            case _:
                raise AssertionError(f"{action} in a node replacement")

    def _size_of(self, message: BaseModel) -> int:
        """Bytes of its line; one that goes to all ranks is looked at once."""
        if not isinstance(message, (Plan, NewGeneration)):
            return len(dump_line(message))
        if id(message) not in self._sizes:
            self._sizes = {id(message): len(dump_line(message))}
        return self._sizes[id(message)]


def _vote() -> Vote:
    return Vote(step=STEP, loss=2.3456789, grad_norm=0.987654321, lr=3e-4)
