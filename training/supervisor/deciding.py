"""Asking the ladder about attempts that failed, and about rungs that could not be carried out.

A decision is on record before anything follows from it. Times are seconds since the epoch.
"""

from __future__ import annotations

import time

from training.diagnosis.cause import Diagnosis
from training.engines.base import Engine
from training.errors import EngineError
from training.job import Job
from training.journal.history import AttemptView, RunHistory
from training.journal.records import Decided, RungFailed
from training.recovery.chips import Severity
from training.recovery.decision import Capacity, Decision, Recovery
from training.recovery.faults import Fault, FaultClass
from training.recovery.ladder import decide
from training.recovery.rungs import Policy, Rung
from training.supervisor.ledger_writer import LedgerWriter


class Decider:
    """Decides about the attempts of one run.

    Args:
        job: of the run.
        engine: what it can do counts.
        book: of the run.
    """

    def __init__(self, job: Job, engine: Engine, book: LedgerWriter) -> None:
        self._job = job
        self._engine = engine
        self._book = book

    def decide(self, view: AttemptView, fault: Fault) -> Decision:
        """What answers the fault that ended an attempt."""
        history = self._book.refresh()
        decision = decide(
            fault,
            now_s=time.time(),
            history=recoveries_of(self._job, history),
            supported=self._engine.capabilities,
            policy=policy_of(self._job),
            capacity=self._capacity(history),
            severity=Severity(fault.severity) if fault.severity is not None else None,
        )
        placement, attempt = view.key
        self._book.ledger.append(
            Decided,
            placement=placement,
            attempt=attempt,
            decision=decision,
        )
        self._book.refresh()
        return decision

    def decide_what_is_open(self) -> None:
        """The newest attempt has failed, and its supervisor died before it asked the ladder."""
        view = self._book.refresh().undecided
        if view is not None:
            self.decide(view, _fault_of(view))

    def rung_failed(self, rung: Rung, why: str, *, waited_s: float = 0.0) -> None:
        """A rung could not be carried out: put it on record and ask the ladder again.

        Args:
            rung: that failed.
            why: it did.
            waited_s: for a node to become free.
        """
        history = self._book.refresh()
        view = history.attempts[-1] if history.attempts else None
        if view is None or len(history.attempts) <= history.budgets_from:
            raise EngineError(why)
        placement, attempt = view.key
        self._book.ledger.append(
            RungFailed,
            placement=placement,
            attempt=attempt,
            rung=rung,
            why=why,
            waited_s=waited_s,
        )
        self.decide(view, _fault_of(view))

    def vanished(self, view: AttemptView) -> None:
        """The attempt ended while nobody watched, and its containers with it."""
        fault = Fault(
            FaultClass.NODE_LOST,
            time.time(),
            "no agent of the placement is left",
            explanation="All containers are gone: the machine was restarted, or everything "
            "was taken down at once.",
        )
        self._book.missed_checkpoints(view)
        self._book.end_attempt(view, "failed", to_step=None, diagnosis=Diagnosis(fault))
        self.decide(view, fault)

    def _capacity(self, history: RunHistory) -> Capacity:
        healthy = set(self._engine.nodes()) - set(history.isolated)
        return Capacity(healthy=len(healthy), needed=self._job.engine.nodes)


def policy_of(job: Job) -> Policy:
    """The job's restart policy as the ladder reads it."""
    return job.restart.policy(operator_retry=job.comm.op_retry.enabled)


def recoveries_of(job: Job, history: RunHistory) -> list[Recovery]:
    """Every past recovery of the run, oldest first, as the ladder is told of them."""
    # A command's steps are not known: it has progressed when it has lasted.
    lasts_s = job.restart.progress_after_s if job.worker.is_command else None
    return history.recoveries(progress_after_s=lasts_s)


def _fault_of(view: AttemptView) -> Fault:
    assert view.ended is not None  # noqa: S101 asked for failed attempts alone
    assert view.ended.fault is not None  # noqa: S101 likewise
    return view.ended.fault
