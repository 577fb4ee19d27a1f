"""Decisions about attempts that failed, and about rungs that could not be carried out.

A decision is on record before anything follows from it. Times are seconds since the epoch.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from perdure.training.diagnosis.cause import Diagnosis
from perdure.training.engines.fleet import Fleet
from perdure.training.errors import EngineError
from perdure.training.job import Job
from perdure.training.journal.attempt_view import AttemptView
from perdure.training.journal.history import RunHistory
from perdure.training.journal.records import Decided, RungFailed
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.ladder import decide
from perdure.training.recovery.replicas import lack_among_living, lack_of_replicas
from perdure.training.recovery.rungs import Capacity, Decision, Recovery, Rung
from perdure.training.supervisor.ledger_writer import LedgerWriter
from perdure.training.supervisor.program_checkpoints import saves_are_known


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
        self.writer.append(view, Decided, decision=decision)
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
        view = self.writer.refresh().undecided
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
