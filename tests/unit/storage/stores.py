"""Stores that tell what was asked of them, or have no room."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from storage.errors import PermanentError, StorageError
from storage.local import LocalStore
from storage.objects import ObjectInfo


@dataclass(frozen=True, slots=True)
class Request:
    """One request for a part of an object."""

    key: str
    start: int
    size_bytes: int


@dataclass
class RecordingStore:
    """A folder that remembers its reads, and its writes in order."""

    root: Path
    reads: list[Request] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._store = LocalStore(self.root)

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        self.writes.append(key)
        self._store.put(key, data, if_absent=if_absent)

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        data = self._store.get(key, start=start, length=length)
        self.reads.append(Request(key, start, len(data)))
        return data

    def get_into(self, key: str, out: memoryview, *, start: int = 0) -> None:
        self.reads.append(Request(key, start, out.nbytes))
        self._store.get_into(key, out, start=start)

    def stat(self, key: str) -> ObjectInfo:
        return self._store.stat(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        self.writes.append(f"-{key}")
        self._store.delete(key)

    def now_s(self) -> float:
        return self._store.now_s()

    def url(self, key: str) -> str:
        return self._store.url(key)

    def local_path(self, key: str) -> Path | None:
        return self._store.local_path(key)


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
