"""The ledger of a run as its supervisor keeps it: what is known, and what has happened since.

What a living attempt tells is told again to every supervisor that adopts it; it gets on record
once. Times are seconds since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from storage.checkpoint import CheckpointStore
from storage.errors import PermanentError
from training.diagnosis.cause import Diagnosis
from training.journal.events import LedgerEvent, StepRecord
from training.journal.history import AttemptView, RunHistory
from training.journal.ledger import Ledger
from training.journal.records import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSeen,
    FirstStep,
    Noted,
)
from training.supervisor.watch import Progress


class LedgerWriter:
    """What is on record of a run, and the records about its attempts.

    Attributes:
        ledger: of the run.
        history: what it told when it was last read.
    """

    def __init__(self, ledger: Ledger, checkpoints: CheckpointStore) -> None:
        self.ledger = ledger
        self.history = RunHistory()
        self._checkpoints = checkpoints

    def refresh(self) -> RunHistory:
        """Re-read the ledger."""
        self.history = self.ledger.read()
        return self.history

    def begin_attempt(self, placement: int) -> AttemptView:
        """An attempt is about to start."""
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
        """What a watcher has seen of the attempt. The notes that were not on record before."""
        if progress.steps and self._now(view).first_step is None:
            self._first_step(view, progress.steps[0])
        for step in progress.checkpoints:
            self.checkpoint(view, step)
        return self.notes(view, progress.notes)

    def notes(self, view: AttemptView, notes: Iterable[LedgerEvent]) -> list[LedgerEvent]:
        """What the attempt's coordinator noted. The notes that were not on record before."""
        known = {(note.kind, note.number) for note in self._now(view).notes}
        fresh = []
        placement, attempt = view.key
        for note in notes:
            if (note.kind, note.number) in known:
                continue
            known.add((note.kind, note.number))
            self.ledger.append(Noted, placement=placement, attempt=attempt, note=note)
            fresh.append(note)
        if fresh:
            self.refresh()
        return fresh

    def checkpoint(self, view: AttemptView, step: int) -> None:
        """The attempt has committed a step."""
        known = {(seen.placement, seen.attempt, seen.step) for seen in self.history.checkpoints}
        if (*view.key, step) not in known:
            placement, attempt = view.key
            self.ledger.append(CheckpointSeen, placement=placement, attempt=attempt, step=step)
            self.refresh()

    def missed_checkpoints(self, view: AttemptView) -> None:
        """Commits whose line was lost with the first node: the store knows them."""
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
        proc_start_cnt: dict[str, int] | None = None,
        diagnosis: Diagnosis | None = None,
        noticed_s: float | None = None,
        stepped_s: float | None = None,
    ) -> None:
        """The attempt's processes are gone."""
        placement, attempt = view.key
        self.ledger.append(
            AttemptEnded,
            placement=placement,
            attempt=attempt,
            outcome=outcome,
            to_step=to_step,
            proc_start_cnt=proc_start_cnt or {},
            fault=diagnosis.fault if diagnosis is not None else None,
            runners_up=diagnosis.runners_up if diagnosis else (),
            duration_s=time.time() - view.started.at_s,
            noticed_s=noticed_s,
            stepped_s=stepped_s,
        )

    def _first_step(self, view: AttemptView, record: StepRecord) -> None:
        placement, attempt = view.key
        self.ledger.append(
            FirstStep,
            placement=placement,
            attempt=attempt,
            step=record.step,
            stepped_s=record.at_s,
        )
        self.refresh()

    def _now(self, view: AttemptView) -> AttemptView:
        """The attempt as it is known by now."""
        return next(one for one in self.history.attempts if one.key == view.key)
