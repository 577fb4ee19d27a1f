"""Background tasks of a checkpoint server: which are unfinished, and which failed for whom.

Times are seconds.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from perdure.storage.checkpoint_server.protocol import Failure
from perdure.storage.errors import StaleAttempt, StorageError

_log = logging.getLogger("perdure.storage")

Owner = tuple[int, int]  # placement and attempt


class Tasks:
    """Work in thread pools; each failure is reported once, to its attempt."""

    def __init__(self) -> None:
        self._open: list[tuple[ThreadPoolExecutor, Future[None]]] = []
        self._failures: dict[Owner, Failure] = {}
        self._lock = threading.Lock()

    def begin(self, pool: ThreadPoolExecutor, work: Callable[[], None], *, owner: Owner) -> None:
        """Have a pool do something for an attempt."""
        future = pool.submit(self._guarded, work, owner)
        with self._lock:
            unfinished = [task for task in self._open if not task[1].done()]
            self._open = [*unfinished, (pool, future)]

    def take_failure(self, owner: Owner | None) -> Failure | None:
        """Take the newest failure since the last call, of an attempt or, with None, of any."""
        with self._lock:
            owners = [reporter for reporter in self._failures if owner is None or reporter == owner]
            newest = self._failures[max(owners)] if owners else None
            # Failures of attempts before it have no reader any more.
            self._failures = {
                reporter: failure
                for reporter, failure in self._failures.items()
                if owner is not None and reporter > owner
            }
            return newest

    def wait(
        self, timeout_s: float, *, pools: Collection[ThreadPoolExecutor] | None = None
    ) -> bool:
        """Wait until nothing is left to do; one task may begin another.

        Args:
            timeout_s: give up after it.
            pools: pools that run the tasks; None: all.

        Returns:
            Whether nothing is left.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                open_ = [f for pool, f in self._open if pools is None or pool in pools]
            waiting = [future for future in open_ if not future.done()]
            if not waiting:
                return True
            with suppress(TimeoutError):
                waiting[0].result(timeout=max(0.0, deadline_s - time.monotonic()))
            if time.monotonic() >= deadline_s:
                return False

    def _guarded(self, work: Callable[[], None], owner: Owner) -> None:
        try:
            work()
        except StaleAttempt as exc:
            _log.info(str(exc))  # ours was superseded: as it should be
        except StorageError as exc:
            _log.error(f"{type(exc).__name__}: {exc}")
            self._note(owner, type(exc).__name__, str(exc))
        except Exception as exc:  # noqa: BLE001 or the save would be lost without a report
            traceback.print_exc()
            self._note(owner, "StorageError", f"the checkpoint server: {exc!r}")

    def _note(self, owner: Owner, kind: str, text: str) -> None:
        with self._lock:
            self._failures[owner] = Failure(kind=kind, text=text)
