"""Waits of a run's processes: for its store, a free node, a person, a server, a supervisor.

A process that waits for the store says so in a file of its container's folder, which the agent
reports; a supervisor, and a process that is to be one, say so on their machine. Times are seconds
since the epoch.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import psutil
from pydantic import ValidationError

from perdure.storage.errors import StorageError
from perdure.training.files import write_whole
from perdure.training.journal.waits import Wait, WaitKind

_NOTES = "store-wait-*.json"


class Waiter(StrEnum):
    """The process on a run's machine that waits."""

    SUPERVISOR = "supervisor"
    STARTER = "starter"  # has not taken the run yet


class _ProcessNote(Wait):
    pid: int


@dataclass(slots=True)
class StoreWaitNote:
    """The note of a process that waits for the store; safe for several threads.

    Attributes:
        folder: the container's.
        name: of the process, in the note's file name.
        clock: wall time.
    """

    folder: Path
    name: str
    clock: Callable[[], float] = time.time
    _since_s: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def failed(self, error: StorageError, lasted_s: float) -> None:
        """Note that a request failed, and is sent again.

        Args:
            error: the store's last answer.
            lasted_s: time since the request was first sent.
        """
        with self._lock, suppress(OSError):  # the wait matters, not its note
            self._since_s = self._since_s or self.clock() - lasted_s
            note = _ProcessNote(
                kind=WaitKind.STORE, since_s=self._since_s, why=str(error), pid=os.getpid()
            )
            write_whole(self._path, note.model_dump_json(), private=True)

    def passed(self) -> None:
        """Note that the store answers again."""
        with self._lock, suppress(OSError):
            self._since_s = None
            self._path.unlink(missing_ok=True)

    @property
    def _path(self) -> Path:
        return self.folder / _NOTES.replace("*", self.name)


def read_store_wait(folder: Path) -> Wait | None:
    """Read the longest wait for the store of a container's processes; None: none waits."""
    waits = [wait for path in folder.glob(_NOTES) if (wait := _read_process_note(path)) is not None]
    return min(waits, key=lambda wait: wait.since_s, default=None)


def _read_process_note(path: Path) -> Wait | None:
    try:
        note = _ProcessNote.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None
    if not psutil.pid_exists(note.pid):  # killed while it waited
        return None
    return Wait(kind=note.kind, since_s=note.since_s, why=note.why)


def write_wait(run_folder: Path, wait: Wait | None, *, by: Waiter = Waiter.SUPERVISOR) -> None:
    """Note on this machine what this process waits for; None: for nothing."""
    path = _run_note(run_folder, by)
    with suppress(OSError):  # its disk may be full, or the run new
        if wait is None:
            path.unlink(missing_ok=True)
        else:
            note = _ProcessNote(**wait.model_dump(), pid=os.getpid())
            write_whole(path, note.model_dump_json(), private=True)


def read_wait(run_folder: Path, *, by: Waiter = Waiter.SUPERVISOR) -> Wait | None:
    """Read what a living process of this machine waits for."""
    return _read_process_note(_run_note(run_folder, by))


def _run_note(run_folder: Path, by: Waiter) -> Path:
    return run_folder / f"waits-{by}.json"
