"""Ends Prefect's wait before a retry when the retry is not wanted any more.

Prefect 3.8.8 sleeps in the flow's thread from AwaitingRetry to the retry and asks nobody
meanwhile: a run cancelled from a terminal, or taken over by another process, would go on waiting
for as long as `restart.delay_s`. Times are seconds.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

POLL_S = 0.5


class NotWanted(BaseException):
    """Ends the wait. Prefect retries after an Exception, and takes this for a crash of the task."""


class RetryDelay:
    """A wait that a request to stop ends: use as a context around a task with retries.

    Outside of the main thread, where Python has no signals, a wait is as long as Prefect's.

    Args:
        stop_wanted: polled during a wait; also where it raises, the wait ends.
    """

    def __init__(self, stop_wanted: Callable[[], bool]) -> None:
        self.was_cut_short = False
        self._stop_wanted = stop_wanted
        self._waiting = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._previous_handler: Any = None

    def __enter__(self) -> Self:
        self._closed.clear()
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGUSR1, self._interrupt)
            self._thread = threading.Thread(target=self._watch, name="perdure-delay", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.over()
        self._closed.set()
        if self._thread is not None:
            self._thread.join()  # before the handler goes: without one the signal ends the process
            signal.signal(signal.SIGUSR1, self._previous_handler)
            self._thread = None

    def begin(self) -> None:
        """Have a request to stop raise NotWanted in the main thread from now on."""
        self._waiting.set()

    def over(self) -> None:
        """The retry has begun."""
        self._waiting.clear()

    def _watch(self) -> None:
        while not self._closed.wait(POLL_S):
            if self._waiting.is_set() and self._is_stop_wanted():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def _is_stop_wanted(self) -> bool:
        try:
            return self._stop_wanted()
        except BaseException:  # noqa: BLE001 asked again where it can be raised
            return True

    def _interrupt(self, _number: int, _frame: object) -> None:
        if self._waiting.is_set():
            self._waiting.clear()
            self.was_cut_short = True
            raise NotWanted("a stop was requested before the restart")
