"""An attempt without processes: events by hand, and ranks that answer as workers do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from perdure.training.diagnosis.exits import fault_of_end
from perdure.training.journal.events import LedgerEvent
from perdure.training.recovery.actions import Action, LogEvent, ToAgent, ToRank
from perdure.training.recovery.attempt import Attempt
from perdure.training.recovery.healing import HealPlan
from perdure.training.recovery.ladder import InProcessDecider
from perdure.training.recovery.memory import AttemptSettings, Memory
from perdure.training.recovery.protocol import (
    CoordinatorMessage,
    GiveUp,
    LastSave,
    LastSaved,
    NewGeneration,
    PauseBegan,
    PauseEnded,
    Plan,
    Reconnect,
    Reconnected,
    RecoveryBegan,
    RecoveryEnded,
    ReplaceWorker,
    WorkerEnded,
    WorkerFault,
    WorkerFaultKind,
)
from perdure.training.recovery.repair import RankReport, RepairMode, RepairPlan, StepPhase, Vote
from perdure.training.recovery.replicas import ParallelLayout
from perdure.training.recovery.rungs import Policy, Rung
from perdure.training.recovery.stages import Stage
from perdure.training.recovery.stimuli import (
    ConnectionsRestored,
    FaultReported,
    LastSaveReported,
    ProcessEnded,
    RankConnected,
    RankDisconnected,
    RankTrains,
    ReplacementFailed,
    StateReported,
    Stimulus,
    TimePassed,
)

DDP = ((0, 1, 2, 3),)
HSDP = ((0, 2), (1, 3))
ALONE = ((0,), (1,), (2,), (3,))  # no rank has a replica
EIGHT = ((0, 4), (1, 5), (2, 6), (3, 7))
REPAIR_LIMIT_S = 30.0
SAVE_LIMIT_S = 60.0
RECONNECT_LIMIT_S = 10.0
STEP = 10


def is_plan(message: CoordinatorMessage) -> bool:
    return isinstance(message, Plan)


@dataclass
class Rank:
    """One worker process, as far as it matters here."""

    report: RankReport
    generation: int = 1

    def carry_out(self, plan: RepairPlan) -> None:
        """Come to the plan's step."""
        self.report = RankReport(
            rank=self.report.rank, step=plan.step, snapshot_step=self.report.snapshot_step
        )


@dataclass
class AttemptHarness:
    """An attempt in training, all its invariants checked, and all that it did since."""

    attempt: Attempt
    ranks: dict[int, Rank] = field(default_factory=dict)
    now_s: float = 1000.0
    actions: list[Action] = field(default_factory=list)
    _answered: int = 0
    _uncollected: list[Action] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        groups: Sequence[Sequence[int]] = DDP,
        *,
        policy: Policy | None = None,
        supported: Collection[Rung] = frozenset(Rung),
        is_training: bool = True,
        ranks_per_node: int = 2,
        checks_chips: bool = True,
        save_limit_s: float = SAVE_LIMIT_S,
    ) -> AttemptHarness:
        """All ranks have connected; they train unless `is_training` is off."""
        world_size = sum(len(group) for group in groups)
        nodes = {rank: f"node-{rank // ranks_per_node}" for rank in range(world_size)}
        harness = cls(
            Attempt(
                Memory(world_size, tuple(map(tuple, groups)), nodes),
                AttemptSettings(REPAIR_LIMIT_S, save_limit_s, RECONNECT_LIMIT_S, checks_chips),
                InProcessDecider(policy or Policy(), frozenset(supported)),
                checks_invariants=True,
            )
        )
        for rank in range(world_size):
            harness.handle(RankConnected(rank))
            harness.ranks[rank] = Rank(RankReport(rank=rank, step=STEP, snapshot_step=STEP - 2))
        if is_training:
            for rank in range(world_size):
                harness.trains(rank)
            harness.collect()
            harness.actions.clear()
            harness._answered = 0
        return harness

    # Events.

    def trains(
        self,
        rank: int,
        *,
        generation: int | None = None,
        step: int = STEP,
        layout: ParallelLayout | None = None,
    ) -> None:
        number = self.attempt.generation if generation is None else generation
        self.handle(RankTrains(rank, number, step, layout))

    def handle(self, stimulus: Stimulus) -> None:
        """Something happens now; `collect` has what it leads to."""
        self._uncollected += self.attempt.handle(stimulus, now_s=self.now_s)

    def collect(self) -> list[Action]:
        """What the attempt wants done now."""
        new, self._uncollected = self._uncollected, []
        self.actions += new
        return new

    def advance(self, delay_s: float) -> list[Action]:
        """Time passes."""
        self.now_s += delay_s
        is_due, before = self.attempt.is_due(self.now_s), deepcopy(self.attempt.memory)
        self.handle(TimePassed())
        assert is_due or (self.attempt.memory, self._uncollected) == (before, []), "not due"
        return self.collect()

    def kill(self, rank: int, *, is_reported: bool = True, **changes: Any) -> list[Action]:
        """A process is killed: its connection closes, and its agent reports it."""
        self.handle(RankDisconnected(rank))
        self.ranks.pop(rank, None)
        if is_reported:
            fields: dict[str, Any] = {"device": rank % 2, "exit_code": -9, "at_s": self.now_s}
            ended = WorkerEnded(rank=rank, **{**fields, **changes})
            node, step = self.attempt.nodes.get(rank), self.attempt.step
            fault = fault_of_end(ended, node=node, step=step)
            self.handle(ProcessEnded(rank, fault))
        return self.collect()

    def not_replaced(self, rank: int, why: str = "device 1: Alarm") -> list[Action]:
        """The agent of a rank cannot start its new process."""
        self.handle(ReplacementFailed(rank, why))
        return self.collect()

    def worker_fault(self, rank: int, kind: WorkerFaultKind, **changes: Any) -> list[Action]:
        """A process reports a fault that it outlives."""
        fields: dict[str, Any] = {
            "generation": self.attempt.generation,
            "text": f"{kind} broke",
            "step": self.attempt.step,
            "at_s": self.now_s,
        }
        report = WorkerFault(kind=kind, **{**fields, **changes})
        self.handle(FaultReported(rank, report))
        return self.collect()

    def memory_fault(self, rank: int) -> list[Action]:
        """A rank reports that its memory is damaged."""
        worker = self.ranks[rank]
        worker.report = worker.report.model_copy(update={"is_dirty": True})
        return self.worker_fault(rank, WorkerFaultKind.MEMORY)

    def progress_to(self, step: int, phase: StepPhase, *, vote: Vote | None = None) -> None:
        """Every rank is as far as this."""
        for rank in self.ranks.values():
            votes = (vote,) if vote is not None else ()
            rank.report = rank.report.model_copy(
                update={"step": step, "phase": phase, "votes": votes}
            )

    # Ranks that answer.

    def answer(
        self,
        *,
        silent: Collection[int] = (),
        until: Callable[[CoordinatorMessage], bool] = lambda _message: False,
    ) -> None:
        """Agents and ranks carry out their orders, until no more come.

        Args:
            silent: ranks that do not answer.
            until: stops at the first message of this kind, unanswered.
        """
        self.collect()
        while self._answered < len(self.actions):
            action = self.actions[self._answered]
            if isinstance(action, ToRank | ToAgent) and until(action.message):
                return
            self._answered += 1
            match action:
                case ToAgent(rank=int(rank), message=ReplaceWorker()) if rank not in silent:
                    self.start(rank)
                case ToRank() if action.rank not in silent and action.rank in self.ranks:
                    self._reply(action.rank, action.message)
            self.collect()

    def skip_unanswered(self) -> None:
        """What comes now comes before answers to the orders so far."""
        self.collect()
        self._answered = len(self.actions)

    def start(self, rank: int) -> None:
        """A new process has connected."""
        self.ranks[rank] = Rank(RankReport(rank=rank, step=0, is_fresh=True), generation=0)
        self.handle(RankConnected(rank))

    def reports(self, rank: int, **changes: Any) -> list[Action]:
        """A rank reports for the present generation."""
        report = self.ranks[rank].report.model_copy(update=changes)
        self.handle(StateReported(self.attempt.generation, report))
        return self.collect()

    def _reply(self, rank: int, message: CoordinatorMessage) -> None:
        worker = self.ranks[rank]
        match message:
            case NewGeneration():
                worker.generation = message.number
                self.handle(StateReported(worker.generation, worker.report))
            case Plan() if message.plan.mode is RepairMode.LAST_SAVE:
                self.handle(LastSaveReported(rank, LastSaved(step=message.plan.step)))
            case Plan():
                worker.carry_out(message.plan)
                self.handle(RankTrains(rank, message.generation, message.plan.step))
            case Reconnect():
                report = Reconnected(
                    generation=message.generation, connection=message.connection, operations=1
                )
                self.handle(ConnectionsRestored(rank, report))

    # What was done.

    def stage(self) -> Stage:
        return self.attempt.stage

    def events(self, *kinds: type[LedgerEvent]) -> list[Any]:
        """The events, of these kinds."""
        events = [action.event for action in self.actions if isinstance(action, LogEvent)]
        return [event for event in events if not kinds or isinstance(event, kinds)]

    def began(self) -> list[RecoveryBegan]:
        return self.events(RecoveryBegan)

    def ended(self) -> list[RecoveryEnded]:
        return self.events(RecoveryEnded)

    def rungs(self) -> list[Rung]:
        """What was begun, in its order."""
        return [event.decision.rung for event in self.began()]

    def pauses(self) -> list[PauseBegan | PauseEnded]:
        return self.events(PauseBegan, PauseEnded)

    def last_save(self) -> LastSave:
        """What became of the end-of-life checkpoint."""
        (event,) = self.events(LastSave)
        assert isinstance(event, LastSave)
        return event

    def sent_to(self, rank: int) -> list[CoordinatorMessage]:
        """Messages to a rank."""
        return [a.message for a in self.actions if isinstance(a, ToRank) and a.rank == rank]

    def replaced(self) -> list[int]:
        """Ranks whose agents were ordered to start a new process."""
        return [
            action.message.rank
            for action in self.actions
            if isinstance(action, ToAgent) and isinstance(action.message, ReplaceWorker)
        ]

    def checks(self) -> list[HealPlan | None]:
        """How chips were to be checked before, for each of these orders."""
        messages = [action.message for action in self.actions if isinstance(action, ToAgent)]
        return [message.check for message in messages if isinstance(message, ReplaceWorker)]

    def plan(self) -> RepairPlan:
        """The newest one."""
        plans = [a.message for a in self.actions if isinstance(a, ToRank)]
        newest = [message for message in plans if isinstance(message, Plan)][-1]
        return newest.plan

    def given_up(self) -> list[str]:
        """Why, as every agent received it."""
        messages = [a.message for a in self.actions if isinstance(a, ToAgent) and a.rank is None]
        return [message.why for message in messages if isinstance(message, GiveUp)]
