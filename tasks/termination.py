"""SIGTERM to the process of a flow run of `pretrain`, and the limit for its end.

Prefect raises TerminationSignal wherever the main thread is (3.8.8). While an attempt is under way
its watch answers instead: at the end of an allocation the agents are asked to end as well, and the
last save and the end of the attempt go on record first. Prefect would then tell its server, which
may have ended before, for minutes; the platform kills after its grace period. Times are seconds.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from perdure.training.diagnosis.exits import SHELL_SIGNAL_BASE
from perdure.training.supervisor.termination import MARGIN_S, Termination, is_first_process

EXIT_BY_PLATFORM = SHELL_SIGNAL_BASE + signal.SIGTERM
LAST_WORDS_S = 3.0  # behind the end of the attempt

_is_needed = threading.Event()  # this process has more to do than to leave


def limit_of(grace_s: float) -> float:
    """The longest time from SIGTERM to the end of this process."""
    return grace_s + MARGIN_S + LAST_WORDS_S


@contextmanager
def ended_in_time(limit_s: float) -> Iterator[None]:
    """Inside, have SIGTERM end this process within a limit, whatever its handler does then.

    Where Prefect's engine begins or ends a flow run, the handler is its own (3.8.8).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_await_signal, args=(reader, limit_s), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        os.close(writer)


def _await_signal(reader: int, limit_s: float) -> None:
    while numbers := os.read(reader, 64):
        if signal.SIGTERM in numbers:
            _end_in_time(limit_s)


def _end_in_time(limit_s: float) -> None:
    if not _is_needed.wait(limit_s):
        os.write(2, b"perdure: ended by the platform (SIGTERM); start it again to go on\n")
        os._exit(EXIT_BY_PLATFORM)


class TerminationSignals:
    """The handler of SIGTERM of a supervisor; outside of the main thread there is none.

    Args:
        termination: notes the request.
        grace_s: grace period of the processes of an attempt.
        trains_elsewhere: whether the nodes outlive the container of this process.
    """

    def __init__(
        self, termination: Termination, grace_s: float, *, trains_elsewhere: bool = False
    ) -> None:
        self._termination = termination
        self._limit_s = limit_of(grace_s)
        self._trains_elsewhere = trains_elsewhere
        self._previous: Any = None

    def install(self) -> None:
        """Handle SIGTERM from now on."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        self._termination.leave = self._leave
        self._termination.owns_machine = is_first_process() and not self._trains_elsewhere

    def restore(self) -> None:
        """Give SIGTERM back to Prefect."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def hurry(self) -> None:
        """Leave Prefect a moment to report the end of this process."""
        threading.Thread(target=_end_in_time, args=(LAST_WORDS_S,), daemon=True).start()

    def disarm(self) -> None:
        """Lift the limit: this process has more to do than to leave."""
        _is_needed.set()

    def _on_signal(self, number: int, frame: object) -> None:
        termination = self._termination
        if termination.since_s is not None:
            return  # a second signal must not interrupt the end
        termination.since_s = time.monotonic()
        threading.Thread(target=_end_in_time, args=(self._limit_s,), daemon=True).start()
        if not termination.is_deferred:
            self._previous(number, frame)

    def _leave(self) -> None:
        self._previous(signal.SIGTERM, None)
