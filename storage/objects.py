"""The interface of an object store, and helpers for its users.

Keys are '/'-separated strings relative to the store's address. An object appears whole or not at
all; `put` replaces. Sizes are bytes, times seconds since the epoch by the store's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

T = TypeVar("T")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object as a listing shows it."""

    key: str
    size_bytes: int
    etag: str  # changes when the object does; opaque otherwise
    modified_s: float


class ObjectStore(Protocol):
    """Whole objects by key; safe for use from several threads.

    Every method raises `StorageError`; transient ones only after the store's own retries.
    """

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        """Publish `data` under `key`, whole or not at all.

        Args:
            key: name of the object in the store.
            data: contiguous bytes; not copied, so leave them alone until this returns.
            if_absent: publish only when nothing is there.

        Raises:
            PreconditionFailed: `if_absent` is set and the object exists.
            ValueError: `if_absent` with more than one part's worth of bytes (s3).
        """
        ...

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        """Read bytes as a slice does: fewer come back when the object ends before.

        Raises:
            NotFound: no such object.
        """
        ...

    def get_into(self, key: str, out: memoryview, *, start: int = 0) -> None:
        """Fill `out` from offset `start`.

        Raises:
            NotFound: no such object.
            Corrupt: the object ends before `out` is full.
        """
        ...

    def get_scattered(self, key: str, outs: Sequence[memoryview], *, start: int = 0) -> None:
        """Fill `outs` in turn from offset `start`, by one read; raises as `get_into` does."""
        ...

    def stat(self, key: str) -> ObjectInfo:
        """Size and version of one object.

        Raises:
            NotFound: no such object.
        """
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix`, in key order; unfinished writes never show."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; removing what is not there is no error."""
        ...

    def abort_uploads(self, prefix: str, older_than_s: float) -> int:
        """Drop the parts of uploads below `prefix` that no writer will finish.

        Args:
            prefix: common start of the keys that were to be published.
            older_than_s: age by the store's clock that no upload under way has.

        Returns:
            Number of uploads aborted.
        """
        ...

    def clear(self) -> None:
        """Delete everything in the store, what no listing shows included.

        Raises:
            ValueError: the store is a whole bucket.
        """
        ...

    def now_s(self) -> float:
        """The time by the clock of `modified_s`, at most a second late.

        An object's age is a difference of the two: this machine's clock may be hours off. A
        local store reads it off a file that it creates and removes; it writes nothing else and
        makes no folder that was not there.
        """
        ...

    def url(self, key: str) -> str:
        """Address of the object for logs and records; holds no credentials."""
        ...

    def local_path(self, key: str) -> Path | None:
        """Path that may be memory-mapped, or None where there is no such path."""
        ...


def in_parallel(work: Callable[[Item], T], items: Iterable[Item], *, num_threads: int) -> list[T]:
    """`work` of every item, in order; after a failure nothing more is begun."""
    return list(each_in_parallel(work, list(items), num_threads=num_threads))


def each_in_parallel(
    work: Callable[[Item], T], items: Sequence[Item], *, num_threads: int
) -> Iterator[T]:
    """The results of `in_parallel` one by one, while the rest is being worked on."""
    if len(items) < 2:
        yield from map(work, items)
        return
    # A pool per transfer survives a fork, and threads cost nothing beside 64 MiB parts.
    with ThreadPoolExecutor(min(num_threads, len(items))) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            for future in futures:
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def check_key(key: str) -> str:
    """Return `key` if no store could read it as a place outside its address.

    Raises:
        ValueError: the key is empty, absolute, or has an empty, '.' or '..' component.
    """
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in key:
        raise ValueError(f"not a key: {key!r}; keys are names joined by '/', without '.' or '..'")
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` if it is empty or the beginning of a key; it may end with '/'.

    Raises:
        ValueError: no key begins like this.
    """
    if prefix:
        check_key(prefix.removesuffix("/"))
    return prefix
