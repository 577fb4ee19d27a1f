"""An attempt from its start to its end: events in, actions out.

No I/O and no clock: the coordinator's server passes events in with their time and carries the
actions out, tests do the same without processes. Times are seconds since
the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from perdure.training.recovery.actions import (
    AbnormalNorm,
    Action,
    Outbox,
    Recoveries,
    ToAgent,
    ToRank,
    last_save_of,
    mode_after,
    mode_of,
)
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.healing import HealPlan, check_before_replacing
from perdure.training.recovery.ladder import InProcessDecider, device_of, fault_of_report
from perdure.training.recovery.protocol import (
    GiveUp,
    LastSaved,
    NewGeneration,
    PauseRequest,
    Plan,
    Reconnect,
    Reconnected,
    RecoveryBegan,
    ReplaceWorker,
    ToMember,
    WorkerFault,
    WorkerFaultKind,
)
from perdure.training.recovery.ranks import Pauses, Ranks
from perdure.training.recovery.repair import (
    RankReport,
    RepairMode,
    RepairPlan,
    Unrepairable,
    plan_repair,
)
from perdure.training.recovery.replicas import lack_among_living
from perdure.training.recovery.rungs import IN_PROCESS, Decision, Rung
from perdure.training.recovery.stages import HOLDS, RECOVERABLE, RECOVERING, Stage

# Survivors notice a broken connection in the same moment in which the kernel closes the dead
# process's connection to us: only when no such end follows is the connection alone at fault.
CONNECTION_SETTLE_S = 0.05
GENERATIONS_APART = 1000  # those of one coordinator from the next one's


@dataclass(slots=True)
class Attempt:
    """The state machine.

    Attributes:
        world_size: number of ranks.
        groups: ranks that hold the same state.
        decider: chooses the rung.
        repair_limit_s: for all ranks to report, and to carry a plan out.
        save_limit_s: for the end-of-life checkpoint.
        reconnect_limit_s: for new connections in the same generation.
        checks_chips: whether a chip that had a fault is checked before a process starts on it.
        nodes: by rank, the node it runs on, as the agents report.
        absent: nodes whose agents were connected, and are no more.
        step: newest completed step that is known.
    """

    world_size: int
    groups: Sequence[Sequence[int]]
    decider: InProcessDecider
    repair_limit_s: float
    save_limit_s: float
    reconnect_limit_s: float = 30.0
    checks_chips: bool = True
    nodes: dict[int, str] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    stage: Stage = Stage.STARTING
    generation: int = 1
    step: int = 0
    _ranks: Ranks = field(default_factory=Ranks)
    _early_faults: list[tuple[int, WorkerFault]] = field(default_factory=list)
    _reports: dict[int, RankReport] = field(default_factory=dict)
    _mode: RepairMode = RepairMode.TRAIN  # of the newest generation, until all ranks train in it
    _accepted: int | None = None  # newest abnormal step that is taken as it is
    _plan: RepairPlan | None = None
    _suspected: tuple[float, int, WorkerFault] | None = None
    _deadline_s: float | None = None
    _saved: dict[int, LastSaved] = field(default_factory=dict)
    _unsaved: set[int] = field(default_factory=set)  # savers that have not reported
    _why: str = ""
    _connection: int = 0  # how often those of the generation were re-established
    _reconnected: set[int] = field(default_factory=set)
    _norms: dict[int, list[float]] = field(default_factory=dict)  # of abnormal steps
    _checks: dict[int, HealPlan] = field(default_factory=dict)  # before ranks start again
    _outbox: Outbox = field(default_factory=Outbox)
    _recoveries: Recoveries = field(init=False)
    _pauses: Pauses = field(init=False)

    def __post_init__(self) -> None:
        """Have one outbox for all events."""
        self._recoveries = Recoveries(self._outbox)
        self._pauses = Pauses(self.world_size, self._outbox)

    @property
    def rank_counts(self) -> dict[str, int]:
        """How many ranks there are in each state."""
        return self._ranks.counts(self.world_size)

    def take_actions(self) -> list[Action]:
        """What is to be done, in this order; each is handed out once."""
        return self._outbox.take()

    # Events.

    def resume(self, began: RecoveryBegan, *, now_s: float) -> None:
        """Take up a recovery, where the coordinator before this one is lost with its node.

        The ranks that live will come, each with its state, in a generation that no one before can
        have announced.
        """
        self.decider.resumed(began)
        self.generation = began.generation + GENERATIONS_APART
        self.step = began.fault.step or 0
        self._recoveries.resume(began)
        self._ranks.awaits(set(range(self.world_size)) - began.replaced)
        self._announce(RepairMode.TRAIN, now_s=now_s, replaced=began.replaced, by_agents=False)

    def joined(self, rank: int) -> None:
        """A worker has connected."""
        self._ranks.joined(rank)
        self._checks.pop(rank, None)
        if self.stage is Stage.GIVEN_UP:
            self._send(rank, GiveUp(why=self._why))
            return
        self._send(rank, NewGeneration(number=self.generation))
        if self._pauses.is_requested:
            self._send(rank, PauseRequest(wanted=True))

    def agent_joined(self, node: str, ranks: Collection[int]) -> None:
        """The agent of a node has connected, with the ranks that it has from now on."""
        self.nodes.update(dict.fromkeys(ranks, node))
        self.absent.discard(node)

    def agent_left(self, node: str) -> None:
        """The connection of a node's agent is closed."""
        self.absent.add(node)

    def trains(self, rank: int, generation: int, step: int, *, now_s: float) -> None:
        """A rank is in its loop, in a generation."""
        if generation != self.generation or self.stage in HOLDS:
            return
        self.step = max(self.step, step) if self.stage is Stage.STARTING else step
        self._ranks.trains(rank)
        if self._all_ranks_train:
            self._all_train(now_s=now_s)

    def committed(self, step: int) -> None:
        """A checkpoint of this step was committed."""
        self.decider.committed(step)

    def stepped(self, step: int) -> None:
        """A step is on record."""
        self.step = max(self.step, step)

    def worker_fault(self, rank: int, report: WorkerFault, *, now_s: float) -> None:
        """A worker reports a fault that it outlived."""
        if self.stage is Stage.STARTING:
            # It waits for a generation, which needs all ranks.
            self._early_faults.append((rank, report))
            return
        if self.stage is Stage.ENDING:
            fault = fault_of_report(report, reported_by=rank, nodes=self.nodes)
            why = f"{report.kind} at rank {rank} while others had come to their end"
            self._give_up_over(fault, why, now_s=now_s)
            return
        is_over = report.connection is not None and report.connection < self._connection
        if report.generation < self.generation or is_over or not self._may_recover():
            return
        if report.kind in (WorkerFaultKind.CONNECTION, WorkerFaultKind.REPAIR):
            known = self._suspected
            if known is None:
                self._suspected = (now_s + CONNECTION_SETTLE_S, rank, report)
            elif report.connection is None and known[2].connection is not None:
                # This rank has left its step, and needs more than new connections.
                self._suspected = (known[0], rank, report)
            return
        self._answer_worker_fault(rank, report, now_s=now_s)

    def reconnected(self, rank: int, report: Reconnected, *, now_s: float) -> None:
        """A rank has re-established its connections, or could not."""
        about = (report.generation, report.connection)
        if self.stage is not Stage.RECONNECTING or about != (self.generation, self._connection):
            return
        if report.problem is not None:
            self._fail(f"rank {rank}: {report.problem}", now_s=now_s)
            return
        self._reconnected.add(rank)
        if len(self._reconnected) < self.world_size:
            return
        if self._all_ranks_train:
            self._resume(now_s=now_s)
        else:  # the connections broke in the middle of a repair
            self.stage, self._deadline_s = Stage.REPAIRING, now_s + self.repair_limit_s

    def disconnected(self, rank: int, *, now_s: float) -> None:
        """The connection of a worker is closed: its process has ended, or is about to."""
        self._ranks.disconnected(rank, now_s=now_s)

    def ended(self, rank: int, fault: Fault, *, now_s: float) -> None:
        """A worker's process has ended; `fault` is what its exit shows."""
        self._ranks.ended(rank)
        if self.stage is Stage.SAVING:
            self._check_saved(now_s=now_s)
            return
        if self._mode is RepairMode.LAST_SAVE and self.stage is Stage.GATHERING:
            self._check_reports(now_s=now_s)
            return
        if not self._may_recover():
            why = f"rank {rank} ended while the attempt was {self.stage}"
            self._give_up_over(fault, why, now_s=now_s)
            return
        self._suspected = None
        self._answer(fault, now_s=now_s)

    def node_gone(self, fault: Fault, ranks: Collection[int], *, now_s: float) -> None:
        """A node is lost with all its ranks, or is to be left: `fault` says which and why."""
        node = fault.node
        if node is None or self._recoveries.is_moving(node):
            return  # told again
        if fault.fault_class is FaultClass.FAIL_SLOW and self.stage is not Stage.TRAINING:
            return  # it lives: there is time, and none that a last save would be broken off for
        gone = [rank for rank in sorted(ranks) if self.nodes.setdefault(rank, node) == node]
        if not gone:
            return  # they are on another one already
        for rank in gone[1:]:
            self._ranks.ended(rank)
        self.ended(gone[0], fault, now_s=now_s)

    def not_replaced(self, rank: int, why: str, *, now_s: float) -> None:
        """The new process of a rank could not be started, or its new node is not to be had."""
        self._ranks.ended(rank)
        if self._may_recover() and self.stage in RECOVERING:
            self._recoveries.blame(rank)
            self._fail(f"rank {rank} is not replaced: {why}", now_s=now_s, missing=(rank,))

    def generation_report(self, generation: int, report: RankReport, *, now_s: float) -> None:
        """A rank reports for a generation."""
        if generation != self.generation or self.stage is not Stage.GATHERING:
            return
        self._ranks.reported(report.rank, is_clean=report.is_clean)
        self._reports[report.rank] = report
        self._check_reports(now_s=now_s)

    def last_saved(self, rank: int, report: LastSaved, *, now_s: float) -> None:
        """A survivor's part in the end-of-life checkpoint is over."""
        if self.stage is Stage.SAVING:
            self._saved[rank] = report
            self._unsaved.discard(rank)
            if report.problem is not None or not self._unsaved:
                self._check_saved(now_s=now_s)

    def ending(self, rank: int, *, now_s: float) -> None:
        """A rank came to the end of its loop."""
        self._ranks.ending.add(rank)
        suspected, self._suspected = self._suspected, None
        if self.stage is Stage.TRAINING and suspected is None:
            self.stage = Stage.ENDING
        elif self._may_recover():
            why = f"rank {rank} came to its end: no generation has all ranks any more"
            self._close_recoveries(why, now_s=now_s)
            self._give_up(why)

    def pause(self, *, wanted: bool) -> None:
        """The user wants the ranks to pause, or to continue."""
        if wanted != self._pauses.is_requested:
            self._pauses.is_requested = wanted
            self._broadcast(PauseRequest(wanted=wanted))

    def paused(self, rank: int, step: int, *, is_paused: bool, now_s: float) -> None:
        """A rank is paused at a step boundary, or continues from it."""
        if is_paused:
            # The vote may have brought a request before the message did, or one that is over.
            self._send(rank, PauseRequest(wanted=self._pauses.is_requested))
        if rank not in self._ranks.training:
            return  # reported before the generation that it is in now
        self.stepped(step)
        self._pauses.reported(rank, step, is_paused=is_paused, now_s=now_s)

    @property
    def has_deadline(self) -> bool:
        """Whether `tick` may have something to do soon, even if no message comes."""
        is_due = self._suspected is not None or self._deadline_s is not None
        return is_due or not self._ranks.are_all_explained

    def tick(self, *, now_s: float) -> None:
        """Time has passed."""
        suspected = self._suspected
        if suspected is not None and now_s >= suspected[0] and self._ranks.are_all_explained:
            self._suspected = None
            self._answer_worker_fault(*suspected[1:], now_s=now_s)
        for rank in self._unexplained(now_s=now_s):
            if self.nodes.get(rank) in self.absent:
                self._node_without_word(self.nodes[rank], now_s=now_s)
                break  # the others of the node are explained with it, and those of another later
            fault = Fault(
                FaultClass.NATIVE_CRASH,
                now_s,
                f"rank {rank}: its agent did not report how it ended",
                node=self.nodes.get(rank),
                rank=rank,
                device=device_of(rank, self.nodes),
                step=self.step,
            )
            self.ended(rank, fault, now_s=now_s)
        if self._deadline_s is not None and now_s > self._deadline_s:
            self._deadline_passed(now_s=now_s)

    # What follows from them.

    def _unexplained(self, *, now_s: float) -> list[int]:
        if self._ranks.are_all_explained:
            return []
        without_agent = {rank for rank, node in self.nodes.items() if node in self.absent}
        return self._ranks.unexplained(now_s=now_s, without_agent=without_agent)

    def _node_without_word(self, node: str, *, now_s: float) -> None:
        """End what a lost node leaves: without a supervisor there is no other node for it.

        So ends, too, what lives on a node that is cut off from all others.
        """
        why = f"the agent of {node} is gone, and no supervisor brings another node"
        fault = Fault(FaultClass.NODE_LOST, now_s, why, node=node, step=self.step)
        for rank in self._ranks_of(node):
            self._ranks.ended(rank)
        if self._may_recover():
            self._answer(fault, now_s=now_s, no_other_node=why)
        else:
            self._give_up_over(fault, why, now_s=now_s)

    def _may_recover(self) -> bool:
        return self._mode is not RepairMode.LAST_SAVE and self.stage in RECOVERABLE

    def _check_reports(self, *, now_s: float) -> None:
        # First the numbers: comparing the ranks after each report took 3 s for 8,192 of them.
        saves = self._mode is RepairMode.LAST_SAVE
        fewest = self._ranks.fewest_survivors if saves else self.world_size
        if len(self._reports) >= fewest and set(self._reports) >= self._expected():
            self._make_plan(now_s=now_s)

    def _expected(self) -> set[int]:
        """Ranks that a plan needs a report from."""
        if self._mode is RepairMode.LAST_SAVE:
            return self._ranks.survivors
        return set(range(self.world_size))

    def _answer_worker_fault(self, rank: int, report: WorkerFault, *, now_s: float) -> None:
        fault = fault_of_report(report, reported_by=rank, nodes=self.nodes)
        if report.kind is WorkerFaultKind.NUMERIC:
            # All ranks took part in its vote: they train, whether or not all have reported it yet.
            self._mode = RepairMode.TRAIN
            if report.grad_norm is not None:
                self._norms.setdefault(report.step + 1, []).append(report.grad_norm)
        # Without a number the rank has left its step, and waits for a generation; before there is
        # a plan, reports of the present one are on their way.
        can_reconnect = report.connection is not None and self.stage is not Stage.GATHERING
        self._answer(fault, now_s=now_s, is_finite=report.is_finite, can_reconnect=can_reconnect)

    def _answer(
        self,
        fault: Fault,
        *,
        now_s: float,
        is_finite: bool = True,
        can_reconnect: bool = False,
        is_missing: bool = False,
        no_other_node: str | None = None,
    ) -> None:
        """Choose the rung, and begin it."""
        on_node = self._ranks_of(fault.node)
        at_fault = [fault.rank] if fault.rank is not None else on_node
        is_dead = any(self._ranks.have_lost(rank) for rank in at_fault)
        decision = self.decider.decide(
            fault,
            now_s=now_s,
            is_dead=is_dead or is_missing,  # it can do nothing again
            is_finite=is_finite,
            can_reconnect=can_reconnect,
            no_replica=self._lack_of_replicas(at_fault),
            no_replica_of_node=no_other_node or self._lack_of_replicas(on_node),
        )
        if decision.rung not in IN_PROCESS:
            self._end_processes(fault, decision, now_s=now_s)
            return
        if decision.accept_abnormal and fault.step is not None:
            self._accepted = fault.step + 1
        self.decider.began(fault, decision.rung)
        moved = on_node if decision.rung is Rung.NODE_REPLACE else ()
        replaced = self._recoveries.begin(
            fault, decision, generation=self.generation, now_s=now_s, moved=moved
        )
        check = check_before_replacing(fault) if self.checks_chips and not moved else None
        self._checks.update(dict.fromkeys(replaced, check) if check is not None else {})
        if decision.rung is Rung.OPERATOR_RETRY:
            self._reconnect(now_s=now_s)
        else:
            mode = mode_of(decision, fault)
            self._announce(mode, now_s=now_s, replaced=replaced, by_agents=not moved)
        if fault.fault_class is FaultClass.NUMERIC_ANOMALY and fault.step is not None:
            # Last: the store may take its time, and training goes on meanwhile.
            norms = tuple(self._norms.get(fault.step + 1, ()))
            self._outbox.add(AbnormalNorm(fault.step + 1, norms))

    def _reconnect(self, *, now_s: float) -> None:
        """Have connections re-established under the operations that were cut short."""
        self._connection += 1
        self._reconnected.clear()
        self.stage, self._deadline_s = Stage.RECONNECTING, now_s + self.reconnect_limit_s
        self._broadcast(Reconnect(generation=self.generation, connection=self._connection))

    def _ranks_of(self, node: str | None) -> list[int]:
        return sorted(rank for rank, its in self.nodes.items() if its == node)

    def _lack_of_replicas(self, ranks: Collection[int]) -> str | None:
        """Why the state of one of them is with no other rank that lives, None where all are."""
        return lack_among_living(ranks, self.groups, self._ranks.holders)

    def _announce(
        self, mode: RepairMode, *, now_s: float, replaced: Collection[int], by_agents: bool = True
    ) -> None:
        """Begin a generation: ranks that live report, those that are replaced are started.

        Where not `by_agents`, the supervisor starts them on another node.
        """
        self.generation += 1
        self._connection = 0
        self._mode = mode_after(self._mode, mode)
        self.stage, self._plan = Stage.GATHERING, None
        self._reports.clear()
        self._ranks.training.clear()
        self._suspected = None
        self._pauses.end(self.step, now_s=now_s)
        self._deadline_s = now_s + self.repair_limit_s
        for rank in sorted(replaced):
            self._ranks.replaced(rank)
            if by_agents:
                check = self._checks.get(rank)
                message = ReplaceWorker(rank=rank, generation=self.generation, check=check)
                self._outbox.add(ToAgent(rank, message))
        self._broadcast(NewGeneration(number=self.generation))

    def _make_plan(self, *, now_s: float) -> None:
        expected = self._expected()
        reports = [report for rank, report in self._reports.items() if rank in expected]
        self._locate(reports)
        try:
            plan = plan_repair(reports, self.groups, mode=self._mode, accepted=self._accepted)
        except Unrepairable as exc:
            self._fail(str(exc), now_s=now_s)
            return
        self._plan, self._unsaved = plan, set(plan.savers)
        saves = self._mode is RepairMode.LAST_SAVE
        self.stage = Stage.SAVING if saves else Stage.REPAIRING
        self._deadline_s = now_s + (self.save_limit_s if saves else self.repair_limit_s)
        self._broadcast(Plan(generation=self.generation, plan=plan))

    def _locate(self, reports: Sequence[RankReport]) -> None:
        """Correct the step in which processes died: the step records come late."""
        steps = [report.step for report in reports if report.is_clean]
        for was, fault in self._recoveries.locate(min(steps)) if steps else ():
            self.decider.corrected(was, fault)

    def _fail(self, why: str, *, now_s: float, missing: Sequence[int] = ()) -> None:
        """What was begun cannot be carried out: ask the ladder for the next rung.

        Args:
            why: it cannot.
            now_s: the time.
            missing: ranks that did not come, whatever rank the fault was about.
        """
        if self._mode is RepairMode.LAST_SAVE:
            self._save_failed(why, now_s=now_s)
            return
        fault, replaced = self._recoveries.newest_fault, self._recoveries.newest_replaced
        self.decider.failed(fault)
        is_other = bool(missing) and fault.rank not in missing and not replaced & set(missing)
        if is_other:
            node, device = self.nodes.get(missing[0]), device_of(missing[0], self.nodes)
            fault = replace(fault, rank=missing[0], node=node, device=device)
        self._close_recoveries(why, now_s=now_s)
        self._answer(fault, now_s=now_s, is_missing=is_other)

    def _deadline_passed(self, *, now_s: float) -> None:
        self._deadline_s = None
        if self.stage is Stage.SAVING:
            self._save_failed("the survivors did not finish in time", now_s=now_s)
        elif self.stage is Stage.RECONNECTING:
            missing = sorted(set(range(self.world_size)) - self._reconnected)
            self._fail(
                f"ranks {missing} have no connections after {self.reconnect_limit_s:g} s",
                now_s=now_s,
            )
        elif self.stage in (Stage.GATHERING, Stage.REPAIRING):
            present = set(self._reports) if self.stage is Stage.GATHERING else self._ranks.training
            missing = sorted(self._expected() - present)
            if self._mode is RepairMode.LAST_SAVE:
                self._make_plan(now_s=now_s)  # the ranks that reported may hold the whole state
                return
            why = f"ranks {missing} did not come within {self.repair_limit_s:g} s"
            self._fail(why, now_s=now_s, missing=missing)

    @property
    def _all_ranks_train(self) -> bool:
        return len(self._ranks.training) == self.world_size

    def _all_train(self, *, now_s: float) -> None:
        self._mode = RepairMode.TRAIN
        if self.stage is Stage.STARTING:
            self.stage = Stage.TRAINING
            for rank, report in self._early_faults:
                self.worker_fault(rank, report, now_s=now_s)
            self._early_faults.clear()
        elif self.stage is Stage.REPAIRING:
            self._resume(now_s=now_s)

    def _resume(self, *, now_s: float) -> None:
        """Everything that was begun is done."""
        self.stage, self._deadline_s = Stage.TRAINING, None
        self._close_recoveries(now_s=now_s)

    def _close_recoveries(self, why_not: str | None = None, *, now_s: float) -> None:
        self._recoveries.end(
            self._plan, self._reports, generation=self.generation, now_s=now_s, why_not=why_not
        )
        self._plan = None  # what comes after is no part of it

    def _end_processes(self, fault: Fault, decision: Decision, *, now_s: float) -> None:
        """A rung above the processes is to answer: save first what can be saved."""
        self._close_recoveries(decision.reason, now_s=now_s)
        self._why = decision.reason
        self._outbox.record_end(fault, decision.reason, now_s=now_s)
        if decision.end_of_life_checkpoint and self._mode is RepairMode.ROLL_BACK:
            # Some ranks have gone back and some not, one perhaps halfway.
            self._save_failed("the ranks were going back to a snapshot", now_s=now_s)
            return
        if decision.end_of_life_checkpoint and self._ranks.survivors:
            self._announce(RepairMode.LAST_SAVE, now_s=now_s, replaced=())
            self._deadline_s = now_s + min(self.repair_limit_s, self.save_limit_s)
            return
        self._give_up(decision.reason)

    def _check_saved(self, *, now_s: float) -> None:
        """Whether the survivors are done with their checkpoint."""
        assert self._plan is not None  # noqa: S101 SAVING follows a plan
        event = last_save_of(
            self._plan, self._saved, self._ranks.dead, outbox=self._outbox, now_s=now_s
        )
        if event is not None:
            self._outbox.record(event)
            self._give_up(self._why)

    def _save_failed(self, why: str, *, now_s: float) -> None:
        self._outbox.record_save_failed(why, now_s=now_s)
        self._give_up(self._why)

    def _give_up_over(self, fault: Fault, why: str, *, now_s: float) -> None:
        """Give up for a fault that nothing here answers."""
        # Else the processes end for another one, of which this is a consequence.
        if not self._why and fault.rank not in self._ranks.ending:
            self._outbox.record_end(fault, why, now_s=now_s)
        self._give_up(self._why or why)

    def _give_up(self, why: str) -> None:
        if self.stage is Stage.GIVEN_UP:
            return
        self.stage, self._why, self._deadline_s = Stage.GIVEN_UP, why, None
        self._suspected = None
        self._broadcast(GiveUp(why=why))
        self._outbox.add(ToAgent(None, GiveUp(why=why)))

    def _send(self, rank: int, message: ToMember) -> None:
        self._outbox.add(ToRank(rank, message))

    def _broadcast(self, message: ToMember) -> None:
        for rank in sorted(self._ranks.living):
            self._send(rank, message)
