"""Objects as files below one folder, with the guarantees of an object store.

A write goes to a temporary name, is synced, renamed, and its folder synced: a reader or a crash
sees the old object or the new one. Temporaries live in `.tmp` of the same root, hence on the same
file system, and are never listed.

A folder may vanish silently, as a bucket cannot: a network file system is unmounted, and below
the same path lies an empty folder of the machine's own disk. The store of runs therefore has a
marker, a file that `make` puts there once. It is looked for at every write, and wherever nothing
is found; without it there is no store, and nothing is made in its place. Sizes are bytes, times
seconds.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from perdure.storage.errors import (
    AccessDenied,
    Corrupt,
    NotFound,
    PermanentError,
    PreconditionFailed,
    StorageError,
    StorageFull,
    StoreMissing,
    TimedOut,
    TransientError,
)
from perdure.storage.objects import ObjectInfo, check_key, check_prefix
from perdure.storage.regular_file import check_regular, check_within, open_regular
from perdure.storage.retry import Retry

T = TypeVar("T")

TEMPORARY_FOLDER = ".tmp"
MARKER = ".perdure-store"
MARKER_TEXT = """\
Perdure keeps runs in this folder. It looks for this file before it writes, so that the empty
folder below an unmounted file system is not taken for an empty store. Leave it here.
"""
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
    errno.ENOSPC: (StorageFull, "the disk is full"),
    errno.EDQUOT: (StorageFull, "the disk quota is used up"),
    errno.ENXIO: (Corrupt, "not a regular file"),
    errno.ELOOP: (Corrupt, "a symbolic link that leads nowhere, or out of the store"),
    errno.ENAMETOOLONG: (PermanentError, "the key is too long for this file system"),
    errno.EIO: (Corrupt, "the medium cannot be read or written"),
    errno.ESTALE: (TransientError, "stale file handle of a network file system"),
    errno.EAGAIN: (TransientError, "resource busy"),
    errno.EBUSY: (TransientError, "resource busy"),
    errno.ETIMEDOUT: (TimedOut, "the network file system does not answer"),
    errno.EHOSTDOWN: (TimedOut, "the network file system does not answer"),
    errno.EHOSTUNREACH: (TimedOut, "the network file system does not answer"),
    errno.ENOTCONN: (TimedOut, "the server of the file system has ended"),
}


class LocalStore:
    """An `ObjectStore` below `root`, which is created when the first object is.

    Args:
        root: absolute path of the store's folder.
        is_marked: whether the store has a marker; `make` creates it, and no write does.
        retry: patience with passing failures of a marked store; None: `Retry()` once
            the marker has been seen, before that not at all.

    Raises:
        ValueError: `root` is relative.
    """

    def __init__(self, root: Path, *, is_marked: bool = False, retry: Retry | None = None) -> None:
        if not root.is_absolute():
            raise ValueError(f"root={str(root)!r} is not an absolute path")
        self._root = root
        self._is_marked = is_marked
        self._waits = retry if is_marked else None  # from the beginning
        self._retry = self._waits or Retry()
        self._was_there = False
        self._swept = False

    def make(self) -> None:
        """Make a marked store; one that is there stays as it is.

        Raises:
            StorageError: it cannot be made.
        """
        with _folded(self.url(MARKER)):
            if (self._root / MARKER).exists():
                return
            temporary = self._write_temporary(memoryview(MARKER_TEXT.encode()))
            _publish(temporary, self._root / MARKER, if_absent=False)

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        """See `ObjectStore.put`."""
        view = memoryview(data).cast("B")

        def put(tries: int) -> None:
            try:
                with self._present(key):
                    self._put(key, view, if_absent=if_absent)
            except PreconditionFailed:
                # A try before may have published it in the moment when the store vanished.
                if tries == 0 or self.get(key, length=view.nbytes + 1) != view:
                    raise

        self._tried(put)

    def _put(self, key: str, view: memoryview, *, if_absent: bool) -> None:
        path = self._path(key)
        with _folded(self.url(key)):
            temporary = self._write_temporary(view, top=self._top)
            try:
                self._check_folder(path.parent)
                _publish(temporary, path, if_absent=if_absent, top=self._top)
            except FileExistsError as exc:
                raise PreconditionFailed(f"{self.url(key)}: exists already") from exc
            finally:
                with suppress(FileNotFoundError):
                    temporary.unlink()

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        """See `ObjectStore.get`."""
        path = self._path(key)

        def get(_tries: int) -> bytes:
            with self._reading(key), open_regular(path, within=self._root) as file:
                size = os.fstat(file.fileno()).st_size
                available_bytes = max(0, size - start)
                out = bytearray(available_bytes if length is None else min(length, available_bytes))
                filled = _fill(file.fileno(), memoryview(out), start)
            return bytes(memoryview(out)[:filled])

        return self._tried(get)

    def get_into(self, key: str, out: memoryview, *, start: int = 0) -> None:
        """See `ObjectStore.get_into`."""
        self.get_scattered(key, [out], start=start)

    def get_scattered(self, key: str, outs: Sequence[memoryview], *, start: int = 0) -> None:
        """See `ObjectStore.get_scattered`."""
        path = self._path(key)

        def get(_tries: int) -> None:
            at = start
            with self._reading(key), open_regular(path, within=self._root) as file:
                for out in outs:
                    view = out.cast("B")
                    filled = _fill(file.fileno(), view, at)
                    at += view.nbytes
                    if filled < view.nbytes:
                        missing = view.nbytes - filled
                        raise Corrupt(f"{self.url(key)}: ends {missing} bytes before {at}")

        self._tried(get)

    def stat(self, key: str) -> ObjectInfo:
        """See `ObjectStore.stat`."""
        path = self._path(key)

        def look(_tries: int) -> ObjectInfo:
            with self._reading(key):
                status = path.stat()
                check_regular(status, path)
                check_within(path, self._root, path)
                return _info(key, status)

        return self._tried(look)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        if check_prefix(prefix).startswith(f"{TEMPORARY_FOLDER}/"):
            return iter(())

        def listed(_tries: int) -> Sequence[ObjectInfo]:
            with self._present(prefix), _folded(self.url(prefix)):
                return self._list(prefix)

        return iter(sorted(self._tried(listed), key=lambda info: info.key))

    def _list(self, prefix: str) -> Sequence[ObjectInfo]:
        folder = self._root / prefix.rpartition("/")[0]
        infos: list[ObjectInfo] = []
        for parent, folders, names in os.walk(folder, onerror=_unless_gone):
            if Path(parent) == self._root and TEMPORARY_FOLDER in folders:
                folders.remove(TEMPORARY_FOLDER)
            for name in names:
                path = Path(parent, name)
                key = path.relative_to(self._root).as_posix()
                if key.startswith(prefix) and key != MARKER:
                    # deleted by another process while we walk
                    with suppress(FileNotFoundError):
                        infos.append(_info(key, path.stat()))
        return infos

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        path = self._path(key)

        def delete(_tries: int) -> None:
            with self._present(key), suppress(NotFound), _folded(self.url(key)):
                self._check_folder(path.parent)
                path.unlink()
                _sync_folder(path.parent)
                self._prune(path.parent)

        self._tried(delete)

    def abort_uploads(self, prefix: str, older_than_s: float) -> int:  # noqa: ARG002 the protocol
        """Abort nothing: a later write removes the files that killed writers left."""
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
        if not self._root.is_dir() or (self._is_marked and not self.is_there):
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

    @property
    def is_there(self) -> bool:
        """Whether the store has been made, and its folder is the one in which it was.

        Raises:
            StorageError: its file system does not answer.
        """
        with _folded(self.url(MARKER)):
            try:
                (self._root / MARKER).stat()
            except (FileNotFoundError, NotADirectoryError):
                return False
        self._was_there = True
        return True

    def _tried(self, operation: Callable[[int], T]) -> T:
        if not self._is_marked or (self._waits is None and not self._was_there):
            return operation(0)
        return self._retry.run(operation)

    def _require(self) -> None:
        if self._is_marked and not self.is_there:
            or_else = "was moved away" if self._was_there else "no run has made it yet"
            text = f"no store is in this folder ({MARKER}): it is not mounted, or {or_else}"
            raise StoreMissing(f"{self.url('')}: {text}")

    @contextmanager
    def _present(self, key: str) -> Iterator[None]:
        """The store is there before and after what is done to an object."""
        self._require()
        with self._reading(key):
            yield
        # The bytes just written may lie in the folder below the mount.
        self._require()

    @contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        """Take an object for missing only where the store itself is there."""
        try:
            with _folded(self.url(key)):
                yield
        except NotFound:
            self._require()
            raise

    @property
    def _top(self) -> Path | None:
        """The folder that no write may make again."""
        return self._root if self._is_marked else None

    def _path(self, key: str) -> Path:
        first = check_key(key).split("/", maxsplit=1)[0]
        if first in (TEMPORARY_FOLDER, MARKER):
            raise ValueError(f"not a key: {key!r}; {first!r} is the store's own")
        return self._root / key

    def _write_temporary(self, data: memoryview, *, top: Path | None = None) -> Path:
        folder = self._root / TEMPORARY_FOLDER
        _make_folder(folder, top=top)
        self._check_folder(folder)
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

    def _check_folder(self, folder: Path) -> None:
        """Refuse to change what lies behind a link out of the store."""
        if folder != self._root:
            check_within(folder, self._root, folder)

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


def _publish(temporary: Path, path: Path, *, if_absent: bool, top: Path | None = None) -> None:
    for tries in range(1, MAX_PUBLISH_TRIES + 1):
        try:
            temporary.stat()  # gone with its file system: no folder is to be made in its place
            _make_folder(path.parent, top=top)
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
    """Raise errors of os.walk, which by default takes an unreadable folder for an empty one."""
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error


def _make_folder(folder: Path, *, top: Path | None = None) -> None:
    """Make a folder and those above it, but not `top`: that is gone for a reason."""
    if folder.is_dir():
        return
    if folder == top:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    if folder.parent != folder:
        _make_folder(folder.parent, top=top)
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
