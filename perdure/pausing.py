"""`perdure pause` and `perdure resume`: a wish, and waiting until the ranks have heeded it.

The wish lies in the run's store, where the coordinator of the attempt finds it; nobody needs to
supervise the run. Times are seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from training.errors import InputError, PerdureError
from training.journal.history import Pause, RunHistory
from training.supervisor.run import Run
from training.supervisor.watch import AttemptObserver
from training.wire.requests import is_pause_wanted, write_control

POLL_S = 0.5
# A supervisor has it on record at once; without one the attempt's own file tells.
ONLOOKER_AFTER_S = 5.0

Say = Callable[[str], None]


class Pausing:
    """Pauses and resumes one run.

    Args:
        run: that is not taken for it.
        wait_s: how long to wait until the ranks stand, or go on.
        say: told what is waited for.
    """

    def __init__(
        self,
        run: Run,
        *,
        wait_s: float,
        say: Say,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._run = run
        self._wait_s = wait_s
        self._say = say
        self._clock = clock
        self._sleep = sleep
        self._observer: tuple[tuple[int, int], AttemptObserver] | None = None

    @property
    def _run_id(self) -> str:
        return self._run.job.run_id

    def pause(self) -> None:
        """Have every rank stand at one step boundary.

        Raises:
            InputError: the run is not running, or cannot be paused.
            PerdureError: it was not seen to stand in time; the wish remains.
        """
        self._refuse_ended()
        if self._run.job.worker.is_command:
            raise InputError(
                "run_id", f"{self._run_id!r}: runs a command, only a session can be paused"
            )
        write_control(self._run.store, self._run_id, pause=True)
        self._say(f"{self._run_id}: waiting until every rank stands at a step boundary")
        seen = self._await(paused=True)
        if not seen:
            raise PerdureError(
                f"{self._run_id}: not seen to pause within {self._wait_s:g} s; it will once its "
                f"ranks get to it, unless `perdure resume {self._run_id}` takes the wish back"
            )
        self._say(f"{self._run_id}: paused; `perdure resume {self._run_id}` has it go on")

    def resume(self) -> None:
        """Have a paused run go on.

        Raises:
            InputError: the run is not running.
            PerdureError: it was not seen to go on in time; it may yet.
        """
        history = self._refuse_ended()
        wanted = is_pause_wanted(self._run.store, self._run_id)
        if not wanted and history.pause is None:
            self._say(f"{self._run_id}: is not paused")
            return
        write_control(self._run.store, self._run_id, pause=False)
        self._say(f"{self._run_id}: waiting until the ranks go on")
        if not self._await(paused=False):
            raise PerdureError(f"{self._run_id}: not seen to go on within {self._wait_s:g} s")
        self._say(f"{self._run_id}: goes on")

    def _refuse_ended(self) -> RunHistory:
        history = self._run.refresh()
        if history.job is None:
            raise InputError("run_id", f"{self._run_id!r}: is not running: never started")
        if history.ended is not None:
            outcome = history.ended.outcome
            raise InputError("run_id", f"{self._run_id!r}: is not running: {outcome}")
        return history

    def _await(self, *, paused: bool) -> bool:
        """Whether the ranks were seen to stand, or to go on, in time."""
        began_s = self._clock()
        # What the ledger says already may be old: perhaps nobody has written since.
        is_old = (self._run.history.pause is not None) is paused
        closer_after_s = 0.0 if is_old else min(ONLOOKER_AFTER_S, self._wait_s)
        while True:
            waited_s = self._clock() - began_s
            pause = self._seen(look_closer=waited_s >= closer_after_s)
            if (pause is not None) is paused:
                return True
            if waited_s >= self._wait_s:
                return False
            self._sleep(POLL_S)

    def _seen(self, *, look_closer: bool) -> Pause | None:
        """The pause that the run is in, by its ledger or by its attempt's own file."""
        history = self._refuse_ended()
        view = history.open_attempt
        if view is None or not look_closer:
            return history.pause
        if self._observer is None or self._observer[0] != view.key:
            observer = self._run.observer()
            if observer is None:
                return None
            self._observer = view.key, observer
        return self._observer[1].pause(view)
