"""Retention of checkpoints: the choice, the deletion, and leases of checkpoints being read.

A reader keeps an object in the step's folder and renews it; the lease of one that was killed ends
after `LEASE_S`. Times are seconds, by the store's clock.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from perdure.storage.checkpoint import CheckpointStore, StepObjects, StepState
from perdure.storage.errors import StorageError
from perdure.storage.objects import ObjectInfo

_log = logging.getLogger("perdure.storage")

LEASE_S = 900.0
RENEWALS = 4  # in the time for which a lease is good
READER_PREFIX = "reading-"


@dataclass(frozen=True, slots=True)
class Retention:
    """Rules that choose among the committed steps; a step is kept when one of them wants it.

    Attributes:
        keep_last: number of newest steps to keep.
        keep_every_steps: interval in steps; its multiples are kept.
        keep_best: number of steps of lowest loss. A step of unknown loss is kept too: it
            cannot be compared. Among equals the newer is the better; a NaN is the worst.
        losses: loss by step.
    """

    keep_last: int | None = None
    keep_every_steps: int | None = None
    keep_best: int | None = None
    losses: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every_steps", "keep_best"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value} must be above 0")

    def keep(self, steps: Sequence[int]) -> set[int]:
        """The subset of `steps` (ascending) to keep."""
        protected = set(steps[-self.keep_last :]) if self.keep_last else set()
        if self.keep_every_steps:
            protected |= {step for step in steps if step % self.keep_every_steps == 0}
        if self.keep_best:
            ranked = sorted((s for s in steps if s in self.losses), key=self._rank)
            protected |= set(ranked[: self.keep_best]) | {s for s in steps if s not in self.losses}
        return protected

    def _rank(self, step: int) -> tuple[bool, float, int]:
        loss = self.losses[step]
        return (True, 0.0, -step) if math.isnan(loss) else (False, loss, -step)


def apply_retention(
    checkpoints: CheckpointStore, retention: Retention, *, protect: Collection[int]
) -> list[int]:
    """Delete the committed steps that the rules give up, oldest first.

    Args:
        checkpoints: checkpoints of the run, in the store.
        retention: chooses what to keep.
        protect: steps that are being read or are needed otherwise.

    Returns:
        The deleted steps. The newest is never among them, nor are steps set aside, nor those
        with a reader; a later retention deletes these.
    """
    listed = checkpoints.list_steps()
    steps = [objects.step for objects in listed if objects.state is StepState.COMMITTED]
    protected = (
        retention.keep(steps) | set(protect) | read_steps(checkpoints, listed) | set(steps[-1:])
    )
    given_up = [step for step in steps if step not in protected]
    for step in given_up:
        checkpoints.delete(step)
    return given_up


@contextmanager
def reading(checkpoints: CheckpointStore, step: int) -> Iterator[None]:
    """Have no retention delete `step` meanwhile.

    To be entered before the manifest is read. A reader that may not write reads all the same,
    and warns that retention does not wait for it.
    """
    key = checkpoints.key(step, f"{READER_PREFIX}{uuid.uuid4().hex}.json")
    document = json.dumps({"step": step, "read_at_s": checkpoints.clock()}).encode()
    try:
        checkpoints.store.put(key, document)
    except StorageError as exc:
        _log.error(f"step {step} may be deleted while it is read: {exc}")
        yield
        return
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(LEASE_S / RENEWALS):
            with suppress(StorageError):  # there are more renewals than it needs
                checkpoints.store.put(key, document)

    thread = threading.Thread(target=renew, name="perdure-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(StorageError):  # it ends by itself
            checkpoints.store.delete(key)


def read_steps(checkpoints: CheckpointStore, listed: Sequence[StepObjects]) -> frozenset[int]:
    """Steps of a listing that are being read; one request for the time if any may be."""
    if not any(_readers(step) for step in listed):
        return frozenset()
    now_s = checkpoints.store.now_s()
    return frozenset(step.step for step in listed if is_read(step, now_s=now_s))


def is_read(step: StepObjects, *, now_s: float) -> bool:
    """Whether a listing shows a lease of a step that has not ended."""
    return any(now_s - info.modified_s < LEASE_S for info in _readers(step))


def _readers(step: StepObjects) -> list[ObjectInfo]:
    return [info for name, info in step.objects.items() if name.startswith(READER_PREFIX)]
