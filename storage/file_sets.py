"""Files of a program in the store, as sets that are there whole or not at all.

    <prefix>/files/<name>     each file
    <prefix>/manifest.json    written last: readers trust it alone

Nothing in a file is interpreted. Sizes are bytes, times seconds since the epoch.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import xxhash
from pydantic import ValidationError

from perdure.storage.errors import Corrupt, NotFound
from perdure.storage.frozen_model import FrozenModel
from perdure.storage.objects import ObjectStore, check_key

MANIFEST = "manifest.json"
PART = ".perdure-part"


class StoredFile(FrozenModel):
    """One file of a set; `name` is relative to its folder, or that of a single file."""

    name: str
    size_bytes: int
    xxh3_128: str


class FileSet(FrozenModel):
    """What a set consists of.

    Attributes:
        path: where it lay.
        is_folder: whether that is a folder; else a file.
        folders: names of those directly in it, also of empty ones.
        written_s: when the newest file was written.
    """

    version: Literal[1] = 1
    path: str
    is_folder: bool
    files: tuple[StoredFile, ...]
    folders: tuple[str, ...] = ()
    written_s: float

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(one.size_bytes for one in self.files)


class ChangedMeanwhileError(Exception):
    """The program wrote to a file of the set while it was read."""


def put_set(store: ObjectStore, prefix: str, path: Path, *, written_s: float) -> FileSet:
    """Put a file, or a folder with all of its files, into the store.

    Args:
        store: to put it into.
        prefix: of its keys, without a slash at the end.
        path: of the file or folder.
        written_s: when its newest file was written.

    Raises:
        ChangedMeanwhileError: there is no set to be put any more; none is published.
        StorageError: the store refuses.
    """
    is_folder = path.is_dir()
    try:
        before = _identities(path)
        stored = tuple(_put_files(store, prefix, path, before))
        # Of a folder that is written anew, files of two saves may each have stayed as they were.
        if _identities(path) != before:
            raise ChangedMeanwhileError(f"{path} was written again")
    except FileNotFoundError as error:
        raise ChangedMeanwhileError(f"{error.filename} is gone") from error
    return _publish(store, prefix, path, stored, is_folder=is_folder, written_s=written_s)


def put_nothing(store: ObjectStore, prefix: str, path: Path, *, written_s: float) -> FileSet:
    """Put a set of no files: that there are none, where others have some, is known for certain.

    Raises:
        StorageError: the store refuses.
    """
    return _publish(store, prefix, path, (), is_folder=True, written_s=written_s)


def _publish(
    store: ObjectStore,
    prefix: str,
    path: Path,
    files: tuple[StoredFile, ...],
    *,
    is_folder: bool,
    written_s: float,
) -> FileSet:
    inside = path.iterdir() if path.is_dir() else ()
    folders = tuple(sorted(one.name for one in inside if one.is_dir()))
    made = FileSet(
        path=str(path), is_folder=is_folder, files=files, folders=folders, written_s=written_s
    )
    store.put(f"{prefix}/{MANIFEST}", made.model_dump_json().encode())
    return made


def _identities(path: Path) -> dict[Path, tuple[int, int, int]]:
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    return {file: _identity(file.stat()) for file in files}


def _put_files(
    store: ObjectStore, prefix: str, path: Path, files: Iterable[Path]
) -> Iterator[StoredFile]:
    is_folder = path.is_dir()
    for file in files:
        name = str(file.relative_to(path)) if is_folder else file.name
        with file.open("rb") as opened:
            before = os.fstat(opened.fileno())
            digest = xxhash.xxh3_128()
            if before.st_size:
                mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
                with mapped, memoryview(mapped) as view:
                    digest.update(view)
                    store.put(f"{prefix}/files/{name}", view)
            else:
                store.put(f"{prefix}/files/{name}", b"")
        after = file.stat()
        if _identity(before) != _identity(after):
            raise ChangedMeanwhileError(f"{file} was written again")
        yield StoredFile(name=name, size_bytes=before.st_size, xxh3_128=digest.hexdigest())


def _identity(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def read_set(store: ObjectStore, prefix: str) -> FileSet | None:
    """What a set consists of; None where it is not whole.

    Raises:
        Corrupt: its manifest is none.
        StorageError: the store does not answer.
    """
    key = f"{prefix}/{MANIFEST}"
    try:
        found = FileSet.model_validate_json(store.get(key))
        for one in found.files:
            check_key(one.name)  # else it could be written outside its folder
    except NotFound:
        return None
    except (ValidationError, ValueError) as error:
        raise Corrupt(f"{store.url(key)}: {error}") from error
    return found


def get_set(store: ObjectStore, prefix: str, made: FileSet, path: Path) -> None:
    """Bring a set to where it lay; what is there is replaced only once all of it has come.

    Args:
        store: that has it.
        prefix: of its keys.
        made: its manifest.
        path: where it goes.

    Raises:
        Corrupt: a file is not what was put.
        StorageError: the store does not answer.
        OSError: it cannot be written.
    """
    get_sets(store, [(prefix, made)], path)


def get_sets(store: ObjectStore, sets: Sequence[tuple[str, FileSet]], path: Path) -> None:
    """Bring several sets into one folder, as `get_set` does; of one name the first file counts.

    Files get the time at which their set was written.

    Raises:
        Corrupt: a file is not what was put.
        StorageError: the store does not answer.
        OSError: it cannot be written.
    """
    part = path.with_name(path.name + PART)
    if part.is_dir():
        shutil.rmtree(part)
    path.parent.mkdir(parents=True, exist_ok=True)
    is_folder = any(made.is_folder for _, made in sets)
    if is_folder:
        part.mkdir()
    brought: set[str] = set()
    for prefix, made in sets:
        for one in made.files:
            if one.name in brought:
                continue
            brought.add(one.name)
            target = part / one.name if is_folder else part
            target.parent.mkdir(parents=True, exist_ok=True)
            _get_file(store, f"{prefix}/files/{one.name}", one, target)
            os.utime(target, (made.written_s, made.written_s))
    if path.is_dir():
        shutil.rmtree(path)
    part.replace(path)


def _get_file(store: ObjectStore, key: str, wanted: StoredFile, target: Path) -> None:
    with target.open("w+b") as file:
        digest = xxhash.xxh3_128()
        if wanted.size_bytes:
            file.truncate(wanted.size_bytes)
            mapped = mmap.mmap(file.fileno(), wanted.size_bytes)
            with mapped, memoryview(mapped) as view:
                store.get_into(key, view)
                digest.update(view)
    if digest.hexdigest() != wanted.xxh3_128:
        raise Corrupt(f"{store.url(key)}: its bytes are not those that were put")


def delete_set(store: ObjectStore, prefix: str) -> None:
    """Delete a set, its manifest first: readers take it for gone at once.

    Raises:
        StorageError: the store refuses.
    """
    store.delete(f"{prefix}/{MANIFEST}")
    for info in list(store.list(f"{prefix}/files/")):
        store.delete(info.key)
