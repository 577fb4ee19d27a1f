"""Token shards as local files: in place where the store has paths, else copied to a folder.

A copy appears under its name only after its hash was checked. A record beside the copies lists
which files passed and what they looked like then, so a later call costs one stat per file.
Processes of one node may stage into one folder at once: the first copies, the others find it
done. Sizes are bytes, times seconds.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash
from pydantic_core import from_json

from perdure.storage.errors import Corrupt, NotFound
from perdure.storage.objects import ObjectStore
from perdure.storage.regular_file import read_regular
from perdure.training.files import write_whole
from perdure.training.trainer.data.manifest import CHUNK_BYTES, CorpusManifest, Shard, hash_file

RECORD_NAME = "verified.json"
LOCK_NAME = ".lock"
TEMPORARY_SUFFIX = ".partial"
NUM_STREAMS = 4


@dataclass(frozen=True, slots=True)
class StageResult:
    """Where the shards are, in manifest order, and what it took."""

    paths: tuple[Path, ...]
    skipped: bool  # nothing was copied
    duration_s: float


def stage(manifest: CorpusManifest, store: ObjectStore, folder: Path) -> StageResult:
    """Make every shard available as a local file.

    Args:
        manifest: the shards.
        store: holds the shards.
        folder: for copies; created when needed, unused where the store has paths.

    Raises:
        NotFound: a shard is not in the store; prepare again.
        Corrupt: a shard is not what the manifest records; prepare again.
        StorageError: the store failed.
        OSError: the folder cannot be written.
    """
    started_s = time.monotonic()
    places = [store.local_path(shard.key) for shard in manifest.shards]
    in_place = tuple(path for path in places if path is not None)
    if len(in_place) == len(places):
        for path, shard in zip(in_place, manifest.shards, strict=True):
            _check_size(path, shard)
        return StageResult(in_place, skipped=True, duration_s=time.monotonic() - started_s)
    folder.mkdir(parents=True, exist_ok=True)
    paths = tuple(folder / shard.key.rpartition("/")[2] for shard in manifest.shards)
    with _locked(folder):
        is_complete = _complete(manifest, store, folder)
    return StageResult(paths, skipped=is_complete, duration_s=time.monotonic() - started_s)


def _complete(manifest: CorpusManifest, store: ObjectStore, folder: Path) -> bool:
    """Fetch what is missing or damaged; whether nothing was."""
    for abandoned in folder.glob(f"*{TEMPORARY_SUFFIX}"):
        abandoned.unlink()
    record = _read_record(folder)
    wanted = [(shard, folder / shard.key.rpartition("/")[2]) for shard in manifest.shards]
    missing = [(shard, path) for shard, path in wanted if not _is_intact(path, shard, record)]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        list(pool.map(lambda item: _fetch(store, *item), missing))
    now = {path.name: _look(path) for _, path in wanted}
    if now.items() - record.items():
        write_whole(folder / RECORD_NAME, json.dumps({**record, **now}))
    return not missing


def _is_intact(path: Path, shard: Shard, record: dict[str, str]) -> bool:
    if not path.is_file() or path.stat().st_size != shard.size_bytes:
        return False
    return record.get(path.name) == _look(path) or hash_file(path) == shard.xxh3_128


def _fetch(store: ObjectStore, shard: Shard, path: Path) -> None:
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(CHUNK_BYTES, shard.size_bytes)))
    with temporary.open("wb") as file:
        for start in range(0, shard.size_bytes, CHUNK_BYTES):
            chunk = buffer[: min(CHUNK_BYTES, shard.size_bytes - start)]
            store.get_into(shard.key, chunk, start=start)
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != shard.xxh3_128:
        temporary.unlink()
        raise Corrupt(
            f"{store.url(shard.key)}: hash {digest.hexdigest()}, must be {shard.xxh3_128}; "
            "prepare the data again"
        )
    temporary.replace(path)


def _check_size(path: Path, shard: Shard) -> None:
    if not path.is_file():
        raise NotFound(f"{path}: no such shard; prepare the data again")
    size_bytes = path.stat().st_size
    if size_bytes != shard.size_bytes:
        raise Corrupt(
            f"{path}: size_bytes={size_bytes}, must be {shard.size_bytes}; prepare the data again"
        )


def _look(path: Path) -> str:
    status = path.stat()
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"


def _read_record(folder: Path) -> dict[str, str]:
    try:
        record = from_json(read_regular(folder / RECORD_NAME))
    except (OSError, ValueError):
        return {}  # only a memo: without it every file is hashed
    if not isinstance(record, dict):
        return {}
    return {str(name): str(look) for name, look in record.items()}


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock out other processes; the lock falls with its holder."""
    with (folder / LOCK_NAME).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
