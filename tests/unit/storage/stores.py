"""Stores that record their requests, or have no room; a save into one."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import Any

import torch
from pydantic import SecretStr
from torch import Tensor

from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.errors import PermanentError, PreconditionFailed, StorageError
from perdure.storage.local import LocalStore
from perdure.storage.manifest import Manifest
from perdure.storage.objects import ObjectInfo, ObjectStore
from perdure.storage.s3_options import S3Options
from perdure.storage.saving import DirectSaver
from perdure.storage.staging import SavePlans

PART_SIZE_BYTES = 5 * 2**20  # the smallest part that S3 takes


@dataclass(frozen=True, slots=True)
class Request:
    """One request for a part of an object."""

    key: str
    start: int
    size_bytes: int


class RecordingStore(LocalStore):
    """A folder that remembers its reads, and its writes in order."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[Request] = []
        self.writes: list[str] = []

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        self.writes.append(key)
        super().put(key, data, if_absent=if_absent)

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        data = super().get(key, start=start, length=length)
        self.reads.append(Request(key, start, len(data)))
        return data

    def get_scattered(self, key: str, outs: Sequence[memoryview], *, start: int = 0) -> None:
        self.reads.append(Request(key, start, sum(out.nbytes for out in outs)))
        super().get_scattered(key, outs, start=start)

    def delete(self, key: str) -> None:
        self.writes.append(f"-{key}")
        super().delete(key)


class FullStore(LocalStore):
    """A folder without room for objects above `room_bytes`, or one that fails otherwise."""

    def __init__(self, root: Path, room_bytes: int = 2000) -> None:
        super().__init__(root)
        self.room_bytes = room_bytes
        self.error: Exception | None = None

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        if self.error is not None:
            raise self.error
        if memoryview(data).nbytes > self.room_bytes:
            full = OSError(errno.ENOSPC, "No space left on device")
            raise PermanentError(f"{self.url(key)}: the disk is full") from full
        super().put(key, data, if_absent=if_absent)


class UnreadableStore(LocalStore):
    """A folder that cannot be listed: the medium fails."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        raise StorageError(f"{self.url(prefix)}: the medium cannot be read")


def s3_options(endpoint: str, **changes: Any) -> S3Options:
    """Of a store in parts of the smallest size; keys may be given as plain text."""
    options: dict[str, Any] = {
        "endpoint": endpoint,
        "region": "us-east-1",
        "addressing_style": "path",
        "access_key": "key",
        "secret_key": "secret",
        "part_size_bytes": PART_SIZE_BYTES,
        **changes,
    }
    secrets = {name: SecretStr(options[name]) for name in ("access_key", "secret_key")}
    return S3Options(**options | secrets)


def race(stores: Sequence[ObjectStore], key: str) -> None:
    """Have all stores publish an object of their own at once; exactly one wins."""
    barrier = Barrier(len(stores))

    def write(number: int) -> bool:
        barrier.wait()
        try:
            stores[number].put(key, str(number).encode() * 1000, if_absent=True)
        except PreconditionFailed:
            return False
        return True

    with ThreadPoolExecutor(len(stores)) as pool:
        won = list(pool.map(write, range(len(stores))))
    assert won.count(True) == 1
    assert stores[0].get(key) == str(won.index(True)).encode() * 1000


def bits(tensor: Tensor) -> bytes:
    """Of the elements in their order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def save_directly(
    checkpoints: CheckpointStore,
    state: Mapping[str, Tensor],
    *,
    step: int = 10,
    owner: tuple[int, int] = (0, 0),
    extra: dict[str, Any] | None = None,
) -> Manifest:
    """Save `state` in this process alone, and commit it."""
    saver = DirectSaver(
        checkpoints=checkpoints,
        plans=SavePlans(),
        run_id=checkpoints.run_id,
        placement=owner[0],
        attempt=owner[1],
    )
    saver.save(state, step, extra or {})
    assert saver.newest is not None
    return saver.newest
