"""Before processes are started on a chip that had a fault: what its node does about it, on record.

The first degradation of a restart in place: where the fault is still there, the rung has failed,
and the ladder is asked again. Times are seconds.

Decisions about attempts that failed, and about rungs that could not be carried out.

A decision is on record before anything follows from it. Times are seconds since the epoch.

The end of an attempt: what broke it, what is done about it, and both on record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from perdure.storage.errors import StorageError
from perdure.storage.objects import ObjectStore
from perdure.training.config.job import Job
from perdure.training.diagnosis.cause import Diagnosis
from perdure.training.diagnosis.classify import diagnose
from perdure.training.diagnosis.ending import blame_repeated_end, fault_of_command
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
        decider: of the run.
        cwd: folder that the workers start in.
    """

    decider: Decider
    cwd: str

    def answer(
        self, view: AttemptView, fault: Fault, *, stop_wanted: Callable[[], bool]
    ) -> tuple[Decision, ChipsHealed | None]:
        """Ask the ladder about the fault that ended an attempt, and heal where it says to stay."""
        decision = self.decider.decide(view, fault)
        decision = self.heal(view, fault, decision, stop_wanted=stop_wanted)
        return decision, self.decider.writer.refresh().attempts[-1].healed

    def heal(
        self,
        view: AttemptView,
        fault: Fault,
        decision: Decision,
        *,
        stop_wanted: Callable[[], bool],
    ) -> Decision:
        """The decision to act on: the given one, or the next rung where the fault is still there.

        Args:
            view: the attempt that has failed; none of its processes is left.
            fault: that ended it.
            decision: that answers it.
            stop_wanted: polled meanwhile; a request to stop ends the wait, not what goes on.
        """
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
        """What came of it; None when nobody knows, or a stop was requested."""
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
    """A node that lives and comes to no end."""
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
        job: of the run.
        fleet: its capabilities and nodes limit what can be decided.
        writer: of the run's ledger.
    """

    job: Job
    fleet: Fleet
    writer: LedgerWriter

    def decide(self, view: AttemptView, fault: Fault) -> Decision:
        """What answers the fault that ended an attempt."""
        history = self.writer.refresh()
        healthy = num_healthy(self.job, self.fleet.nodes(), history.isolated)
        decision = self._ask(fault, history, healthy=healthy, no_replica=no_replica_of(self.job))
        self.writer.append(view, DecisionMade, decision=decision)
        self.writer.refresh()
        return decision

    def within(self, fault: Fault, ranks: Collection[int]) -> Decision:
        """What answers a fault whose other processes live on, and whose coordinator does not.

        Args:
            fault: with its node.
            ranks: of that node.
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
        """The ladder's answer under the job's policy, with what its engine can do."""
        return decide(
            fault,
            now_s=time.time(),
            history=recoveries_of(self.job, history),
            supported=self.fleet.capabilities,
            policy=self.job.restart.policy(operator_retry=self.job.comm.op_retry.enabled),
            survivors=survivors,
            capacity=Capacity(healthy=healthy, needed=self.job.engine.nodes),
            no_replica=no_replica,
            no_replica_of_node=no_replica_of_node,
        )

    def decide_pending(self) -> None:
        """Decide about a failed attempt whose supervisor died before it asked the ladder."""
        view = self.writer.refresh().undecided_attempt
        if view is not None:
            self.decide(view, fault_of(view))

    def rung_failed(self, rung: Rung, why: str, *, waited_s: float = 0.0) -> Decision:
        """Record that a rung could not be carried out; what the ladder answers then.

        Args:
            rung: that failed.
            why: it did.
            waited_s: for a node to become free.

        Raises:
            EngineError: nothing has failed since the run began or was started again.
        """
        history = self.writer.refresh()
        view = history.attempts[-1] if history.attempts else None
        if view is None or len(history.attempts) <= history.budgets_from:
            raise EngineError(why)
        self.writer.append(view, RungFailed, rung=rung, why=why, waited_s=waited_s)
        return self.decide(view, fault_of(view))

    def vanished(self, view: AttemptView) -> None:
        """Record an attempt that ended without a supervisor, and its containers with it."""
        fault = Fault(
            FaultClass.NODE_LOST,
            time.time(),
            "no agent of the placement is left",
            explanation="All containers are gone: the machine was restarted, or everything "
            "was taken down at once.",
        )
        # Its last commits first: progress since the recovery before makes that one free.
        self.writer.missed_checkpoints(view)
        self.writer.end_attempt(view, "failed", to_step=None, diagnosis=Diagnosis(fault))
        self.decide(view, fault)


def num_healthy(job: Job, nodes: Sequence[str] | None, isolated: Collection[str]) -> int:
    """How many nodes the run may use: those that are there, or that its job allows it."""
    if nodes is None:
        return job.engine.nodes + job.engine.spares - len(isolated)
    return len(set(nodes) - set(isolated))


def recoveries_of(job: Job, history: RunHistory) -> list[Recovery]:
    """Every past recovery of the run, oldest first, as the ladder takes them."""
    # A command whose checkpoints are not known has progressed when it has lasted.
    lasts_s = None if saves_are_known(job) else job.restart.progress_after_s
    return history.recoveries(progress_after_s=lasts_s)


def no_replica_of(job: Job) -> str | None:
    """Why no rank has another's state; of a command it is known where the job has its layout."""
    is_known = job.has_layout or not job.worker.is_command
    return lack_of_replicas(job.layout) if is_known else None


def fault_of(view: AttemptView) -> Fault:
    """What ended an attempt that has failed."""
    assert view.fault is not None  # noqa: S101 asked for failed attempts alone
    return view.fault


@dataclass(frozen=True, slots=True, repr=False)
class AttemptResult:
    """How an attempt ended and, if it failed, what is to be done."""

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


class AttemptFinisher:
    """Concludes the attempts of one run.

    Args:
        job: of the run.
        fleet: of the run.
        writer: of its ledger.
        healer: answers the faults.
        store: takes the stacks of hangs.
    """

    def __init__(
        self, job: Job, fleet: Fleet, writer: LedgerWriter, healer: Healer, store: ObjectStore
    ) -> None:
        self._job = job
        self._fleet = fleet
        self._writer = writer
        self._healer = healer
        self._store = store

    def conclude(
        self, view: AttemptView, end: AttemptEnd, stop_wanted: Callable[[], bool]
    ) -> AttemptResult:
        """Diagnose, decide, put both on record, and heal where the answer is to stay."""
        diagnosis = self.record_end(view, end)
        if diagnosis is None:
            return AttemptResult(end.kind, *view.key, end.last_step, notes=end.notes)
        fault = diagnosis.fault
        decision, healed = self._healer.answer(view, fault, stop_wanted=stop_wanted)
        return AttemptResult(end.kind, *view.key, end.last_step, fault, decision, healed)

    def record_end(self, view: AttemptView, end: AttemptEnd) -> Diagnosis | None:
        """Put the end of an attempt on record, with what broke it, if something did."""
        placement, attempt = view.key
        # The nodes upload them while the fault is diagnosed and the next attempt starts.
        self._fleet.collect_logs(placement, attempt)
        self._writer.missed_checkpoints(view)
        diagnosis = self._diagnosed(end) if end.kind is EndKind.FAILED else None
        if diagnosis is not None and end.stacks:
            diagnosis = self._with_stacks(view, end, diagnosis)
        self._writer.end_attempt(
            view, end.kind.value, to_step=end.last_step, end=end, diagnosis=diagnosis
        )
        return diagnosis

    def _diagnosed(self, end: AttemptEnd) -> Diagnosis:
        found = diagnose(end.evidence)
        # A user who starts a run that had ended has seen how.
        before = self._writer.history.attempts[self._writer.history.budgets_from : -1]
        last = before[-1].ended if before else None
        fault = blame_repeated_end(found.fault, last.fault if last is not None else None)
        return replace(
            found, fault=fault_of_command(fault) if self._job.worker.is_command else fault
        )

    def _with_stacks(self, view: AttemptView, end: AttemptEnd, diagnosis: Diagnosis) -> Diagnosis:
        """Name the place of a hang's stacks in its fault."""
        ranks = end.evidence.rank_progress
        try:
            where = save_hang_report(self._store, self._job.run_id, view.key, end.stacks, ranks)
        except StorageError as error:
            where = f"The stacks of the ranks could not be saved: {error}."
        fault = diagnosis.fault
        explained = replace(fault, explanation=f"{fault.explanation} {where}".strip())
        return replace(diagnosis, fault=explained)
