"""The end of an attempt: its diagnosis, the ladder's decision, and the healing of its chips.

All three are on record before anything follows from them. Where healing does not help, the rung
has failed, and the ladder is asked again. Times are seconds since the epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from perdure.storage.errors import StorageError
from perdure.storage.objects import ObjectStore
from perdure.training.config.job import Job
from perdure.training.diagnosis.cause import Diagnosis
from perdure.training.diagnosis.classify import diagnose
from perdure.training.diagnosis.ending import blame_repeated_end, describe_late_fault
from perdure.training.diagnosis.hang import locate
from perdure.training.diagnosis.loading import Resumed, judge_loading
from perdure.training.diagnosis.obstacles import judge_obstacles
from perdure.training.engines.fleet import Fleet
from perdure.training.environment import variables_of
from perdure.training.errors import AgentUnreachable, EngineError
from perdure.training.journal.attempt_view import AttemptView
from perdure.training.journal.events import ChipsHealed
from perdure.training.journal.history import RunHistory
from perdure.training.journal.records import DecisionMade, RungFailed
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.healing import Act, ActDone, HealPlan, hardware_fault
from perdure.training.recovery.ladder import decide
from perdure.training.recovery.replicas import lack_among_living, lack_of_replicas
from perdure.training.recovery.rungs import RESTARTS_IN_PLACE, Capacity, Decision, Recovery, Rung
from perdure.training.reporting.fault_report import save_hang_report
from perdure.training.supervisor.checkpoints import saves_are_known
from perdure.training.supervisor.ledger_writer import LedgerWriter
from perdure.training.supervisor.watch import AttemptEnd, EndKind
from perdure.training.wire.node import HealOrder

POLL_S = 0.05
ANSWER_MARGIN_S = 15.0


@dataclass(frozen=True, slots=True)
class Healer:
    """Has chips healed before a restart in place.

    Attributes:
        decider: answers where healing fails.
        cwd: folder that the workers start in.
    """

    decider: Decider
    cwd: str

    def heal(
        self,
        view: AttemptView,
        fault: Fault,
        decision: Decision,
        *,
        stop_wanted: Callable[[], bool],
    ) -> Decision:
        """Return the decision to act on: the same, or the next rung where the fault persists.

        Args:
            view: the attempt that has failed; none of its processes is left.
            fault: that ended the attempt.
            decision: answers the fault.
            stop_wanted: polled meanwhile; a request to stop ends the wait, not the healing.
        """
        if view.healed is not None and view.healed.succeeded:
            return decision
        ended = self.decider.writer.history.attempts[-1].ended
        hurt = hardware_fault(fault, ended.runners_up if ended is not None else ())
        if decision.rung not in RESTARTS_IN_PLACE or hurt is None or hurt.node is None:
            return decision
        if not self.decider.job.restart.heal.check:
            return decision
        done = self._await(self._order(view, hurt, decision), hurt.node, stop_wanted)
        if done is None:
            return decision  # the next attempt shows what has become of the node
        self.decider.writer.record_events(view, [done])
        if done.succeeded:
            return decision
        return self.decider.rung_failed(decision.rung, done.text)

    def _await(
        self, order: HealOrder, node: str, stop_wanted: Callable[[], bool]
    ) -> ChipsHealed | None:
        """Wait for the outcome; None: the node does not answer, or a stop was requested."""
        until_s = time.monotonic() + order.plan.limit_s + ANSWER_MARGIN_S
        while time.monotonic() < until_s and not stop_wanted():
            try:
                done = self.decider.fleet.heal(node, order).done
            except (EngineError, AgentUnreachable):
                return None
            if done is not None:
                return done
            time.sleep(POLL_S)
        return None if stop_wanted() else _late(order, node)

    def _order(self, view: AttemptView, fault: Fault, decision: Decision) -> HealOrder:
        job = self.decider.job
        placement, attempt = view.key
        return HealOrder(
            placement=placement,
            attempt=attempt,
            rung=decision.rung,
            plan=HealPlan(
                fault.chip_code,
                devices=(fault.device,) if fault.device is not None else (),
                may_reset=job.restart.heal.reset,
                wait_s=job.restart.heal.wait_s,
                reset_s=job.restart.heal.reset_s,
            ),
            slots_per_node=job.engine.slots_per_node,
            variables=variables_of(job),
            cwd=self.cwd,
        )


def _late(order: HealOrder, node: str) -> ChipsHealed:
    """Describe a node that lives and comes to no end."""
    limit_s = order.plan.limit_s
    silent = ActDone(Act.CHECK, is_good=False, seen=f"no end within {limit_s:g} s", seconds=limit_s)
    return ChipsHealed(
        at_s=time.time(),
        number=1,
        node=node,
        rung=order.rung,
        succeeded=False,
        acts=(silent,),
        seconds=limit_s,
    )


@dataclass(frozen=True, slots=True)
class Decider:
    """Asks the ladder about the attempts of one run.

    Attributes:
        job: has the policy.
        fleet: its capabilities and nodes limit what can be decided.
        writer: records each decision.
    """

    job: Job
    fleet: Fleet
    writer: LedgerWriter

    def decide(self, view: AttemptView, fault: Fault) -> Decision:
        """Decide about the fault that ended an attempt, unless the ledger has the decision."""
        history = self.writer.refresh()
        decided = self.writer.now(view).decision
        if decided is not None:
            return decided  # by whoever asked first: a fault has one decision
        # With the node at fault: isolated earlier, it may have been used for want of another.
        healthy = self.num_healthy(set(history.isolated) - {fault.node}, at_fault=fault.node)
        decision = self._ask(fault, history, healthy=healthy, no_replica=no_replica_of(self.job))
        self.writer.append(view, DecisionMade, decision=decision)
        self.writer.refresh()
        return decision

    def decide_inside(self, fault: Fault, ranks: Collection[int]) -> Decision:
        """Decide about a loss while other processes live on; nothing is recorded.

        Args:
            fault: names the node.
            ranks: on that node.
        """
        groups, everybody = self.job.layout.replica_groups(), range(self.job.engine.world_size)
        lack = lack_among_living(ranks, groups, everybody)
        return self._ask(fault, self.writer.refresh(), survivors=True, no_replica_of_node=lack)

    def _ask(
        self,
        fault: Fault,
        history: RunHistory,
        *,
        healthy: int | None = None,
        survivors: bool = False,
        no_replica: str | None = None,
        no_replica_of_node: str | None = None,
    ) -> Decision:
        """Ask the ladder under the job's policy, with the capabilities of its engine."""
        return decide(
            fault,
            now_s=time.time(),
            history=recoveries_of(self.job, history),
            supported=self.fleet.capabilities,
            policy=self.job.restart.policy(operator_retry=self.job.comm.op_retry.enabled),
            survivors=survivors,
            capacity=Capacity(
                healthy=healthy,
                needed=self.job.engine.nodes,
                is_estimate=self.fleet.nodes() is None,
            ),
            no_replica=no_replica,
            no_replica_of_node=no_replica_of_node,
        )

    def num_healthy(self, isolated: Collection[str], *, at_fault: str | None = None) -> int | None:
        """Count the nodes that could take a container, with the one at fault; None: unknown."""
        nodes = self.fleet.usable_nodes()
        if nodes is None:
            return None
        return len({*nodes, *filter(None, [at_fault])} - set(isolated))

    def decide_pending(self) -> None:
        """Decide about a failed attempt whose supervisor died before it asked the ladder."""
        view = self.writer.refresh().undecided_attempt
        if view is not None:
            self.decide(view, fault_of(view))

    def rung_failed(self, rung: Rung, why: str, *, waited_s: float = 0.0) -> Decision:
        """Record that a rung could not be carried out, and ask the ladder again.

        Args:
            rung: that failed.
            why: for people.
            waited_s: for a node to become free.

        Raises:
            EngineError: nothing has failed since the run began or was started again.
        """
        history = self.writer.refresh()
        view = history.attempts[-1] if history.attempts else None
        if view is None or view.fault is None or len(history.attempts) <= history.budgets_from:
            raise EngineError(why)
        self.writer.append(view, RungFailed, rung=rung, why=why, waited_s=waited_s)
        return self.decide(view, fault_of(view))

    def record_vanished(self, view: AttemptView, *, is_from_outside: bool) -> None:
        """Record an attempt that ended without a supervisor, and its containers with it.

        Args:
            view: the attempt.
            is_from_outside: whether the machine or the allocation has ended, and no node is lost.
        """
        fault = Fault(
            FaultClass.NODE_LOST,
            time.time(),
            "no agent of the placement is left",
            explanation="All containers are gone: the machine was restarted, or everything "
            "was taken down at once.",
        )
        # Its last commits first: progress since the previous recovery makes that recovery free.
        self.writer.missed_checkpoints(view)
        if is_from_outside:
            outcome, step = EndKind.ENDED_FROM_OUTSIDE.value, self.writer.history.committed_step
            self.writer.end_attempt(view, outcome, to_step=step)
            return
        self.writer.end_attempt(view, "failed", to_step=None, diagnosis=Diagnosis(fault))
        self.decide(view, fault)


def recoveries_of(job: Job, history: RunHistory) -> list[Recovery]:
    """List every past recovery of the run, oldest first, as the ladder takes them."""
    # A command whose checkpoints are not known has progressed when it has lasted.
    lasts_s = None if saves_are_known(job) else job.restart.progress_after_s
    return history.recoveries(progress_after_s=lasts_s)


def no_replica_of(job: Job) -> str | None:
    """Say why no rank has another's state; for a command the job must give the layout."""
    is_known = job.has_layout or not job.worker.is_command
    return lack_of_replicas(job.layout) if is_known else None


def fault_of(view: AttemptView) -> Fault:
    """Return the fault that ended an attempt that has failed."""
    assert view.fault is not None  # noqa: S101 the attempt has failed
    return view.fault


@dataclass(frozen=True, slots=True, repr=False)
class AttemptResult:
    """The end of an attempt and, where it failed, the decision about its fault."""

    kind: EndKind
    placement: int
    attempt: int
    step: int | None
    fault: Fault | None = None
    decision: Decision | None = None
    healed: ChipsHealed | None = None
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        # Prefect puts it behind a state's message, in a line of the log.
        return f"<attempt {self.placement}.{self.attempt} {self.kind}>"

    @property
    def restarts_in_place(self) -> bool:
        """Whether the same containers start the processes again."""
        return self.decision is not None and self.decision.rung in RESTARTS_IN_PLACE


@dataclass(frozen=True, slots=True)
class AttemptFinisher:
    """Concludes the attempts of one run.

    Attributes:
        healer: its decider answers the faults.
        store: takes the stacks of hangs.
    """

    healer: Healer
    store: ObjectStore

    @property
    def _decider(self) -> Decider:
        return self.healer.decider

    @property
    def _writer(self) -> LedgerWriter:
        return self._decider.writer

    def conclude(
        self, view: AttemptView, end: AttemptEnd, stop_wanted: Callable[[], bool]
    ) -> AttemptResult:
        """Diagnose, decide, put both on record, and heal where the answer is to stay.

        What is on record already, of an earlier call that was cut off, is not done again.
        """
        if self._now(view).ended is None:
            self.record_end(view, end)
        view = self._now(view)
        if view.fault is None:
            return AttemptResult(end.kind, *view.key, end.last_step, notes=end.notes)
        decision = self._decider.decide(view, view.fault)
        decision = self.healer.heal(view, fault_of(view), decision, stop_wanted=stop_wanted)
        view = self._now(view)
        fault = view.ended.fault if view.ended is not None else None
        return AttemptResult(end.kind, *view.key, end.last_step, fault, decision, view.healed)

    def _now(self, view: AttemptView) -> AttemptView:
        self._writer.refresh()
        return self._writer.now(view)

    def record_end(self, view: AttemptView, end: AttemptEnd) -> Diagnosis | None:
        """Put the end of an attempt on record, with the diagnosis where it has failed."""
        placement, attempt = view.key
        # The nodes upload their logs while the fault is diagnosed and the next attempt starts.
        self._decider.fleet.collect_logs(placement, attempt)
        self._writer.missed_checkpoints(view)
        diagnosis = self._diagnose(view, end) if end.kind is EndKind.FAILED else None
        if diagnosis is not None and end.stacks:
            diagnosis = self._with_stacks(view, end, diagnosis)
        self._writer.end_attempt(
            view, end.kind.value, to_step=end.last_step, end=end, diagnosis=diagnosis
        )
        return diagnosis

    def complete_if_done(self, view: AttemptView, end: AttemptEnd) -> AttemptEnd:
        """Turn a failure after the last step, whose checkpoint is complete, into a note."""
        if end.kind is not EndKind.FAILED or end.done_step is None:
            return end
        diagnosis = diagnose(end.evidence)
        if end.stacks:
            diagnosis = self._with_stacks(view, end, diagnosis)
        logs = "\n".join(worker.log for worker in end.evidence.workers)
        stacks = "\n".join(text.text for _, text in end.stacks)
        note = describe_late_fault(end.done_step, diagnosis.fault, logs=logs, stacks=stacks)
        step = max(end.last_step or 0, end.done_step)
        return replace(end, kind=EndKind.COMPLETED, last_step=step, notes=(*end.notes, note))

    def _diagnose(self, view: AttemptView, end: AttemptEnd) -> Diagnosis:
        diagnosis = diagnose(end.evidence)
        # A user who starts a run that had ended has seen how.
        earlier = self._writer.history.attempts[self._writer.history.budgets_from : -1]
        last = earlier[-1].ended if earlier else None
        fault = blame_repeated_end(diagnosis.fault, last.fault if last is not None else None)
        if self._decider.job.worker.is_command:
            outputs = [worker.log for worker in end.evidence.workers if worker.has_failed]
            fault = judge_loading(fault, outputs, self._resumed(view))
        is_first = len(self._writer.history.attempts) < 2
        fault = judge_obstacles(fault, end.evidence.obstacles, is_first=is_first)
        return replace(diagnosis, fault=fault)

    def _resumed(self, view: AttemptView) -> Resumed:
        """Describe from where a command went on in the attempt that has ended."""
        history, current = self._writer.history, self._writer.now(view)
        resume = current.resume
        step = resume.step if resume is not None else None
        return Resumed(
            has_trained=any(earlier.first_step is not None for earlier in history.attempts[:-1]),
            has_stepped=current.first_step is not None,
            path=resume.path if resume is not None else None,
            step=step,
            other_steps=[other for other in history.saved_steps if other != step],
            set_aside=[
                checkpoint.path
                for earlier in history.attempts
                if earlier.resume is not None
                for checkpoint in earlier.resume.set_aside
            ],
        )

    def _with_stacks(self, view: AttemptView, end: AttemptEnd, diagnosis: Diagnosis) -> Diagnosis:
        """Name the place of a hang's stacks in its fault, and that of its rank in the program."""
        run_id, ranks = self._decider.job.run_id, end.evidence.rank_progress
        try:
            where = save_hang_report(self.store, run_id, view.key, end.stacks, ranks)
        except StorageError as error:
            where = f"The stacks of the ranks could not be saved: {error}."
        texts = [(log.rank, log.text) for _, log in end.stacks]
        fault = locate(diagnosis.fault, texts, end.evidence)
        explained = replace(fault, explanation=f"{fault.explanation} {where}".strip())
        return replace(diagnosis, fault=explained)
