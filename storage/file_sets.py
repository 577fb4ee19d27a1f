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
from perdure.storage.regular_file import open_regular

MANIFEST = "manifest.json"
PART = ".perdure-part"


class StoredFile(FrozenModel):
    """A file of a set; `name` is relative to the set's folder, or the name of a single file."""

    name: str
    size_bytes: int
    xxh3_128: str


class FileSet(FrozenModel):
    """Manifest of a set: its files and folders.

    Attributes:
        path: path of the original file or folder.
        is_folder: whether that is a folder; else a file.
        folders: names of those directly in it, also of empty ones.
        written_s: time of the newest file, seconds since the epoch.
    """

    version: Literal[1] = 1
    path: str
    is_folder: bool
    files: tuple[StoredFile, ...]
    folders: tuple[str, ...] = ()
    written_s: float

    @property
    def size_bytes(self) -> int:
        """Sum of the sizes of all files."""
        return sum(file.size_bytes for file in self.files)


class ChangedMeanwhileError(Exception):
    """The program wrote to a file of the set while it was read."""


def put_set(store: ObjectStore, prefix: str, path: Path, *, written_s: float) -> FileSet:
    """Put a file, or a folder with all of its files, into the store.

    Args:
        store: store that receives the set.
        prefix: common start of the keys, without a slash at the end.
        path: file or folder to read.
        written_s: time of the newest file, seconds since the epoch.

    Raises:
        ChangedMeanwhileError: there is no set to be put any more; none is published.
        StorageError: the store refuses.
    """
    is_folder = path.is_dir()
    try:
        identities = _identities(path)
        stored = tuple(_put_files(store, prefix, path, identities))
        # While a folder is rewritten, files of two saves may each have stayed as they were.
        if _identities(path) != identities:
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
    folders = tuple(sorted(entry.name for entry in inside if entry.is_dir()))
    file_set = FileSet(
        path=str(path), is_folder=is_folder, files=files, folders=folders, written_s=written_s
    )
    store.put(f"{prefix}/{MANIFEST}", file_set.model_dump_json().encode())
    return file_set


def _identities(path: Path) -> dict[Path, tuple[int, int, int]]:
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return {file: _identity(file.stat()) for file in files}


def _put_files(
    store: ObjectStore, prefix: str, path: Path, files: Iterable[Path]
) -> Iterator[StoredFile]:
    is_folder = path.is_dir()
    for file in files:
        name = str(file.relative_to(path)) if is_folder else file.name
        with open_regular(file) as opened:
            opened_stat = os.fstat(opened.fileno())
            digest = xxhash.xxh3_128()
            if opened_stat.st_size:
                mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
                with mapped, memoryview(mapped) as view:
                    digest.update(view)
                    store.put(f"{prefix}/files/{name}", view)
            else:
                store.put(f"{prefix}/files/{name}", b"")
        closing_stat = file.stat()
        if _identity(opened_stat) != _identity(closing_stat):
            raise ChangedMeanwhileError(f"{file} was written again")
        yield StoredFile(name=name, size_bytes=opened_stat.st_size, xxh3_128=digest.hexdigest())


def _identity(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def read_set(store: ObjectStore, prefix: str) -> FileSet | None:
    """Read the manifest of a set; None where the set is not whole.

    Raises:
        Corrupt: the object is not a manifest.
        StorageError: the store does not answer.
    """
    key = f"{prefix}/{MANIFEST}"
    try:
        file_set = FileSet.model_validate_json(store.get(key))
        for file in file_set.files:
            check_key(file.name)  # else it could be written outside its folder
    except NotFound:
        return None
    except (ValidationError, ValueError) as error:
        raise Corrupt(f"{store.url(key)}: {error}") from error
    return file_set


def get_set(store: ObjectStore, prefix: str, file_set: FileSet, path: Path) -> None:
    """Bring a set to where it lay; what is there is replaced only once all of it has come.

    Args:
        store: store that holds the set.
        prefix: common start of the keys.
        file_set: manifest of the set.
        path: file or folder to write.

    Raises:
        Corrupt: a file is not what was put.
        StorageError: the store does not answer.
        OSError: it cannot be written.
    """
    get_sets(store, [(prefix, file_set)], path)


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
    is_folder = any(file_set.is_folder for _, file_set in sets)
    if is_folder:
        part.mkdir()
    brought: set[str] = set()
    for prefix, file_set in sets:
        for file in file_set.files:
            if file.name in brought:
                continue
            brought.add(file.name)
            target = part / file.name if is_folder else part
            target.parent.mkdir(parents=True, exist_ok=True)
            _get_file(store, f"{prefix}/files/{file.name}", file, target)
            os.utime(target, (file_set.written_s, file_set.written_s))
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
