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
from typing import Any

from perdure.training.diagnosis.exits import SHELL_SIGNAL_BASE
from perdure.training.supervisor.termination import MARGIN_S, Termination, is_first_process

EXIT_BY_PLATFORM = SHELL_SIGNAL_BASE + signal.SIGTERM
LAST_WORDS_S = 3.0  # behind the end of the attempt


class TerminationSignals:
    """The handler of SIGTERM of a supervisor; outside of the main thread there is none.

    Args:
        termination: notes the request.
        grace_s: grace period of the processes of an attempt.
    """

    def __init__(self, termination: Termination, grace_s: float) -> None:
        self._termination = termination
        self._limit_s = grace_s + MARGIN_S + LAST_WORDS_S
        self._previous: Any = None
        self._done = threading.Event()

    def install(self) -> None:
        """Handle SIGTERM from now on."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        self._termination.leave = self._leave
        self._termination.owns_machine = is_first_process()

    def restore(self) -> None:
        """Give SIGTERM back to Prefect. The limit stays: Prefect's own end is to come."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def disarm(self) -> None:
        """Lift the limit: this process has more to do than to leave."""
        self._done.set()

    def _on_signal(self, number: int, frame: object) -> None:
        termination = self._termination
        if termination.since_s is not None:
            return  # a second signal must not interrupt the end
        termination.since_s = time.monotonic()
        threading.Thread(target=self._end_in_time, daemon=True).start()
        if not termination.is_deferred:
            self._previous(number, frame)

    def _leave(self) -> None:
        self._previous(signal.SIGTERM, None)

    def _end_in_time(self) -> None:
        if not self._done.wait(self._limit_s):
            os._exit(EXIT_BY_PLATFORM)
