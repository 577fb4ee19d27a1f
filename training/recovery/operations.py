"""What a reaction does to an attempt: rounds, plans, answers of the ladder, and the end.

The verbs that the reactions of reactions.py are made of. Times are seconds since the epoch, steps
completed optimizer steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from perdure.training.recovery.actions import (
    AbnormalNorm,
    ToAgent,
    ToRank,
    last_save_of,
    merge_modes,
    mode_of,
)
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.healing import check_before_replacing
from perdure.training.recovery.ladder import InProcessDecider, device_of
from perdure.training.recovery.memory import AttemptSettings, Memory, Round
from perdure.training.recovery.protocol import (
    GiveUp,
    NewGeneration,
    Plan,
    Reconnect,
    RecoveryBegan,
    ReplaceWorker,
    ToMember,
)
from perdure.training.recovery.repair import RankReport, RepairMode, Unrepairable, plan_repair
from perdure.training.recovery.replicas import lack_among_living
from perdure.training.recovery.rungs import IN_PROCESS, Decision, Rung
from perdure.training.recovery.stages import State


@dataclass(frozen=True, slots=True)
class Operations:
    """Operations on one attempt at one moment.

    Attributes:
        memory: what the attempt remembers; they change it, and put actions into its outbox.
        settings: limits.
        decider: chooses the rung.
        now_s: the moment.
    """

    memory: Memory
    settings: AttemptSettings
    decider: InProcessDecider
    now_s: float

    @property
    def _all_ranks_train(self) -> bool:
        return len(self.memory.round.training) == self.memory.world_size

    def _continue_training(self) -> None:
        """Everything that was begun is done."""
        self.memory.state, self.memory.round.deadline_s = State.TRAINING, None
        self._close_recoveries()

    def _mark_ended(self, rank: int) -> None:
        self.memory.ranks.mark_ended(rank)
        self.memory.round.training.discard(rank)

    def _check_reports(self) -> None:
        # First the numbers: comparing the ranks after each report took 3 s for 8,192 of them.
        saves, reports = self.memory.round.mode is RepairMode.LAST_SAVE, self.memory.round.reports
        fewest = self.memory.ranks.fewest_survivors if saves else self.memory.world_size
        if len(reports) >= fewest and set(reports) >= self._expected():
            self._make_plan()

    def _expected(self) -> set[int]:
        """Ranks that a plan needs a report from."""
        if self.memory.round.mode is RepairMode.LAST_SAVE:
            return self.memory.ranks.survivors
        return set(range(self.memory.world_size))

    def _make_plan(self) -> None:
        round_, expected = self.memory.round, self._expected()
        reports = [report for rank, report in round_.reports.items() if rank in expected]
        self._locate_deaths(reports)
        try:
            plan = plan_repair(
                reports, self.memory.groups, mode=round_.mode, accepted=self.memory.accepted
            )
        except Unrepairable as exc:
            self._fail(str(exc))
            return
        round_.plan, round_.unsaved = plan, set(plan.savers)
        saves = round_.mode is RepairMode.LAST_SAVE
        self.memory.state = State.SAVING if saves else State.REPAIRING
        limit_s = self.settings.save_limit_s if saves else self.settings.repair_limit_s
        round_.deadline_s = self.now_s + limit_s
        self._broadcast(Plan(generation=self.memory.round.generation, plan=plan))

    def _locate_deaths(self, reports: Sequence[RankReport]) -> None:
        """Correct the step in which processes died: the step records come late."""
        steps = [report.step for report in reports if report.is_clean]
        for fault, corrected in self.memory.recoveries.locate(min(steps)) if steps else ():
            self.decider.corrected(fault, corrected)

    def _check_saved(self) -> None:
        """Whether the survivors are done with their checkpoint."""
        plan, saved = self.memory.round.plan, self.memory.round.saved
        assert plan is not None  # noqa: S101 SAVING follows a plan
        dead, outbox = self.memory.ranks.dead, self.memory.outbox
        event = last_save_of(plan, saved, dead, outbox=outbox, now_s=self.now_s)
        if event is not None:
            self.memory.outbox.record(event)
            self._give_up(self.memory.why)

    def _answer(
        self,
        fault: Fault,
        *,
        is_finite: bool = True,
        can_reconnect: bool = False,
        is_missing: bool = False,
        no_other_node: str | None = None,
    ) -> None:
        """Choose the rung, and begin it."""
        on_node = self._ranks_of(fault.node)
        at_fault = [fault.rank] if fault.rank is not None else on_node
        is_dead = any(self.memory.ranks.is_lost(rank) for rank in at_fault)
        decision = self.decider.decide(
            fault,
            now_s=self.now_s,
            is_dead=is_dead or is_missing,  # it can do nothing again
            is_finite=is_finite,
            can_reconnect=can_reconnect,
            no_replica=self._lack_of_replicas(at_fault),
            no_replica_of_node=no_other_node or self._lack_of_replicas(on_node),
        )
        if decision.rung in IN_PROCESS:
            moved = on_node if decision.rung is Rung.NODE_REPLACE else ()
            self._begin_recovery(fault, decision, moved=tuple(moved))
        else:
            self._end_processes(fault, decision)

    def _begin_recovery(self, fault: Fault, decision: Decision, *, moved: tuple[int, ...]) -> None:
        if decision.accept_abnormal and fault.step is not None:
            self.memory.accepted = fault.step + 1
        self.decider.began(fault, decision.rung)
        for rank in moved:  # those that live on are left with their node
            self._mark_ended(rank)
        began = RecoveryBegan(
            at_s=self.now_s,
            number=self.memory.outbox.next_number(),
            generation=self.memory.round.generation,
            fault=fault,
            decision=decision,
            moved=moved,
        )
        self.memory.recoveries.begin(began)
        self.memory.outbox.record(began)
        is_checked = self.settings.checks_chips and not moved
        check = check_before_replacing(fault) if is_checked else None
        self.memory.checks.update(dict.fromkeys(began.replaced, check) if check is not None else {})
        if decision.rung is Rung.OPERATOR_RETRY:
            self._reconnect()
        else:
            mode = mode_of(decision, fault)
            self._begin_round(mode, replaced=began.replaced, by_agents=not moved)
        if fault.fault_class is FaultClass.NUMERIC_ANOMALY and fault.step is not None:
            # Last: the store may take its time, and training goes on meanwhile.
            norms = tuple(self.memory.norms.get(fault.step + 1, ()))
            self.memory.outbox.add(AbnormalNorm(fault.step + 1, norms))

    def _reconnect(self) -> None:
        """Have connections re-established under the operations that were cut short."""
        round_, self.memory.state = self.memory.round, State.RECONNECTING
        round_.connection += 1
        round_.restored.clear()
        round_.deadline_s = self.now_s + self.settings.reconnect_limit_s
        self._broadcast(
            Reconnect(generation=self.memory.round.generation, connection=round_.connection)
        )

    def _ranks_of(self, node: str | None) -> list[int]:
        return sorted(rank for rank, name in self.memory.nodes.items() if name == node)

    def _lack_of_replicas(self, ranks: Collection[int]) -> str | None:
        """Why the state of one of them is with no other rank that lives, None where all are."""
        return lack_among_living(ranks, self.memory.groups, self.memory.ranks.holders)

    def _begin_round(
        self, mode: RepairMode, *, replaced: Collection[int], by_agents: bool = True
    ) -> None:
        """Begin a generation: ranks that live report, those that are replaced are started.

        Where not `by_agents`, the supervisor starts them on another node.
        """
        memory, mode = self.memory, merge_modes(self.memory.round.mode, mode)
        deadline_s = self.now_s + self.settings.repair_limit_s
        memory.round = Round(self.memory.round.generation + 1, mode, deadline_s)
        saves = mode is RepairMode.LAST_SAVE
        memory.state = State.GATHERING_TO_SAVE if saves else State.GATHERING
        memory.pauses.end(self.memory.step, outbox=self.memory.outbox, now_s=self.now_s)
        for rank in sorted(replaced):
            self.memory.ranks.mark_starting(rank)
            if by_agents:
                check = memory.checks.get(rank)
                message = ReplaceWorker(
                    rank=rank, generation=self.memory.round.generation, check=check
                )
                self.memory.outbox.add(ToAgent(rank, message))
        self._broadcast(NewGeneration(number=self.memory.round.generation))

    def _fail(self, why: str, *, missing: Sequence[int] = ()) -> None:
        """Ask the ladder for the next rung: what was begun cannot be carried out.

        Args:
            why: it cannot.
            missing: ranks that did not come, whatever rank the fault was about.
        """
        if self.memory.round.mode is RepairMode.LAST_SAVE:
            self._save_failed(why)
            return
        recoveries = self.memory.recoveries
        fault, replaced = recoveries.newest_fault, recoveries.newest_replaced
        self.decider.failed(fault)
        is_other = bool(missing) and fault.rank not in missing and not replaced & set(missing)
        if is_other:
            node, device = (
                self.memory.nodes.get(missing[0]),
                device_of(missing[0], self.memory.nodes),
            )
            fault = replace(fault, rank=missing[0], node=node, device=device)
        self._close_recoveries(why)
        self._answer(fault, is_missing=is_other)

    def _close_recoveries(self, why_not: str | None = None) -> None:
        plan, reports = self.memory.round.plan, self.memory.round.reports
        for event in self.memory.recoveries.end(
            plan,
            reports,
            generation=self.memory.round.generation,
            now_s=self.now_s,
            why_not=why_not,
        ):
            self.memory.outbox.record(event)
        self.memory.round.plan = None  # what comes after is no part of it

    def _end_processes(self, fault: Fault, decision: Decision) -> None:
        """A rung above the processes is to answer: save first what can be saved."""
        self._close_recoveries(decision.reason)
        self.memory.why = decision.reason
        self.memory.outbox.record_end(fault, decision.reason, now_s=self.now_s)
        if decision.end_of_life_checkpoint and self.memory.round.mode is RepairMode.ROLL_BACK:
            # Some ranks have gone back and some not, one perhaps halfway.
            self._save_failed("the ranks were going back to a snapshot")
            return
        if decision.end_of_life_checkpoint and self.memory.ranks.survivors:
            self._begin_round(RepairMode.LAST_SAVE, replaced=())
            limit_s = min(self.settings.repair_limit_s, self.settings.save_limit_s)
            self.memory.round.deadline_s = self.now_s + limit_s
            return
        self._give_up(decision.reason)

    def _save_failed(self, why: str) -> None:
        self.memory.outbox.record_save_failed(why, now_s=self.now_s)
        self._give_up(self.memory.why)

    def _give_up_over(self, fault: Fault, why: str) -> None:
        """Give up for a fault that nothing here answers."""
        # Else the processes end for another one, of which this is a consequence.
        if not self.memory.why and fault.rank not in self.memory.ranks.ending:
            self.memory.outbox.record_end(fault, why, now_s=self.now_s)
        self._give_up(self.memory.why or why)

    def _give_up(self, why: str) -> None:
        if self.memory.state is State.GIVEN_UP:
            return
        self.memory.state, self.memory.why = State.GIVEN_UP, why
        self.memory.round.deadline_s = self.memory.round.suspicion = None
        self._broadcast(GiveUp(why=why))
        self.memory.outbox.add(ToAgent(None, GiveUp(why=why)))

    def _send(self, rank: int, message: ToMember) -> None:
        self.memory.outbox.add(ToRank(rank, message))

    def _broadcast(self, message: ToMember) -> None:
        for rank in sorted(self.memory.ranks.living):
            self._send(rank, message)
