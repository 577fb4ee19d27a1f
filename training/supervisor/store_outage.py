"""An outage of a run's store, as its supervisor sees it through.

A supervisor can do nothing without the ledger, and nothing is lost while it waits: the processes
train on. So it repeats a failed request until the store is back, however long that takes, and says
since when it waits: in its log, and in a note on this machine that `perdure status` reads. Times
are seconds since the epoch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from perdure.storage.errors import StorageError, StorageFull, TransientError
from perdure.storage.frozen_model import FrozenModel
from perdure.storage.retry import Retry
from perdure.training.files import write_whole
from perdure.training.journal.ledger import Ledger
from perdure.training.journal.waits import Wait, WaitKind
from perdure.training.supervisor.job_registry import job_path

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]

LONGEST_PAUSE_S = 5.0  # a store that is back is noticed so soon
FOR_EVER = 10**9


class Outage(FrozenModel):
    """A time in which the store cannot be used.

    Attributes:
        since_s: when a request first failed.
        why: the newest error.
    """

    since_s: float
    why: str

    @property
    def since(self) -> str:
        """For people."""
        return f"{datetime.fromtimestamp(self.since_s, UTC):%Y-%m-%d %H:%M:%S} UTC"

    @property
    def wait(self) -> Wait:
        """The wait of the run that it is."""
        return Wait(kind=WaitKind.STORE, since_s=self.since_s, why=self.why)


class StoreOutage:
    """Waits for the store of one run, and shows that it does; safe for several threads.

    Args:
        home: Perdure's folder on this machine.
        run_id: whose supervisor waits.
        log: gets a line when an outage begins, and another when it is over.
        clock: wall time.

    Attributes:
        on_change: called when an outage begins, with each of its errors, and with None when it is
            over; by any thread.
        meanwhile: called before each pause, by the thread that waits.
    """

    def __init__(
        self, home: Path, run_id: str, log: Log, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._path = _note_path(home, run_id)
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._outage: Outage | None = None
        self._error: StorageError | None = None
        self._gives_up = threading.Event()
        self.on_change: Callable[[Wait | None], None] = lambda _wait: None
        self.meanwhile: Callable[[], None] = lambda: None

    def retry(self) -> Retry:
        """Return how the supervisor's store repeats a failed request."""
        return Retry(
            max_tries=FOR_EVER,
            cap_s=LONGEST_PAUSE_S,
            give_up_after_s=float("inf"),
            sleep=self._sleep,
            passing=(TransientError, StorageFull),
            on_failure=self.failed,
            on_success=self.passed,
        )

    def failed(self, error: StorageError, lasted_s: float = 0.0) -> None:
        """Note that the store could not be used.

        Args:
            error: its last answer.
            lasted_s: time since the request was first sent.
        """
        with self._lock:
            began = self._outage is None
            now_s = self._clock() - lasted_s
            since_s = now_s if self._outage is None else self._outage.since_s
            self._error, self._outage = error, Outage(since_s=since_s, why=str(error))
            with suppress(OSError):  # its disk may be the one that is full
                write_whole(self._path, self._outage.model_dump_json(), private=True)
        if began:
            self._log.warning("the run's store cannot be used, waiting for it: %s", error)
        self.on_change(self.wait)

    def passed(self) -> None:
        """Note that the store can be used."""
        with self._lock:
            past, self._outage = self._outage, None
            if past is None:
                return
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
        lasted_s = self._clock() - past.since_s
        self.on_change(None)
        self._log.info("the run's store can be used again, after %.0f s", lasted_s)

    def give_up(self) -> None:
        """Wait no more: this supervisor ends. Every request is tried once from now on."""
        self._gives_up.set()

    @property
    def wait(self) -> Wait | None:
        """The wait for the store; None: it can be used."""
        return self._outage.wait if self._outage is not None else None

    def _sleep(self, seconds: float) -> None:
        self.meanwhile()
        if self._gives_up.wait(seconds):
            raise self._error or StorageError("the store cannot be used")


def read_outage(home: Path, run_id: str) -> Outage | None:
    """Read the note of a supervisor of this machine; None: there is no outage."""
    try:
        return Outage.model_validate_json(_note_path(home, run_id).read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None


def unwritable(ledger: Ledger, home: Path, *, now_s: float) -> dict[str, Any] | None:
    """Find since when the ledger of a run that goes on cannot be written, and why; None: it can.

    Args:
        ledger: the run's, read without waiting.
        home: Perdure's folder on this machine.
        now_s: wall time.

    Raises:
        StorageError: it cannot be read, either.
    """
    lease = ledger.lease()  # given up when the run ends
    if lease is None:
        return None
    outage = read_outage(home, ledger.run_id)
    if outage is not None and outage.since_s > lease.renewed_s:
        return outage.model_dump()
    # Its supervisor runs elsewhere, or where no note can be written, and renews in vain.
    if now_s - lease.renewed_s > lease.lease_s and ledger.is_supervised():
        why = f"process {lease.pid} on {lease.host} lives and has not renewed its lease since"
        return Outage(since_s=lease.renewed_s, why=why).model_dump()
    return None


def forget_outage(home: Path, run_id: str) -> None:
    """Remove the note of the previous supervisor, once the ledger was written."""
    with suppress(OSError):
        _note_path(home, run_id).unlink(missing_ok=True)


def _note_path(home: Path, run_id: str) -> Path:
    return job_path(home, run_id).with_name("store-outage.json")
