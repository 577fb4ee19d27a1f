"""The end of an attempt: what broke it, what is done about it, and both on record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from perdure.storage.errors import StorageError
from perdure.storage.objects import ObjectStore
from perdure.training.diagnosis.cause import Diagnosis
from perdure.training.diagnosis.classify import diagnose
from perdure.training.diagnosis.ending import again_short
from perdure.training.diagnosis.of_command import of_command
from perdure.training.engines.fleet import Fleet
from perdure.training.job import Job
from perdure.training.journal.attempt_view import AttemptView
from perdure.training.journal.events import ChipsHealed
from perdure.training.recovery.faults import Fault
from perdure.training.recovery.rungs import RESTARTS_IN_PLACE, Decision
from perdure.training.supervisor.hang_report import save_hang_report
from perdure.training.supervisor.healing import Healer
from perdure.training.supervisor.ledger_writer import LedgerWriter
from perdure.training.supervisor.watch import AttemptEnd, EndKind


@dataclass(frozen=True, slots=True, repr=False)
class Verdict:
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


class Concluder:
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
    ) -> Verdict:
        """Diagnose, decide, put both on record, and heal where the answer is to stay."""
        diagnosis = self.record_end(view, end)
        if diagnosis is None:
            return Verdict(end.kind, *view.key, end.last_step, notes=end.notes)
        fault = diagnosis.fault
        decision, healed = self._healer.answer(view, fault, stop_wanted=stop_wanted)
        return Verdict(end.kind, *view.key, end.last_step, fault, decision, healed)

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
        fault = again_short(found.fault, last.fault if last is not None else None)
        return replace(found, fault=of_command(fault) if self._job.worker.is_command else fault)

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
