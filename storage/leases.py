"""Leases of steps that are being read: retention leaves those steps alone.

A reader keeps an object in the step's folder and renews it; the lease of one that was killed ends
after `LEASE_S`. Times are seconds, by the store's clock.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from storage.checkpoint import CheckpointStore, StepObjects
from storage.errors import StorageError
from storage.objects import ObjectInfo

_log = logging.getLogger("perdure.storage")

LEASE_S = 900.0
RENEWALS = 4  # in the time for which a lease is good
READER_PREFIX = "reading-"


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
