"""`perdure pause` and `perdure resume`: request a change, and wait until the ranks follow.

The coordinator of the attempt reads the request from the run's store, so a run without a
supervisor can be paused as well. Times are seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import typer

from perdure.console import RunId
from perdure.runs import OpenAttempt, run_to_observe
from perdure.training.errors import InputError, PerdureError
from perdure.training.journal.attempt_view import Pause
from perdure.training.journal.history import RunHistory
from perdure.training.supervisor.run_handle import RunHandle
from perdure.training.wire.requests import is_pause_wanted, write_control

POLL_S = 0.5
# A supervisor records a pause at once; without one only the attempt's own log shows it.
OBSERVE_AFTER_S = 5.0

WaitS = Annotated[float, typer.Option("--wait-s", min=0, help="seconds to wait for the ranks")]


def pause(run_id: RunId, *, wait_s: WaitS = 60.0) -> None:
    """Stop every rank of a run at one step boundary until it is resumed.

    The state stays in memory; a pause saves nothing. The run stays paused even if its processes
    fail: a new attempt stops at its first step boundary, and `perdure run` adopts a paused run
    without resuming it. Only `perdure resume`, the Resume button of Prefect, or the end of the
    run, for example by `perdure cancel`, ends the pause.
    """
    Pausing(run_to_observe(run_id), wait_s=wait_s).pause()


def resume(run_id: RunId, *, wait_s: WaitS = 60.0) -> None:
    """Continue a paused run from its present step."""
    Pausing(run_to_observe(run_id), wait_s=wait_s).resume()


class Pausing:
    """Pauses and resumes one run.

    Args:
        run: a run that another process may supervise.
        wait_s: how long to wait until the ranks have paused or continued.
    """

    def __init__(
        self,
        run: RunHandle,
        *,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._run = run
        self._run_id = run.job.run_id
        self._wait_s = wait_s
        self._clock = clock
        self._sleep = sleep
        self._open_attempt = OpenAttempt(run)

    def pause(self) -> None:
        """Request a pause, and wait until every rank has stopped at one step boundary.

        Raises:
            InputError: the run is not running, or cannot be paused.
            PerdureError: no pause was confirmed in time; the request remains.
        """
        self._refuse_ended()
        if self._run.job.worker.is_command:
            problem = f"{self._run_id!r} runs a command; only a session can be paused"
            raise InputError("run_id", problem)
        write_control(self._run.store, self._run_id, pause=True)
        self._print("waiting until every rank pauses at a step boundary")
        if not self._await(paused=True):
            raise PerdureError(
                f"{self._run_id}: no pause was confirmed within {self._wait_s:g} s; its ranks "
                f"will still pause, unless 'perdure resume {self._run_id}' withdraws the request"
            )
        self._print(f"paused; 'perdure resume {self._run_id}' continues it")

    def resume(self) -> None:
        """Withdraw the request, and wait until the ranks train.

        Raises:
            InputError: the run is not running.
            PerdureError: training was not confirmed in time; it may still continue.
        """
        history = self._refuse_ended()
        # A request may not have reached the ranks yet, and a pause may outlast its request.
        if history.pause is None and not is_pause_wanted(self._run.store, self._run_id):
            self._print("the run is not paused")
            return
        write_control(self._run.store, self._run_id, pause=False)
        self._print("waiting until the ranks continue")
        if not self._await(paused=False):
            raise PerdureError(f"{self._run_id}: the run is still paused after {self._wait_s:g} s")
        self._print("training continues")

    def _print(self, text: str) -> None:
        print(f"{self._run_id}: {text}", flush=True)

    def _refuse_ended(self) -> RunHistory:
        history = self._run.refresh()
        if history.job is None:
            raise InputError("run_id", f"{self._run_id!r} is not running: it was never started")
        if history.ended is not None:
            outcome = history.ended.outcome
            raise InputError("run_id", f"{self._run_id!r} is not running: {outcome}")
        return history

    def _await(self, *, paused: bool) -> bool:
        """Whether the ranks have paused, or continued, in time."""
        began_s = self._clock()
        # A ledger that agrees already may be old: perhaps no supervisor has written since.
        is_old = (self._run.history.pause is not None) is paused
        observe_after_s = 0.0 if is_old else min(OBSERVE_AFTER_S, self._wait_s)
        while True:
            waited_s = self._clock() - began_s
            pause = self._pause(observe=waited_s >= observe_after_s)
            if (pause is not None) is paused:
                return True
            if waited_s >= self._wait_s:
                return False
            self._sleep(POLL_S)

    def _pause(self, *, observe: bool) -> Pause | None:
        """The pause that the run is in, by its ledger or by its attempt's own log."""
        history = self._refuse_ended()
        view = history.open_attempt
        if view is None or not observe:
            return history.pause
        observer = self._open_attempt.observer(history)
        return observer.pause(view) if observer is not None else None
