"""Objects as files below one folder, with the guarantees of an object store.

A write goes to a temporary name, is synced, renamed, and its folder synced: a reader or a crash
sees the old object or the new one. Temporaries live in `.tmp` of the same root, hence on the same
file system, and are never listed. Sizes are bytes, times seconds.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from storage.errors import (
    AccessDenied,
    Corrupt,
    NotFound,
    PermanentError,
    PreconditionFailed,
    StorageError,
    TimedOut,
    TransientError,
)
from storage.objects import ObjectInfo, check_key, check_prefix

TEMPORARY_FOLDER = ".tmp"
# A live writer touches its temporary at least this often: every write moves the mtime.
ABANDONED_AFTER_S = 3600.0
MAX_PUBLISH_TRIES = 5

# errno -> (class, text); anything else is a PermanentError with the system's text
OS_ERRORS: Mapping[int, tuple[type[StorageError], str]] = {
    errno.ENOENT: (NotFound, "no such object"),
    errno.ENOTDIR: (NotFound, "no such object: a part of the key is a file"),
    errno.EISDIR: (NotFound, "no such object: the key is a folder"),
    errno.EACCES: (AccessDenied, "permission denied"),
    errno.EPERM: (AccessDenied, "operation not permitted"),
    errno.EROFS: (AccessDenied, "the file system is read-only"),
    errno.ENOSPC: (PermanentError, "the disk is full"),
    errno.EDQUOT: (PermanentError, "the disk quota is used up"),
    errno.ENAMETOOLONG: (PermanentError, "the key is too long for this file system"),
    errno.EIO: (Corrupt, "the medium cannot be read or written"),
    errno.ESTALE: (TransientError, "stale file handle of a network file system"),
    errno.EAGAIN: (TransientError, "resource busy"),
    errno.EBUSY: (TransientError, "resource busy"),
    errno.ETIMEDOUT: (TimedOut, "the network file system does not answer"),
}


class LocalStore:
    """An `ObjectStore` below `root`, which is created when the first object is.

    Args:
        root: absolute folder.

    Raises:
        ValueError: `root` is relative.
    """

    def __init__(self, root: Path) -> None:
        if not root.is_absolute():
            raise ValueError(f"root={str(root)!r} is not an absolute path")
        self._root = root
        self._swept = False

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        """See `ObjectStore.put`."""
        path = self._path(key)
        with _folded(self.url(key)):
            temporary = self._write_temporary(memoryview(data).cast("B"))
            try:
                _publish(temporary, path, if_absent=if_absent)
            except FileExistsError as exc:
                raise PreconditionFailed(f"{self.url(key)}: exists already") from exc
            finally:
                with suppress(FileNotFoundError):
                    temporary.unlink()

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        """See `ObjectStore.get`."""
        with _folded(self.url(key)), self._path(key).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            wanted = max(0, size - start) if length is None else min(length, max(0, size - start))
            out = bytearray(wanted)
            filled = _fill(file.fileno(), memoryview(out), start)
        return bytes(memoryview(out)[:filled])

    def get_into(self, key: str, out: memoryview, *, start: int = 0) -> None:
        """See `ObjectStore.get_into`."""
        self.get_scattered(key, [out], start=start)

    def get_scattered(self, key: str, outs: Sequence[memoryview], *, start: int = 0) -> None:
        """See `ObjectStore.get_scattered`."""
        at = start
        with _folded(self.url(key)), self._path(key).open("rb", buffering=0) as file:
            for out in outs:
                view = out.cast("B")
                filled = _fill(file.fileno(), view, at)
                at += view.nbytes
                if filled < view.nbytes:
                    missing = view.nbytes - filled
                    raise Corrupt(f"{self.url(key)}: ends {missing} bytes before {at}")

    def stat(self, key: str) -> ObjectInfo:
        """See `ObjectStore.stat`."""
        path = self._path(key)
        with _folded(self.url(key)):
            if path.is_dir():
                raise NotFound(f"{self.url(key)}: no such object: the key is a folder")
            return _info(key, path.stat())

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        if check_prefix(prefix).startswith(f"{TEMPORARY_FOLDER}/"):
            return iter(())
        folder = self._root / prefix.rpartition("/")[0]
        found: list[ObjectInfo] = []
        with _folded(self.url(prefix)):
            for parent, folders, names in os.walk(folder, onerror=_unless_gone):
                if Path(parent) == self._root and TEMPORARY_FOLDER in folders:
                    folders.remove(TEMPORARY_FOLDER)
                for name in names:
                    path = Path(parent, name)
                    key = path.relative_to(self._root).as_posix()
                    if key.startswith(prefix):
                        # deleted by another process while we walk
                        with suppress(FileNotFoundError):
                            found.append(_info(key, path.stat()))
        return iter(sorted(found, key=lambda info: info.key))

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        path = self._path(key)
        with suppress(NotFound), _folded(self.url(key)):
            path.unlink()
            _sync_folder(path.parent)
            self._prune(path.parent)

    def abort_uploads(self, prefix: str, older_than_s: float) -> int:  # noqa: ARG002 the protocol
        """None: a later write removes what killed writers left."""
        return 0

    def clear(self) -> None:
        """See `ObjectStore.clear`; the folder itself, too."""
        with _folded(self.url("")), suppress(FileNotFoundError):
            shutil.rmtree(self._root)

    def now_s(self) -> float:
        """See `ObjectStore.now_s`; the file system's, which may be another machine's.

        This machine's where there is no store, or none that may be written: nothing there can be
        given up for its age.
        """
        if not self._root.is_dir():
            return time.time()
        folder = self._root / TEMPORARY_FOLDER
        try:
            with _folded(self.url("")):
                return _time_of_new_file(folder)
        except AccessDenied:
            return time.time()

    def url(self, key: str) -> str:
        """See `ObjectStore.url`."""
        return f"file://{self._root / key}"

    def local_path(self, key: str) -> Path | None:
        """See `ObjectStore.local_path`."""
        return self._path(key)

    def _path(self, key: str) -> Path:
        if check_key(key).split("/")[0] == TEMPORARY_FOLDER:
            raise ValueError(f"not a key: {key!r}; {TEMPORARY_FOLDER!r} is the store's own")
        return self._root / key

    def _write_temporary(self, data: memoryview) -> Path:
        folder = self._root / TEMPORARY_FOLDER
        _make_folder(folder)
        if not self._swept:
            self._swept = True
            self._sweep(folder)
        path = _new_temporary(folder)
        try:
            with path.open("xb", buffering=0) as file:
                written = 0
                while written < data.nbytes:
                    written += file.write(data[written:])
                os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    def _sweep(self, folder: Path) -> None:
        """Remove what killed writers left, or a node's disk fills up with halves of shards."""
        left = list(folder.iterdir())
        now_s = self.now_s() if left else 0.0
        for path in left:
            with suppress(FileNotFoundError):
                if now_s - path.stat().st_mtime > ABANDONED_AFTER_S:
                    path.unlink()

    def _prune(self, folder: Path) -> None:
        """Remove folders that became empty; an object store has none."""
        with suppress(OSError):  # not empty, or another process was faster
            while folder != self._root:
                folder.rmdir()
                folder = folder.parent


def _time_of_new_file(folder: Path) -> float:
    _make_folder(folder)
    path = _new_temporary(folder)
    try:
        with path.open("xb") as file:
            return os.fstat(file.fileno()).st_mtime
    finally:
        path.unlink(missing_ok=True)


def _new_temporary(folder: Path) -> Path:
    return folder / f"{os.getpid()}-{uuid.uuid4().hex}"


def _publish(temporary: Path, path: Path, *, if_absent: bool) -> None:
    for tries in range(1, MAX_PUBLISH_TRIES + 1):
        try:
            _make_folder(path.parent)
            if if_absent:
                _link(temporary, path)
            else:
                temporary.replace(path)
        except FileNotFoundError:
            # A concurrent delete pruned the folder between the two calls.
            if tries == MAX_PUBLISH_TRIES:
                raise
        else:
            _sync_folder(path.parent)
            return


def _link(temporary: Path, path: Path) -> None:
    """Give the file its name, or fail if the name is taken, where a rename would replace."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        # NFS repeats a call whose answer was lost, and then fails to do it twice.
        if not path.samefile(temporary):
            raise


def _unless_gone(error: OSError) -> None:
    """For os.walk, which by default takes a folder that it cannot read for an empty one."""
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    if folder.parent != folder:
        _make_folder(folder.parent)
    with suppress(FileExistsError):
        folder.mkdir()
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return  # pruned meanwhile: nothing in it to keep
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fill(descriptor: int, out: memoryview, start: int) -> int:
    filled = 0
    while filled < out.nbytes:
        count = os.preadv(descriptor, [out[filled:]], start + filled)
        if count == 0:
            break
        filled += count
    return filled


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    etag = f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"
    return ObjectInfo(key, status.st_size, etag, status.st_mtime)


@contextmanager
def _folded(url: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        kind, meaning = OS_ERRORS.get(exc.errno or 0, (PermanentError, exc.strerror or str(exc)))
        raise kind(f"{url}: {meaning}") from exc
