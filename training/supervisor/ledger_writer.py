"""The ledger of a run as its supervisor writes it.

Every supervisor that adopts an attempt reads its log from the beginning; each event goes on
record once. Times are seconds since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.errors import PermanentError
from perdure.training.diagnosis.cause import Diagnosis
from perdure.training.engines.base import Placement
from perdure.training.journal.attempt_view import CUT_OFF, AttemptView
from perdure.training.journal.events import LedgerEvent
from perdure.training.journal.history import RunHistory
from perdure.training.journal.ledger import Ledger
from perdure.training.journal.records import (
    AnyRecord,
    AttemptEnded,
    AttemptEventRecorded,
    AttemptStarted,
    CheckpointRecorded,
    FirstStep,
)
from perdure.training.recovery.protocol import RecoveryEnded
from perdure.training.supervisor.watch import AttemptEnd, EndKind, Progress
from perdure.training.wire.agent_status import SavedCheckpoint


class LedgerWriter:
    """Writes the records about the attempts of one run.

    Attributes:
        history: the ledger's content when it was last read.
    """

    def __init__(self, ledger: Ledger, checkpoints: CheckpointStore) -> None:
        self.ledger = ledger
        self.history = RunHistory()
        self._checkpoints = checkpoints

    def refresh(self) -> RunHistory:
        """Re-read the ledger."""
        self.history = self.ledger.read()
        return self.history

    def append(self, view: AttemptView, record: type[AnyRecord], **fields: Any) -> None:
        """Append a record about an attempt."""
        placement, attempt = view.key
        self.ledger.append(record, placement=placement, attempt=attempt, **fields)

    def fence(self, placement: Placement, attempt: tuple[int, int]) -> None:
        """Let this attempt alone commit, by the container of its first member.

        Raises:
            StorageError: the store refuses, or a newer attempt owns the run.
        """
        first = placement.members[0].schedule_cnt
        self._checkpoints.fence(*attempt, first_container=first)

    def begin_attempt(self, placement: int) -> AttemptView:
        """Record that an attempt is about to start."""
        self.ledger.append(
            AttemptStarted,
            placement=placement,
            attempt=len(self.history.attempts_in(placement)) + 1,
            from_step=self._checkpoints.latest() or 0,
        )
        view = self.refresh().open_attempt
        assert view is not None  # noqa: S101 just appended
        return view

    def progress(self, view: AttemptView, progress: Progress) -> list[LedgerEvent]:
        """Record the news of a poll. Returns the events that were not on record before."""
        if self.now(view).first_step is None:
            first = progress.first_step
            if first is not None:
                self.append(view, FirstStep, step=first.step, stepped_s=first.at_s)
                self.refresh()
        for saved in progress.saved:
            self.checkpoint(view, saved.step, saved)
        for step in progress.checkpoints:
            self.checkpoint(view, step)
        return self.record_events(view, progress.events)

    def record_events(self, view: AttemptView, events: Iterable[LedgerEvent]) -> list[LedgerEvent]:
        """Record events of the attempt. Returns those that were not on record before."""
        recorded = {(event.kind, event.number) for event in self.now(view).events}
        fresh = []
        for event in events:
            if (event.kind, event.number) not in recorded:
                recorded.add((event.kind, event.number))
                self.append(view, AttemptEventRecorded, event=event)
                fresh.append(event)
        if fresh:
            self.refresh()
        return fresh

    def checkpoint(
        self, view: AttemptView, step: int, saved: SavedCheckpoint | None = None
    ) -> None:
        """Record that the attempt has committed a step; `saved` is that of a command."""
        recorded = {(c.placement, c.attempt, c.step) for c in self.history.checkpoints}
        if (*view.key, step) not in recorded:
            columns = {"path", "size_bytes", "written_s"}
            facts = saved.model_dump(include=columns) if saved is not None else {}
            self.append(view, CheckpointRecorded, step=step, **facts)
            self.refresh()

    def missed_checkpoints(self, view: AttemptView) -> None:
        """Record commits whose line was lost with the first node, from the store."""
        for step in self._checkpoints.steps():
            if step <= self.history.committed_step:
                continue
            try:
                manifest = self._checkpoints.manifest(step)
            except PermanentError:
                continue  # the next restore finds it damaged and sets it aside
            if (manifest.placement, manifest.attempt) == view.key:
                self.checkpoint(view, step)

    def end_attempt(
        self,
        view: AttemptView,
        outcome: str,
        *,
        to_step: int | None,
        end: AttemptEnd | None = None,
        diagnosis: Diagnosis | None = None,
    ) -> None:
        """Record that the attempt's processes are gone.

        Args:
            view: the attempt.
            outcome: an EndKind.
            to_step: the last step that is known to be completed.
            end: as the watch saw it; None: nobody watched it to its end.
            diagnosis: None where nothing broke it.
        """
        fault = diagnosis.fault if diagnosis is not None else None
        if outcome != EndKind.COMPLETED:
            self._end_recoveries(
                view, f"{fault.fault_class} at {fault.where}" if fault else outcome
            )
        self.append(
            view,
            AttemptEnded,
            outcome=outcome,
            to_step=to_step,
            proc_start_cnt=end.proc_start_cnt if end is not None else {},
            fault=fault,
            runners_up=diagnosis.runners_up if diagnosis is not None else (),
            duration_s=time.time() - view.started.at_s,
            noticed_s=end.evidence.at_s if end is not None and diagnosis is not None else None,
            stepped_s=end.stepped_s if end is not None else None,
            lived_s=end.lived_s if end is not None else None,
            notes=end.notes if end is not None else (),
            shown_target=end.shown_target if end is not None else None,
        )

    def _end_recoveries(self, view: AttemptView, why: str) -> None:
        """Record that nothing comes of recoveries whose attempt ends before they do."""
        began = [recovery.began for recovery in self.now(view).recoveries if recovery.ended is None]
        ends = [
            RecoveryEnded(
                at_s=time.time(),
                number=recovery.number,
                generation=recovery.generation,
                succeeded=False,
                why=f"{CUT_OFF}: {why}",
            )
            for recovery in began
        ]
        self.record_events(view, ends)

    def now(self, view: AttemptView) -> AttemptView:
        """Return the attempt as the ledger had it when it was last read."""
        return next(attempt for attempt in self.history.attempts if attempt.key == view.key)
