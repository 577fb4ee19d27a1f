"""The record of a living attempt: what every poll of it has shown."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from perdure.storage.errors import StorageError
from perdure.storage.objects import ObjectStore
from perdure.training.engines.fleet import Fleet
from perdure.training.journal.attempt_view import AttemptView
from perdure.training.journal.events import AlertKind, AlertRaised
from perdure.training.reporting.fault_report import save_hang_report
from perdure.training.supervisor.evidence import progress_of
from perdure.training.supervisor.health_watch import AttemptHealth
from perdure.training.supervisor.ledger_writer import LedgerWriter
from perdure.training.supervisor.warm_spares import WarmSpares
from perdure.training.supervisor.watch import Progress

_log = logging.getLogger("perdure.supervisor")


@dataclass(frozen=True, slots=True)
class AttemptRecorder:
    """Puts every poll of one attempt on record.

    Attributes:
        store: takes the stacks of hangs.
        spares: warm containers, which are kept while the attempt trains.
        on_progress: called last, with the events that were not on record before.
    """

    writer: LedgerWriter
    view: AttemptView
    health: AttemptHealth
    fleet: Fleet
    store: ObjectStore
    run_id: str
    spares: WarmSpares
    on_progress: Callable[[Progress], None]

    def record(self, progress: Progress) -> None:
        """Record the progress since the last poll."""
        # A supervisor that adopts an attempt reads its log from the beginning.
        recorded = self.writer.progress(self.view, progress)
        alerts = self.health.update(progress, self.writer.history)
        if any(isinstance(a, AlertRaised) and a.point is AlertKind.HANG for a in alerts):
            self._report_hang(progress)
        progress.events = [*recorded, *self.writer.record_events(self.view, alerts)]
        self.spares.update(trains=progress.trains)
        self.on_progress(progress)

    def _report_hang(self, progress: Progress) -> None:
        """Save the stacks of a hang that ends nothing; when it is over they are lost."""
        statuses = progress.snapshot.agents.values()
        stacks, ranks = self.fleet.stacks(), tuple(progress_of(statuses))
        try:
            _log.info(save_hang_report(self.store, self.run_id, self.view.key, stacks, ranks))
        except StorageError as error:
            _log.warning("the stacks of the ranks in the hang could not be saved: %s", error)
