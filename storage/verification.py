"""Reading a checkpoint from end to end, and what came of it the last time.

`verified.json` in the step's folder holds the outcome of the newest verification. It names the
save that was read, so that a step which was set aside and saved anew does not inherit it. Times
are seconds since the epoch, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import ValidationError

from storage.checkpoint import CheckpointStore, Damage
from storage.errors import NotFound
from storage.listing import StepObjects
from storage.manifest import Manifest
from storage.model import FrozenModel
from storage.objects import ObjectInfo, ObjectStore

VERIFIED_NAME = "verified.json"


class Verified(FrozenModel):
    """The outcome of one verification.

    Attributes:
        written_at_s: of the manifest that was read; None when it could not be.
        size_bytes: of the shards that the manifest names.
    """

    step: int
    verified_at_s: float
    written_at_s: float | None
    size_bytes: int
    damages: tuple[Damage, ...]

    @property
    def is_intact(self) -> bool:
        """Whether everything was as published."""
        return not self.damages


class CountingStore:
    """An `ObjectStore` that tells how much is read from another."""

    def __init__(self, store: ObjectStore, on_bytes: Callable[[int], None]) -> None:
        self._store = store
        self._on_bytes = on_bytes

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        """See `ObjectStore.put`."""
        self._store.put(key, data, if_absent=if_absent)

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        """See `ObjectStore.get`; manifests and other small things, which are not counted."""
        return self._store.get(key, start=start, length=length)

    def get_into(self, key: str, out: memoryview, *, start: int = 0) -> None:
        """See `ObjectStore.get_into`."""
        self._store.get_into(key, out, start=start)
        self._on_bytes(out.nbytes)

    def stat(self, key: str) -> ObjectInfo:
        """See `ObjectStore.stat`."""
        return self._store.stat(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        self._store.delete(key)

    def now_s(self) -> float:
        """See `ObjectStore.now_s`."""
        return self._store.now_s()

    def url(self, key: str) -> str:
        """See `ObjectStore.url`."""
        return self._store.url(key)

    def local_path(self, key: str) -> Path | None:
        """See `ObjectStore.local_path`."""
        return self._store.local_path(key)


def verify(
    checkpoints: CheckpointStore,
    step: int,
    manifest: Manifest | None,
    *,
    on_bytes: Callable[[int], None] = lambda _count: None,
) -> Verified:
    """Read and hash every shard of a committed step. Nothing is written.

    Args:
        checkpoints: of the run.
        step: committed.
        manifest: of the step; None when it cannot be read, which is a damage.
        on_bytes: called with the size of every piece that was read.

    Raises:
        NotFound: the step was removed meanwhile.
        StorageError: the store does not answer; says nothing of the checkpoint.
    """
    counting = CountingStore(checkpoints.store, on_bytes)
    read = CheckpointStore(counting, checkpoints.run_id, clock=checkpoints.clock)
    damages = read.verify(step)
    if damages and step not in checkpoints.states():
        raise NotFound(f"{checkpoints.url(step)}: was removed while it was read")
    return Verified(
        step=step,
        verified_at_s=checkpoints.clock(),
        written_at_s=manifest.written_at_s if manifest is not None else None,
        size_bytes=manifest.size_bytes if manifest is not None else 0,
        damages=tuple(damages),
    )


def record(checkpoints: CheckpointStore, outcome: Verified) -> None:
    """Keep an outcome with the step."""
    key = checkpoints.key(outcome.step, VERIFIED_NAME)
    checkpoints.store.put(key, outcome.model_dump_json().encode())


def last_outcome(
    checkpoints: CheckpointStore, step: StepObjects, manifest: Manifest | None
) -> Verified | None:
    """What the newest verification of this very save found; None when it was never verified."""
    if VERIFIED_NAME not in step.objects:
        return None
    try:
        data = checkpoints.store.get(checkpoints.key(step.step, VERIFIED_NAME))
        outcome = Verified.model_validate_json(data)
    except (NotFound, ValidationError):
        return None  # deleted since it was listed, or of another version
    written_at_s = manifest.written_at_s if manifest is not None else None
    return outcome if outcome.written_at_s == written_at_s else None
