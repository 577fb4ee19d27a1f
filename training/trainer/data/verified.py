"""Which shards have been read in full and found right, so that looking at them is enough.

A shard is trusted while its stamp (inode, size and times of a file; etag and size of an object)
is the one it had when its bytes were hashed. Sizes are bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import xxhash
from pydantic import TypeAdapter, ValidationError

from storage.errors import NotFound
from storage.objects import ObjectInfo, ObjectStore
from training.trainer.data.manifest import ShardRecord
from training.trainer.data.spec import MIB

RECORD_NAME = "verified.json"
CHUNK_BYTES = 8 * MIB

_ENTRIES = TypeAdapter(dict[str, tuple[str, str]])


@dataclass(slots=True)
class VerifiedRecord:
    """Stamp and checksum of each shard at its last full reading."""

    entries: dict[str, tuple[str, str]] = field(default_factory=dict)
    is_changed: bool = False

    @classmethod
    def parse(cls, data: bytes) -> VerifiedRecord:
        """Read a record; a damaged one is an empty one, and costs a full reading."""
        try:
            return cls(_ENTRIES.validate_json(data))
        except ValidationError:
            return cls()

    def dump(self) -> bytes:
        """JSON of the record."""
        return _ENTRIES.dump_json(self.entries)

    def holds(self, name: str, stamp: str, digest: str) -> bool:
        """Whether this very version of the shard was found to have this checksum."""
        return self.entries.get(name) == (stamp, digest)

    def add(self, name: str, stamp: str, digest: str) -> None:
        """Note that this version has this checksum."""
        self.entries[name] = (stamp, digest)
        self.is_changed = True

    def file_is_intact(self, name: str, path: Path, shard: ShardRecord) -> bool:
        """Whether the file holds the shard; it is read only if its stamp is new."""
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        if status.st_size != shard.size_bytes:
            return False
        stamp = _stamp(status)
        if self.holds(name, stamp, shard.xxh3_128):
            return True
        if hash_file(path) != shard.xxh3_128:
            return False
        self.add(name, stamp, shard.xxh3_128)
        return True


class StoreVerifier:
    """Tells intact shards of a store from damaged ones.

    Args:
        store: where the shards are.
        prefix: below which they are; the record lies there too.
    """

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._listing: dict[str, ObjectInfo] | None = None
        self.record = stored_record(store, prefix)

    def is_intact(self, shard: ShardRecord) -> bool:
        """Whether the store holds the shard as it was written; an empty one needs no object."""
        if not shard.size_bytes:
            return True
        path = self._store.local_path(shard.key)
        if path is not None:
            return self.record.file_is_intact(shard.key, path, shard)
        info = self._listed(shard.key)
        if info is None or info.size_bytes != shard.size_bytes:
            return False
        stamp = f"{info.etag}:{info.size_bytes}"
        if self.record.holds(shard.key, stamp, shard.xxh3_128):
            return True
        if hash_object(self._store, shard) != shard.xxh3_128:
            return False
        self.record.add(shard.key, stamp, shard.xxh3_128)
        return True

    def trust(self, shard: ShardRecord) -> None:
        """Note a shard that was put just now, from bytes whose checksum is known."""
        path = self._store.local_path(shard.key)
        if path is not None:
            stamp = _stamp(path.stat())
        else:
            info = self._store.stat(shard.key)
            stamp = f"{info.etag}:{info.size_bytes}"
        self.record.add(shard.key, stamp, shard.xxh3_128)

    def save(self) -> None:
        """Keep the record, if there is anything new in it."""
        if self.record.is_changed:
            self._store.put(record_key(self._prefix), self.record.dump())
            self.record.is_changed = False

    def _listed(self, key: str) -> ObjectInfo | None:
        # One listing instead of one request per shard.
        if self._listing is None:
            self._listing = {info.key: info for info in self._store.list(f"{self._prefix}/")}
        return self._listing.get(key)


def record_key(prefix: str) -> str:
    """Key of the record of a store."""
    return f"{prefix}/{RECORD_NAME}"


def stored_record(store: ObjectStore, prefix: str) -> VerifiedRecord:
    """The record of a store, empty if there is none."""
    try:
        return VerifiedRecord.parse(store.get(record_key(prefix)))
    except NotFound:
        return VerifiedRecord()


def hash_file(path: Path) -> str:
    """xxh3_128 of a file, as hexadecimal digits."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(MIB))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def hash_object(store: ObjectStore, shard: ShardRecord) -> str:
    """xxh3_128 of a shard in a store, as hexadecimal digits."""
    digest = xxhash.xxh3_128()
    for chunk in chunks_of(store, shard):
        digest.update(chunk)
    return digest.hexdigest()


def chunks_of(store: ObjectStore, shard: ShardRecord) -> Iterator[bytes]:
    """The bytes of a shard, piece by piece."""
    for start in range(0, shard.size_bytes, CHUNK_BYTES):
        yield store.get(shard.key, start=start, length=CHUNK_BYTES)


def _stamp(status: os.stat_result) -> str:
    return f"{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"
