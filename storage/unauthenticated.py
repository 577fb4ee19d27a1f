"""Connections that have not shown who they are: bounded in bytes, in time and in number.

A client of a run shows its token at once. One that is silent, or sends a byte now and then, is
closed after `LIMIT_S`. Where too many are open at a time, the oldest gives way, so that silent
clients keep nobody else out. Sizes are bytes, times seconds.
"""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

LIMIT_BYTES = 64 << 10
LIMIT_S = 10.0
MAX_OPEN = 256  # a busy server has many clients that it has not come to read


class TooLongError(ConnectionError):
    """A client sent more than it may before it has shown a token."""

    def __init__(self) -> None:
        super().__init__(f"more than {LIMIT_BYTES} bytes without a token")


class UnauthenticatedConnections:
    """The connections of a server that have not shown a token.

    Args:
        max_open: how many there may be at a time.
    """

    def __init__(self, max_open: int = MAX_OPEN) -> None:
        self._max_open = max_open
        self._open: dict[socket.socket, None] = {}  # oldest first
        self._lock = threading.Lock()

    @contextmanager
    def holding(self, connection: socket.socket) -> Iterator[None]:
        """Count a connection as one of them meanwhile."""
        with self._lock:
            while len(self._open) >= self._max_open:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):  # its client was faster
                    oldest.shutdown(socket.SHUT_RDWR)  # which wakes whoever reads it
            self._open[connection] = None
        try:
            yield
        finally:
            with self._lock:
                self._open.pop(connection, None)


class FirstBytes(io.RawIOBase):
    """All that a client may send before it has shown a token, in the time that it has for it.

    Args:
        connection: its socket, whose timeout follows what is left of the time.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left_bytes = LIMIT_BYTES
        self._deadline_s = time.monotonic() + LIMIT_S

    def readable(self) -> bool:
        """See `io.IOBase`."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """See `io.RawIOBase`.

        Raises:
            TooLongError: it sent everything that it may.
            TimeoutError: its time is over.
        """
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"no token within {LIMIT_S:g} s")
        if not self._left_bytes:
            raise TooLongError
        self._connection.settimeout(left_s)
        with memoryview(buffer) as view:
            count = self._connection.recv_into(view[: self._left_bytes])
        self._left_bytes -= count
        return count
