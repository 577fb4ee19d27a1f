"""Step records in the store: objects with a JSON line per completed step.

The record of a step is in the store before the commit of the checkpoint that covers it, so that
every kept step is on record after any end of its attempt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from perdure.storage.objects import ObjectInfo, ObjectStore
from perdure.training.journal.attempt_log import Follower
from perdure.training.journal.events import STEP, CheckpointCommitted, StepRecord


class UnsavedSteps:
    """Records of steps that no checkpoint covers yet.

    Args:
        prefix: prefix of the records in the store.

    Attributes:
        last_step: the step of the newest record, 0 before the first.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._pending: list[StepRecord] = []
        self.last_step = 0

    def catch_up(self, log: Follower) -> None:
        """Take over from a first rank that is gone.

        Records beyond the newest commit in its log are pending: their save may not have finished,
        and a second copy in the store does no harm.
        """
        committed = 0
        for event in (event for events in iter(log.read, None) for event in events):
            if isinstance(event, StepRecord):
                self.add(event)
            elif isinstance(event, CheckpointCommitted):
                # The log has it after steps that it does not hold.
                committed = max(committed, event.step)
        self._pending = [record for record in self._pending if record.step > committed]

    def add(self, record: StepRecord) -> None:
        """Add the record of a completed step."""
        # A recovery may have gone back: the records of repeated steps are void.
        while self._pending and self._pending[-1].step >= record.step:
            self._pending.pop()
        self._pending.append(record)
        self.last_step = record.step

    def take(self) -> dict[str, str]:
        """Return the records since the last call as an object: its key and its text."""
        if not self._pending:
            return {}
        first, last = self._pending[0].step, self._pending[-1].step
        lines = [STEP.dump_json(record, exclude={"kind"}) for record in self._pending]
        self._pending = []
        return {f"{self._prefix}{first:08d}-{last:08d}.jsonl": b"\n".join([*lines, b""]).decode()}


def metrics_prefix(run_id: str, placement: int = 0, attempt: int = 0) -> str:
    """Return the prefix of the records of a run, or of an attempt, in the store."""
    base = f"runs/{run_id}/metrics/"
    return f"{base}p{placement:04d}-a{attempt:04d}/" if placement else base


def read_kept_steps(store: ObjectStore, run_id: str) -> dict[int, StepRecord]:
    """Read the record of every step that was kept: its last completion, by step."""
    return drop_lost_steps(StepReader(store, run_id).read())


def drop_lost_steps(records: Iterable[StepRecord]) -> dict[int, StepRecord]:
    """Drop records of lost steps: each step that was kept has its last completion.

    A later attempt begins before all lost steps, also before those that it has not reached yet.
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
    """Compute for every attempt the step at which a later attempt began."""
    limits: dict[tuple[int, int], float] = {}
    first = math.inf
    for key in sorted(first_of, reverse=True):
        limits[key] = first
        first = min(first, first_of[key])
    return limits


class StepReader:
    """A reader of every step record in the store, those of lost steps too.

    It reads an object again only when the object was written again.
    """

    def __init__(self, store: ObjectStore, run_id: str) -> None:
        self._store = store
        self._prefix = metrics_prefix(run_id)
        self._objects: dict[str, ObjectInfo] = {}
        self._records: dict[tuple[int, int, int, float], StepRecord] = {}

    def read(self) -> list[StepRecord]:
        """Read every record up to now, each a single time."""
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
