"""Requests to cancel a run, as its supervisor looks for them: in the store, and on this machine.

A store that is silent takes no request, and a run is to end all the same: a note in Perdure's
folder reaches a supervisor of this machine. The store is read in a thread of its own, because the
watch over an attempt cannot wait for it. Times are seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from perdure.storage.address import Credentials
from perdure.storage.errors import StorageError
from perdure.training.config.job import Job
from perdure.training.errors import PerdureError
from perdure.training.files import write_whole
from perdure.training.supervisor.job_registry import job_path
from perdure.training.supervisor.run_handle import open_briefly
from perdure.training.wire.requests import is_cancel_wanted

POLL_S = 2.0
TAKEN_WITHIN_S = 90.0  # a supervisor may wait for an answer of the store for a minute
_NOTE = "cancel-wanted"


class CancelPoll:
    """Looks for a request to cancel one run.

    Args:
        job: the run's.
        home: Perdure's folder on this machine.
        credentials: keys of the job's store.
    """

    def __init__(self, job: Job, home: Path, credentials: Credentials | None) -> None:
        self._run_id, self._home = job.run_id, home
        self._store = open_briefly(job, credentials)
        self._thread: threading.Thread | None = None
        self._polled_s = float("-inf")
        self._is_wanted = False

    @property
    def is_wanted(self) -> bool:
        """Whether there was a request; returns at once."""
        if not self._is_wanted and _take_note(self._home, self._run_id):
            self._is_wanted = True
        is_due = time.monotonic() - self._polled_s > POLL_S
        is_busy = self._thread is not None and self._thread.is_alive()
        if not self._is_wanted and is_due and not is_busy:
            self._polled_s = time.monotonic()
            self._thread = threading.Thread(target=self._read_store, daemon=True)
            self._thread.start()
        return self._is_wanted

    def _read_store(self) -> None:
        with suppress(StorageError):  # polled again soon
            self._is_wanted = is_cancel_wanted(self._store, self._run_id) or self._is_wanted


def cancel_on_this_machine(
    home: Path,
    run_id: str,
    error: StorageError,
    *,
    wait_s: float = TAKEN_WITHIN_S,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Have a supervisor of this machine cancel a run whose store does not answer.

    Args:
        home: Perdure's folder on this machine.
        run_id: name of the run.
        error: the store's last answer.
        wait_s: limit for the supervisor to take the request.
        sleep: waits between two looks.

    Returns:
        The line for the user.

    Raises:
        StorageError: the same, because this machine does not know the run.
        PerdureError: no supervisor took the request.
    """
    note = _note_path(home, run_id)
    if not note.parent.is_dir():
        raise error  # the run was never started on this machine
    try:
        write_whole(note, "", private=True)
    except OSError as unwritten:
        raise PerdureError(f"{run_id}: the store does not answer, and {unwritten}") from error
    for _ in range(round(wait_s)):
        if not note.exists():
            return (
                f"{run_id}: the store does not answer ({error}); the supervisor stops the "
                "processes now, saves in memory are committed and the end is recorded once it does"
            )
        sleep(1.0)
    note.unlink(missing_ok=True)
    text = f"{run_id}: not cancelled: no supervisor on this machine, and no store: {error}"
    raise PerdureError(text) from error


def _take_note(home: Path, run_id: str) -> bool:
    """Whether there is a request on this machine; it is taken only once."""
    try:
        _note_path(home, run_id).unlink()
    except OSError:
        return False
    return True


def forget_cancel(home: Path, run_id: str) -> None:
    """Remove a request that nobody has taken: it was meant for a supervisor before."""
    _take_note(home, run_id)


def _note_path(home: Path, run_id: str) -> Path:
    return job_path(home, run_id).with_name(_NOTE)
