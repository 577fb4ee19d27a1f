"""Step records in the store: objects with one JSON line per completed step.

The records of a step are in the store before the checkpoint that covers it is committed, so that
every kept step is on record however its attempt ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from perdure.storage.objects import ObjectInfo, ObjectStore
from perdure.training.journal.attempt_log import Follower
from perdure.training.journal.events import STEP, CheckpointCommitted, StepRecord


class UnsavedSteps:
    """Records that no checkpoint covers yet.

    Args:
        prefix: of the records in the store.

    Attributes:
        last_step: the step of the newest record, 0 before the first.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._pending: list[StepRecord] = []
        self.last_step = 0

    def catch_up(self, log: Follower) -> None:
        """Take over from a first rank that is gone.

        Records beyond the newest commit in its log are pending: the save that held them may not
        have been finished, and twice in the store is no harm.
        """
        committed = 0
        for event in (event for events in iter(log.read, None) for event in events):
            if isinstance(event, StepRecord):
                self.add(event)
            elif isinstance(event, CheckpointCommitted):
                # Logged once it is done, after steps that it does not hold.
                committed = max(committed, event.step)
        self._pending = [record for record in self._pending if record.step > committed]

    def add(self, record: StepRecord) -> None:
        """A step was completed."""
        # A recovery may have gone back: records of steps that are done again are void.
        while self._pending and self._pending[-1].step >= record.step:
            self._pending.pop()
        self._pending.append(record)
        self.last_step = record.step

    def take(self) -> dict[str, str]:
        """The records since the last call as an object for the store: its key and its text."""
        if not self._pending:
            return {}
        first, last = self._pending[0].step, self._pending[-1].step
        lines = [STEP.dump_json(record, exclude={"kind"}) for record in self._pending]
        self._pending = []
        return {f"{self._prefix}{first:08d}-{last:08d}.jsonl": b"\n".join([*lines, b""]).decode()}


def metrics_prefix(run_id: str, placement: int = 0, attempt: int = 0) -> str:
    """Where the records of a run, or of one attempt, are in the store."""
    base = f"runs/{run_id}/metrics/"
    return f"{base}p{placement:04d}-a{attempt:04d}/" if placement else base


def read_kept_steps(store: ObjectStore, run_id: str) -> dict[int, StepRecord]:
    """The record of every step that was kept, by step: where a step was done again, the last."""
    return drop_lost_steps(StepReader(store, run_id).read())


def drop_lost_steps(records: Iterable[StepRecord]) -> dict[int, StepRecord]:
    """Of every step the record that was kept: where it was done again, the last.

    A later attempt begins behind all that was lost, also behind steps that it has not come to yet.
    """
    by_step: dict[int, StepRecord] = {}
    first_of: dict[tuple[int, int], int] = {}
    for record in records:
        key = (record.placement, record.attempt)
        first_of[key] = min(record.step, first_of.get(key, record.step))
        previous = by_step.get(record.step)
        if previous is None or _age(record) >= _age(previous):
            by_step[record.step] = record
    lost_from = _first_lost_steps(first_of)
    return {
        step: record
        for step, record in sorted(by_step.items())
        if step < lost_from[record.placement, record.attempt]
    }


def _first_lost_steps(first_of: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], float]:
    """Of every attempt the step at which a later one began."""
    limits: dict[tuple[int, int], float] = {}
    first = math.inf
    for key in sorted(first_of, reverse=True):
        limits[key] = first
        first = min(first, first_of[key])
    return limits


class StepReader:
    """Reads every step record in the store, those of steps that were lost too.

    An object that has been read is read again only when it was written again.
    """

    def __init__(self, store: ObjectStore, run_id: str) -> None:
        self._store = store
        self._prefix = metrics_prefix(run_id)
        self._objects: dict[str, ObjectInfo] = {}
        self._records: dict[tuple[int, int, int, float], StepRecord] = {}

    def read(self) -> list[StepRecord]:
        """Every record there is by now, each once."""
        for info in self._store.list(self._prefix):
            if self._objects.get(info.key) == info:
                continue
            for line in filter(None, self._store.get(info.key).split(b"\n")):
                record = STEP.validate_json(line)
                self._records[record.identity] = record
            self._objects[info.key] = info
        return list(self._records.values())


def _age(record: StepRecord) -> tuple[int, int, float]:
    # Within an attempt a recovery may go back; clocks of different nodes are not compared.
    return record.placement, record.attempt, record.at_s
