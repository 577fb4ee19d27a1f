"""The waits of a run, as its supervisor and its observers see them.

Whatever a run waits for is its phase, with the time at which the wait began and the last answer.
Times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from perdure.training.engines.base import Snapshot
from perdure.training.journal.history import RunHistory
from perdure.training.journal.waits import Wait, WaitKind
from perdure.training.supervisor.watch import Progress, WatchResult

SILENCE_S = 15.0  # of all agents, before it is shown


def wait_of(history: RunHistory, agents: Snapshot | None) -> Wait | None:
    """Find what the living attempt waits for: a person, or the store; None: for nothing."""
    if history.pause is not None:
        began = history.pause.began
        why = f"every rank stands at step {began.step}; `perdure resume` continues the run"
        return Wait(kind=WaitKind.RESUME, since_s=began.at_s, why=why)
    statuses = agents.agents.values() if agents is not None else ()
    waits = [status.store_wait for status in statuses if status.store_wait is not None]
    return min(waits, key=lambda wait: wait.since_s, default=None)


@dataclass(slots=True)
class AgentSilence:
    """The watcher that shows that nobody hears the agents, whose containers run all the same.

    Attributes:
        on_wait: called with the silence, and with None once an agent answers.
    """

    on_wait: Callable[[Wait | None], None]
    _since_s: float | None = None
    _is_shown: bool = False

    def check(self, progress: Progress) -> WatchResult | None:
        """Look at the answers of a poll."""
        snapshot = progress.snapshot
        if snapshot.agents or snapshot.lost or not snapshot.unanswered:
            if self._is_shown:
                self.on_wait(None)
            self._since_s, self._is_shown = None, False
            return None
        self._since_s = self._since_s or progress.at_s
        if progress.at_s - self._since_s >= SILENCE_S:
            self._is_shown = True
            why = "training is not observed; as far as the platform shows, their containers run"
            self.on_wait(Wait(kind=WaitKind.AGENTS, since_s=self._since_s, why=why))
        return None
