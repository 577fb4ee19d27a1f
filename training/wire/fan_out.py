"""Calls to thousands of agents at once, from one thread of its own.

A thread for each call would do for hundreds of nodes; a look every 0.2 s at thousands of them
would be spent on starting threads. Times are seconds.
"""

from __future__ import annotations

import asyncio
import resource
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

from pydantic import BaseModel

from perdure.training.wire.transport import call_among_others

# Connections: a look and an order for each of the most nodes that a job may have. Fewer would let
# a check of minutes, or as many dead nodes, keep the look at all others waiting.
MAX_OPEN = 2048
OTHER_FILES = 512  # that this process may open beside them


@dataclass(frozen=True, slots=True)
class TimedLine:
    """A line that answers a request, and when the one was sent and the other there (epoch)."""

    line: bytes
    sent_s: float
    answered_s: float


class FanOut:
    """Carries calls out; the thread begins with the first one and ends with the process.

    Args:
        max_open: connections at a time; a call beyond it waits, and its time begins after that.
    """

    def __init__(self, *, max_open: int = MAX_OPEN) -> None:
        self._max_open = room_for(max_open)
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: asyncio.Semaphore | None = None

    def call(
        self, host: str, port: int, request: BaseModel, *, timeout_s: float
    ) -> Future[TimedLine]:
        """Send a request. Its future has what answers it.

        The future raises OSError (nothing listens there, or no reply came in time) or ValueError
        (the reply is too long).
        """
        calling = self._call(host, port, request, timeout_s)
        return asyncio.run_coroutine_threadsafe(calling, self._started())

    async def _call(self, host: str, port: int, request: BaseModel, timeout_s: float) -> TimedLine:
        assert self._open is not None  # noqa: S101 made with the loop
        async with self._open:
            sent_s = time.time()
            line = await call_among_others(host, port, request, timeout_s=timeout_s)
            return TimedLine(line, sent_s, time.time())

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._open = asyncio.Semaphore(self._max_open)
                thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="calls")
                thread.start()
            return self._loop


def room_for(connections: int) -> int:
    """How many of these connections the limit of open files leaves room for, raised if it must."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(1, max(allowed, soft) - OTHER_FILES)
