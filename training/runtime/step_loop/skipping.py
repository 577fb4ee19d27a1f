"""The batches that a run passes over because their steps were abnormal, and their record.

As MindFormers does with `use_skip_data_by_global_norm` ("Data Skip And Checkpoint Health Monitor";
wrapper/wrapper.py leaves out the optimizer, core/callback/callback.py counts): an abnormal step
changes neither weights nor optimizer nor schedule, and the next batch comes; a batch that is not
abnormal ends the row; so many in a row end the run. There a skipped batch has a number of its own
among the steps; here steps are completed optimizer steps, so the next batch becomes the step that
this one did not. A value that is not a number counts in the row as well.

Each is an object in the store, written before training goes on, so that a restart from an older
checkpoint does not bring it back: a norm may differ on another number of ranks. Positions
are global samples.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

from pydantic import ValidationError

from perdure.storage.errors import StorageError
from perdure.storage.objects import ObjectStore
from perdure.training.recovery.repair import SkippedBatch, Vote
from perdure.training.runtime.step_loop.step import Limits

_log = logging.getLogger("perdure.runtime")


def skipped_prefix(run_id: str) -> str:
    """Return the key prefix of a run's skipped batches in its store, an object each."""
    return f"runs/{run_id}/skipped/"


def skipped_batch(vote: Vote, start: int, stop: int) -> SkippedBatch:
    """Make the record of a batch, from the vote of the step that it did not become."""
    loss, norm = vote.loss, vote.grad_norm
    return SkippedBatch(
        step=vote.step,
        start=start,
        stop=stop,
        loss=loss if math.isfinite(loss) else None,
        grad_norm=norm if math.isfinite(norm) else None,
    )


def is_abnormal_still(batch: SkippedBatch, limits: Limits) -> bool:
    """Whether a batch would be skipped by these limits: a job may have got others since."""
    loss = math.nan if batch.loss is None else batch.loss
    norm = math.nan if batch.grad_norm is None else batch.grad_norm
    vote = Vote(step=batch.step, loss=loss, grad_norm=norm)
    return limits.refusal(vote, has_scaler=False) is not None


class SkippedData:
    """The batches that the run has skipped.

    Args:
        store: holds a record for each batch.
        run_id: of the run.
        limits: loss and norm from which a step is abnormal.
        max_in_a_row: as many as this end the run.
    """

    def __init__(
        self, store: ObjectStore, run_id: str, *, limits: Limits, max_in_a_row: int
    ) -> None:
        self._store = store
        self._prefix = skipped_prefix(run_id)
        self._limits = limits
        self.max_in_a_row = max_in_a_row
        self._skipped: dict[int, SkippedBatch] = {}

    def read_stored(self) -> list[SkippedBatch]:
        """Read the records in the store.

        Raises:
            StorageError: it does not answer.
        """
        batches = []
        for info in self._store.list(self._prefix):
            try:
                batches.append(SkippedBatch.model_validate_json(self._store.get(info.key)))
            except ValidationError:
                _log.error(
                    f"{info.key} is not the record of a skipped batch, so this run leaves it out"
                )
        return sorted(batches, key=lambda batch: batch.start)

    def add(self, batches: Iterable[SkippedBatch]) -> None:
        """Pass over these as well, as far as they are abnormal by the limits of today."""
        self._skipped |= {
            batch.start: batch for batch in batches if is_abnormal_still(batch, self._limits)
        }

    def find_skipped(self, start: int, stop: int) -> SkippedBatch | None:
        """Find a skipped batch that has any of these samples; None: there is none.

        The job may have another batch size than when it was.
        """
        if start in self._skipped:
            return self._skipped[start]
        overlapping = (
            batch for batch in self._skipped.values() if batch.start < stop and start < batch.stop
        )
        return next(overlapping, None)

    def record(self, batch: SkippedBatch) -> None:
        """Write it down for later starts; without the store, training goes on all the same."""
        key = f"{self._prefix}{batch.start:015d}.json"
        try:
            self._store.put(key, batch.model_dump_json().encode())
        except StorageError as exc:
            _log.error(f"the store did not take {key}, a restart may train on that batch: {exc}")
