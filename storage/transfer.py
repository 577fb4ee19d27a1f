"""Memory on its way to and from an object store: a body to send, and pieces in parallel.

Sizes are bytes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from typing_extensions import Buffer

T = TypeVar("T")
Item = TypeVar("Item")

SEND_SIZE_BYTES = 2**20


class Body(io.RawIOBase):
    """A seekable reader of memory: botocore takes no memoryview. Copies nothing for `read`."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def __len__(self) -> int:
        return self._view.nbytes

    def readable(self) -> bool:
        """Whether `read` works: always."""
        return True

    def seekable(self) -> bool:
        """Whether `seek` works: always; a request that is repeated starts anew."""
        return True

    def tell(self) -> int:
        """Offset of the next byte to send."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to `offset` bytes from the start, the current place or the end."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._view.nbytes}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        """What comes next: the memory itself, which a socket and a hash take as well.

        At least `SEND_SIZE_BYTES` of it: urllib3 asks for 16 KiB and sends whatever it gets, and
        a system call for each would cost more than the copy.
        """
        end = self._view.nbytes if size < 0 else self._at + max(size, SEND_SIZE_BYTES)
        chunk = self._view[self._at : end]
        self._at += chunk.nbytes
        return chunk  # type: ignore[return-value]

    def readinto(self, buffer: Buffer) -> int:
        """Copy what comes next into `buffer`; returns how many bytes."""
        out = memoryview(buffer).cast("B")
        chunk = self._view[self._at : self._at + out.nbytes]
        out[: chunk.nbytes] = chunk
        self._at += chunk.nbytes
        return chunk.nbytes


def in_parallel(work: Callable[[Item], T], items: Iterable[Item], *, num_threads: int) -> list[T]:
    """`work` of every item, in order; after a failure nothing more is begun."""
    todo = list(items)
    if len(todo) < 2:
        return [work(item) for item in todo]
    # A pool per transfer survives a fork, and threads cost nothing beside 64 MiB parts.
    with ThreadPoolExecutor(min(num_threads, len(todo))) as pool:
        futures = [pool.submit(work, item) for item in todo]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
