"""Preparations of every rank's process: patience with the store, and stacks on request."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path
from typing import IO

from perdure.storage.errors import StorageError
from perdure.storage.retry import Retry
from perdure.training.liveness.heartbeat import HeartbeatWriter, stacks_file
from perdure.training.processes import MARKER
from perdure.training.runtime.context import WorkerContext
from perdure.training.wire.store_wait import StoreWaitNote


def store_patience(context: WorkerContext, heartbeat: HeartbeatWriter) -> Retry:
    """Have a rank sit out an outage of the store, and say that it does: it does not hang."""
    note = StoreWaitNote(Path(os.environ.get(MARKER, ".")), f"rank-{context.rank}")

    def failed(error: StorageError, lasted_s: float) -> None:
        heartbeat.beat()
        if MARKER in os.environ:
            note.failed(error, lasted_s)

    return Retry.patient(on_failure=failed, on_success=note.passed)


def print_stacks_on_request(context: WorkerContext) -> IO[str]:
    """Have SIGUSR2 print the stacks of all threads, even while one of them holds the lock."""
    path = stacks_file(context.heartbeat_path.parent, context.local_rank)
    file = path.open("a", encoding="utf-8")
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
    return file
