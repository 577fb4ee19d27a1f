"""Signals by which the node agent, or a user, asks a worker to save or to end."""

from __future__ import annotations

import os
import signal
import sys

from perdure.training.diagnosis.exits import EXIT_RESTART_ME


class AgentRequests:
    """Requests of the node agent or a user to this process, by a signal.

    Attributes:
        stop: SIGTERM came: save and end at the next step boundary.
        save: SIGUSR1 came: save at the next step boundary.
        in_loop: there are step boundaries; without them SIGTERM ends the process at once.
    """

    def __init__(self) -> None:
        self.stop = False
        self.save = False
        self.in_loop = False

    def install(self) -> None:
        """Handle the signals from now on."""
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGUSR1, self._on_save)

    def _on_save(self, _number: int, _frame: object) -> None:
        self.save = True

    def _on_terminate(self, _number: int, _frame: object) -> None:
        # All ranks leave together: without this line, nothing shows which of them got the signal.
        os.write(2, f"[rank{os.environ.get('RANK', '?')}]: received SIGTERM\n".encode())
        if not self.in_loop:
            sys.exit(EXIT_RESTART_ME)
        self.stop = True
