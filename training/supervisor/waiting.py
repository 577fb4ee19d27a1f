"""The waits of a run, as its supervisor and its observers see them.

Whatever a run waits for is its phase, with the time at which the wait began and the last answer.
Times are seconds since the epoch.
"""

from __future__ import annotations

from perdure.training.engines.base import Snapshot
from perdure.training.journal.history import RunHistory
from perdure.training.wire.store_wait import Wait, WaitKind


def wait_of(history: RunHistory, agents: Snapshot | None) -> Wait | None:
    """Find what the living attempt waits for: a person, or the store; None: for nothing."""
    if history.pause is not None:
        began = history.pause.began
        why = f"every rank stands at step {began.step}; `perdure resume` continues the run"
        return Wait(kind=WaitKind.RESUME, since_s=began.at_s, why=why)
    statuses = agents.agents.values() if agents is not None else ()
    waits = [status.store_wait for status in statuses if status.store_wait is not None]
    return min(waits, key=lambda wait: wait.since_s, default=None)
