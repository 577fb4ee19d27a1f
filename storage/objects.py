"""What the rest of the package asks of an object store.

Keys are '/'-separated strings relative to the store's address. An object appears whole or not at
all; `put` replaces. Sizes are bytes, times seconds since the epoch by the store's clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object as a listing shows it."""

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
            key: where.
            data: contiguous bytes; not copied, so leave them alone until this returns.
            if_absent: publish only when nothing is there.

        Raises:
            PreconditionFailed: `if_absent` was asked and the object exists.
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

    def now_s(self) -> float:
        """The time by the clock that `modified_s` is told by, at most a second late.

        An object's age is a difference of the two: this machine's clock may be hours off. A
        folder is asked by a file that is gone again; nothing else is written, and no folder made
        that was not there.
        """
        ...

    def url(self, key: str) -> str:
        """Address of the object for people and records; holds no credentials."""
        ...

    def local_path(self, key: str) -> Path | None:
        """Path that may be memory-mapped, or None where there is no such path."""
        ...


@runtime_checkable
class Clearable(Protocol):
    """A store that can be deleted whole."""

    def clear(self) -> None:
        """Delete everything in it, also what no listing shows."""
        ...


@runtime_checkable
class Scattering(Protocol):
    """A store that reads straight into several pieces of memory."""

    def get_scattered(self, key: str, outs: Sequence[memoryview], *, start: int = 0) -> None:
        """Fill `outs`, one after the other, from offset `start`; raises as `get_into` does."""
        ...


def get_scattered(
    store: ObjectStore, key: str, outs: Sequence[memoryview], *, start: int = 0
) -> None:
    """Fill `outs`, one after the other, from offset `start`; by one read of any store.

    Raises:
        NotFound: no such object.
        Corrupt: the object ends before all are full.
    """
    if len(outs) == 1:
        store.get_into(key, outs[0], start=start)
    elif isinstance(store, Scattering):
        store.get_scattered(key, outs, start=start)
    else:
        block = memoryview(bytearray(sum(out.nbytes for out in outs)))
        store.get_into(key, block, start=start)
        at = 0
        for out in outs:
            out.cast("B")[:] = block[at : at + out.nbytes]
            at += out.nbytes


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
