"""Sleeping until a process ends, or another thread wakes the sleeper. Times are seconds."""

from __future__ import annotations

import select
import signal
import socket
from types import FrameType
from typing import Self


class WakeupSignal:
    """Wakes the main thread, for which it catches SIGCHLD while it is entered.

    The kernel signals every end, adopted processes included: polling fifty times a second would
    cost more of a core and still notice it later.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._before = -1

    def __enter__(self) -> Self:
        signal.signal(signal.SIGCHLD, _noticed)
        self._before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._before)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._reader.close()
        self._writer.close()

    def wake(self) -> None:
        """From any thread: have the sleeper wake, or not fall asleep the next time."""
        try:
            self._writer.send(b"\0")
        except OSError:  # its buffer is full, or it sleeps no more
            return

    def sleep(self, timeout_s: float) -> None:
        """Sleep until a signal came, `wake` was called, or the time is over."""
        ready, _, _ = select.select([self._reader], [], [], timeout_s)
        if ready:
            self._reader.recv(4096)


def _noticed(_number: int, _frame: FrameType | None) -> None:
    """Python writes to the wakeup descriptor only for signals that have a handler."""
