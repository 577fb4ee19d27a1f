"""The reactions of an attempt, one method for each: what a stimulus changes, and what follows.

Which of them answers which stimulus in which state is the table of transitions.py. Times are
seconds since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from perdure.training.recovery import stimuli
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.ladder import device_of, fault_of_report
from perdure.training.recovery.memory import Suspicion
from perdure.training.recovery.operations import Operations
from perdure.training.recovery.protocol import (
    GiveUp,
    NewGeneration,
    PauseRequest,
    WorkerFaultKind,
)
from perdure.training.recovery.repair import RepairMode
from perdure.training.recovery.stages import State
from perdure.training.recovery.stimuli import AnyStimulus
from perdure.training.recovery.transitions import Reaction, reaction_to

# Survivors notice a broken connection in the same moment in which the kernel closes the dead
# process's connection to us: only when no such end follows is the connection alone at fault.
CONNECTION_SETTLE_S = 0.05
GENERATIONS_APART = 1000  # those of one coordinator from the next one's


METHODS: dict[Reaction, Callable[[Reactions, Any], None]] = {}
_Method = TypeVar("_Method", bound=Callable[..., None])


def _method_of(*reactions: Reaction) -> Callable[[_Method], _Method]:
    """Mark the method that is what a reaction does."""

    def mark(method: _Method) -> _Method:
        METHODS.update(dict.fromkeys(reactions, method))
        return method

    return mark


@dataclass(frozen=True, slots=True)
class Reactions(Operations):
    """Reactions of one attempt at one moment."""

    def react(self, stimulus: AnyStimulus) -> None:
        """Do what the table says."""
        reaction = reaction_to(type(stimulus), self.memory.state)
        if reaction not in (Reaction.IGNORE, Reaction.REFUSE):
            METHODS[reaction](self, stimulus)

    # Members come and go.

    @_method_of(Reaction.RESUME)
    def _resume_recovery(self, stimulus: stimuli.RecoveryResumed) -> None:
        """The ranks that live come, in a generation that no coordinator before has announced."""
        began, memory = stimulus.began, self.memory
        self.decider.resumed(began)
        memory.round.generation = began.generation + GENERATIONS_APART
        memory.step = began.fault.step or 0
        memory.recoveries.begin(began)
        self.memory.outbox.resume(began)
        self.memory.ranks.expect(set(range(memory.world_size)) - began.replaced)
        self._begin_round(RepairMode.TRAIN, replaced=began.replaced, by_agents=False)

    @_method_of(Reaction.PLACE_RANKS)
    def _place_ranks(self, stimulus: stimuli.AgentConnected) -> None:
        self.memory.nodes.update(dict.fromkeys(stimulus.ranks, stimulus.node))
        self.memory.absent.discard(stimulus.node)

    @_method_of(Reaction.MARK_ABSENT)
    def _mark_absent(self, stimulus: stimuli.AgentDisconnected) -> None:
        self.memory.absent.add(stimulus.node)

    @_method_of(Reaction.GREET)
    def _greet(self, stimulus: stimuli.RankConnected) -> None:
        self._mark_connected(stimulus)
        self._send(stimulus.rank, NewGeneration(number=self.memory.round.generation))
        if self.memory.pauses.is_requested:
            self._send(stimulus.rank, PauseRequest(wanted=True))

    @_method_of(Reaction.DISMISS)
    def _dismiss(self, stimulus: stimuli.RankConnected) -> None:
        self._mark_connected(stimulus)
        self._send(stimulus.rank, GiveUp(why=self.memory.why))

    def _mark_connected(self, stimulus: stimuli.RankConnected) -> None:
        if stimulus.layout is not None:
            self.memory.groups = stimulus.layout.replica_groups()
        self.memory.ranks.mark_connected(stimulus.rank)
        self.memory.checks.pop(stimulus.rank, None)

    @_method_of(Reaction.MARK_DISCONNECTED)
    def _mark_disconnected(self, stimulus: stimuli.RankDisconnected) -> None:
        self.memory.ranks.mark_disconnected(stimulus.rank, now_s=self.now_s)

    # Training goes on.

    @_method_of(Reaction.START_TRAINING)
    def _start_training(self, stimulus: stimuli.RankTrains) -> None:
        step = max(self.memory.step, stimulus.step)
        if not self._mark_training(stimulus, step):
            return
        self.memory.state = State.TRAINING
        early_faults, self.memory.early_faults = self.memory.early_faults, []
        for fault in early_faults:
            self.react(fault)

    @_method_of(Reaction.FINISH_REPAIR)
    def _finish_repair(self, stimulus: stimuli.RankTrains) -> None:
        if self._mark_training(stimulus, stimulus.step):
            self._continue_training()

    @_method_of(Reaction.NOTE_TRAINING)
    def _note_training(self, stimulus: stimuli.RankTrains) -> None:
        self._mark_training(stimulus, stimulus.step)

    def _mark_training(self, stimulus: stimuli.RankTrains, step: int) -> bool:
        """Note that a rank trains, at a step. Returns whether all ranks train with it."""
        if stimulus.generation != self.memory.round.generation:
            return False
        if stimulus.layout is not None:
            self.memory.groups = stimulus.layout.replica_groups()
        self.memory.step = step
        self.memory.round.training.add(stimulus.rank)
        self.memory.ranks.stateless.discard(stimulus.rank)
        if self._all_ranks_train:
            self.memory.round.mode = RepairMode.TRAIN
        return self._all_ranks_train

    @_method_of(Reaction.NOTE_STEP)
    def _note_step(self, stimulus: stimuli.StepRecorded) -> None:
        self.memory.step = max(self.memory.step, stimulus.step)

    @_method_of(Reaction.NOTE_COMMIT)
    def _note_commit(self, stimulus: stimuli.StepCommitted) -> None:
        self.decider.committed(stimulus.step)

    @_method_of(Reaction.REQUEST_PAUSE)
    def _request_pause(self, stimulus: stimuli.PauseWanted) -> None:
        if stimulus.is_wanted != self.memory.pauses.is_requested:
            self.memory.pauses.is_requested = stimulus.is_wanted
            self._broadcast(PauseRequest(wanted=stimulus.is_wanted))

    @_method_of(Reaction.NOTE_PAUSE)
    def _note_pause(self, stimulus: stimuli.RankPaused) -> None:
        rank, step, pauses = stimulus.rank, stimulus.step, self.memory.pauses
        if stimulus.is_paused:
            # The vote may have brought a request before the message did, or one that is over.
            self._send(rank, PauseRequest(wanted=pauses.is_requested))
        if rank not in self.memory.round.training:
            return  # reported before the generation that it is in now
        self.memory.step = max(self.memory.step, step)
        size, outbox, now_s = self.memory.world_size, self.memory.outbox, self.now_s
        if stimulus.is_paused:
            pauses.begin(rank, step, world_size=size, outbox=outbox, now_s=now_s)
        else:
            pauses.leave(rank, step, outbox=outbox, now_s=now_s)

    @_method_of(Reaction.FINISH_TRAINING)
    def _finish_training(self, stimulus: stimuli.LoopEnded) -> None:
        if self.memory.round.suspicion is not None:
            self._abandon_recovery(stimulus)
            return
        self._note_end_of_loop(stimulus)
        self.memory.state = State.ENDING

    @_method_of(Reaction.ABANDON_RECOVERY)
    def _abandon_recovery(self, stimulus: stimuli.LoopEnded) -> None:
        self._note_end_of_loop(stimulus)
        why = f"rank {stimulus.rank} came to its end: no generation has all ranks any more"
        self._close_recoveries(why)
        self._give_up(why)

    @_method_of(Reaction.NOTE_END_OF_LOOP)
    def _note_end_of_loop(self, stimulus: stimuli.LoopEnded) -> None:
        self.memory.ranks.ending.add(stimulus.rank)

    # Ranks report faults that they outlive.

    @_method_of(Reaction.KEEP_FAULT)
    def _keep_fault(self, stimulus: stimuli.FaultReported) -> None:
        """It waits for a generation, which needs all ranks."""
        self.memory.early_faults.append(stimulus)

    @_method_of(Reaction.END_OVER_FAULT)
    def _end_over_fault(self, stimulus: stimuli.FaultReported) -> None:
        rank, report = stimulus.rank, stimulus.report
        fault = fault_of_report(report, reported_by=rank, nodes=self.memory.nodes)
        why = f"{report.kind} at rank {rank} while others had come to their end"
        self._give_up_over(fault, why)

    @_method_of(Reaction.JUDGE_FAULT)
    def _judge_fault(self, stimulus: stimuli.FaultReported) -> None:
        """Answer it at once, or wait for what may explain it."""
        rank, report, suspicion = stimulus.rank, stimulus.report, self.memory.round.suspicion
        is_over = report.connection is not None and report.connection < self.memory.round.connection
        if report.generation < self.memory.round.generation or is_over:
            return
        if report.kind not in (WorkerFaultKind.CONNECTION, WorkerFaultKind.REPAIR):
            self.react(stimuli.FaultSettled(rank, report))
        elif suspicion is None:
            self.memory.round.suspicion = Suspicion(self.now_s + CONNECTION_SETTLE_S, rank, report)
        elif report.connection is None and suspicion.report.connection is not None:
            # This rank has left its step, and needs more than new connections.
            self.memory.round.suspicion = Suspicion(suspicion.settles_at_s, rank, report)

    @_method_of(Reaction.ANSWER_FAULT)
    def _answer_fault(self, stimulus: stimuli.FaultSettled) -> None:
        # Without a number the rank has left its step, and waits for a generation.
        can_reconnect = stimulus.report.connection is not None
        self._answer_report(stimulus, can_reconnect=can_reconnect)

    @_method_of(Reaction.ANSWER_FAULT_AFRESH)
    def _answer_fault_afresh(self, stimulus: stimuli.FaultSettled) -> None:
        self._answer_report(stimulus, can_reconnect=False)

    def _answer_report(self, stimulus: stimuli.FaultSettled, *, can_reconnect: bool) -> None:
        report = stimulus.report
        fault = fault_of_report(report, reported_by=stimulus.rank, nodes=self.memory.nodes)
        if report.kind is WorkerFaultKind.NUMERIC:
            # All ranks took part in its vote: they train, whether or not all have reported it yet.
            self.memory.round.mode = RepairMode.TRAIN
            if report.grad_norm is not None:
                self.memory.norms.setdefault(report.step + 1, []).append(report.grad_norm)
        self._answer(fault, is_finite=report.is_finite, can_reconnect=can_reconnect)

    # Processes and nodes end.

    @_method_of(Reaction.ANSWER_DEATH)
    def _answer_death(self, stimulus: stimuli.ProcessEnded) -> None:
        self._mark_ended(stimulus.rank)
        self.memory.round.suspicion = None
        self._answer(stimulus.fault)

    @_method_of(Reaction.RECOUNT_SURVIVORS)
    def _recount_survivors(self, stimulus: stimuli.ProcessEnded) -> None:
        self._mark_ended(stimulus.rank)
        self._check_reports()

    @_method_of(Reaction.CHECK_SAVE)
    def _check_save_without(self, stimulus: stimuli.ProcessEnded) -> None:
        self._mark_ended(stimulus.rank)
        self._check_saved()

    @_method_of(Reaction.END_OVER_DEATH)
    def _end_over_death(self, stimulus: stimuli.ProcessEnded) -> None:
        self._mark_ended(stimulus.rank)
        why = f"rank {stimulus.rank} ended while the attempt was {self.memory.state.stage}"
        self._give_up_over(stimulus.fault, why)

    @_method_of(Reaction.NOTE_DEATH)
    def _note_death(self, stimulus: stimuli.ProcessEnded | stimuli.ReplacementFailed) -> None:
        self._mark_ended(stimulus.rank)

    @_method_of(Reaction.FAIL_REPLACEMENT)
    def _fail_replacement(self, stimulus: stimuli.ReplacementFailed) -> None:
        rank = stimulus.rank
        self._mark_ended(rank)
        self.memory.recoveries.move_to_newest(rank)
        self._fail(f"rank {rank} is not replaced: {stimulus.why}", missing=(rank,))

    @_method_of(Reaction.DROP_NODE)
    def _drop_node(self, stimulus: stimuli.NodeLost | stimuli.NodeSlow) -> None:
        node, nodes = stimulus.fault.node, self.memory.nodes
        if node is None or self.memory.recoveries.is_moving(node):
            return  # reported before
        lost = [rank for rank in sorted(stimulus.ranks) if nodes.setdefault(rank, node) == node]
        if not lost:
            return  # they are on another one already
        for rank in lost[1:]:
            self._mark_ended(rank)
        self.react(stimuli.ProcessEnded(lost[0], stimulus.fault))

    @_method_of(Reaction.ANSWER_CHIP)
    def _answer_chip(self, stimulus: stimuli.ChipFailed) -> None:
        """Take the process on the chip for lost: it may never leave its step, nor be right."""
        fault = self._with_rank(stimulus.fault)
        if fault.rank is None:
            return  # no rank computes on it, or its node was left
        self.memory.round.suspicion = None
        self._mark_ended(fault.rank)
        self._answer(fault, no_other_node=stimulus.no_other_node)

    @_method_of(Reaction.END_OVER_CHIP)
    def _end_over_chip(self, stimulus: stimuli.ChipFailed) -> None:
        fault = self._with_rank(stimulus.fault)
        if fault.rank is not None:
            self._give_up_over(fault, fault.evidence)

    def _with_rank(self, fault: Fault) -> Fault:
        ranks, device = self._ranks_of(fault.node), fault.device
        rank = ranks[device] if device is not None and device < len(ranks) else None
        return replace(fault, rank=rank, step=self.memory.step)

    @_method_of(Reaction.ANSWER_SILENT_NODE)
    def _answer_silent_node(self, stimulus: stimuli.NodeSilent) -> None:
        fault = self._mark_silent(stimulus.node)
        self._answer(fault, no_other_node=fault.evidence)

    @_method_of(Reaction.END_OVER_NODE)
    def _end_over_node(self, stimulus: stimuli.NodeSilent) -> None:
        fault = self._mark_silent(stimulus.node)
        self._give_up_over(fault, fault.evidence)

    def _mark_silent(self, node: str) -> Fault:
        """End what a lost node leaves: without a supervisor there is no other node for it.

        What lives on a node that is cut off from all others ends so, too.
        """
        why = f"the agent of {node} is gone, and no supervisor brings another node"
        for rank in self._ranks_of(node):
            self._mark_ended(rank)
        return Fault(FaultClass.NODE_LOST, self.now_s, why, node=node, step=self.memory.step)

    # Time passes.

    @_method_of(Reaction.LOOK_AT_CLOCK)
    def _look_at_clock(self, _stimulus: stimuli.TimePassed) -> None:
        suspicion = self.memory.round.suspicion
        if suspicion is not None and self.memory.is_settled(self.now_s):
            self.memory.round.suspicion = None
            self.react(stimuli.FaultSettled(suspicion.rank, suspicion.report))
        for rank in self.memory.unexplained(self.now_s):
            if self.memory.nodes.get(rank) in self.memory.absent:
                self.react(stimuli.NodeSilent(self.memory.nodes[rank]))
                break  # the others of the node are explained with it, and those of another later
            self.react(stimuli.ProcessEnded(rank, self._unreported_end(rank)))
        if self.memory.round.deadline_s is not None and self.now_s > self.memory.round.deadline_s:
            self.memory.round.deadline_s = None
            self.react(stimuli.DeadlinePassed())

    def _unreported_end(self, rank: int) -> Fault:
        why = f"rank {rank}: its agent did not report how it ended"
        node, device = self.memory.nodes.get(rank), device_of(rank, self.memory.nodes)
        return Fault(FaultClass.NATIVE_CRASH, self.now_s, why,
                     node=node, rank=rank, device=device, step=self.memory.step)  # fmt: skip

    @_method_of(Reaction.MISS_REPORTS)
    def _miss_reports(self, _stimulus: stimuli.DeadlinePassed) -> None:
        self._fail_without(self._expected() - set(self.memory.round.reports))

    @_method_of(Reaction.MISS_REPAIR)
    def _miss_repair(self, _stimulus: stimuli.DeadlinePassed) -> None:
        self._fail_without(self._expected() - self.memory.round.training)

    def _fail_without(self, ranks: Collection[int]) -> None:
        missing, limit_s = sorted(ranks), self.settings.repair_limit_s
        self._fail(f"ranks {missing} did not come within {limit_s:g} s", missing=missing)

    @_method_of(Reaction.MISS_CONNECTIONS)
    def _miss_connections(self, _stimulus: stimuli.DeadlinePassed) -> None:
        missing = sorted(self._expected() - self.memory.round.restored)
        limit_s = self.settings.reconnect_limit_s
        self._fail(f"ranks {missing} have no connections after {limit_s:g} s")

    @_method_of(Reaction.PLAN_WITH_SURVIVORS)
    def _plan_with_survivors(self, _stimulus: stimuli.DeadlinePassed) -> None:
        """The ranks that reported may hold the whole state."""
        self._make_plan()

    @_method_of(Reaction.MISS_SAVE)
    def _miss_save(self, _stimulus: stimuli.DeadlinePassed) -> None:
        self._save_failed("the survivors did not finish in time")

    # Ranks do what they were asked to do.

    @_method_of(Reaction.COUNT_CONNECTIONS)
    def _count_connections(self, stimulus: stimuli.ConnectionsRestored) -> None:
        rank, report, round_ = stimulus.rank, stimulus.report, self.memory.round
        if (report.generation, report.connection) != (round_.generation, round_.connection):
            return
        if report.problem is not None:
            self._fail(f"rank {rank}: {report.problem}")
            return
        round_.restored.add(rank)
        if len(round_.restored) < self.memory.world_size:
            return
        if self._all_ranks_train:
            self._continue_training()
        else:  # the connections broke in the middle of a repair
            self.memory.state = State.REPAIRING
            round_.deadline_s = self.now_s + self.settings.repair_limit_s

    @_method_of(Reaction.GATHER, Reaction.GATHER_TO_SAVE)
    def _gather(self, stimulus: stimuli.StateReported) -> None:
        report = stimulus.report
        if stimulus.generation == self.memory.round.generation:
            self.memory.ranks.mark_reported(report.rank, is_clean=report.is_clean)
            self.memory.round.reports[report.rank] = report
            self._check_reports()

    @_method_of(Reaction.COLLECT_SAVE)
    def _collect_save(self, stimulus: stimuli.LastSaveReported) -> None:
        self.memory.round.saved[stimulus.rank] = stimulus.report
        self.memory.round.unsaved.discard(stimulus.rank)
        if stimulus.report.problem is not None or not self.memory.round.unsaved:
            self._check_saved()
