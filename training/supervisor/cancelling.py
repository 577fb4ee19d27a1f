"""Cancelling a run from wherever its store is reached: through its supervisor, or without one."""

from __future__ import annotations

from collections.abc import Callable

from perdure.training.errors import RunConflict
from perdure.training.journal.history import RunHistory
from perdure.training.supervisor.run import Run
from perdure.training.wire.requests import request_cancel


def cancel(run: Run, *, by_server: Callable[[RunHistory], bool] = lambda _history: False) -> str:
    """Have a run stopped; without a supervisor, take its containers down here.

    Args:
        run: that is not taken by this process yet.
        by_server: cancels what a Prefect server knows of the run; whether it knows anything. Else
            the request goes into the store, where the supervisor looks for it.

    Returns:
        What was done, for the user.
    """
    name = run.job.run_id
    ended = run.refresh().ended
    if ended is not None:
        return f"{name}: has ended already: {ended.outcome}"
    try:
        run.take()
    except RunConflict:
        if not by_server(run.refresh()):
            request_cancel(run.store, name)
        return f"{name}: its supervisor cancels it"
    run.end("cancelled", "perdure cancel")
    return f"{name}: no supervisor was alive; its processes are stopped"
