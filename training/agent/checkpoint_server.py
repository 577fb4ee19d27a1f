"""The checkpoint server of a node as a process.

`python -m perdure.training.agent.checkpoint_server JOB SOCKET HOST [DISK_FOLDER]`

It is a child of the agent and apart from it, so that hashing and uploading starve neither
heartbeats nor training. When its agent closes its pipe, or ends, it publishes the saves that it
has, then ends. SIGTERM is not for it: at the end of an allocation every process gets one, and the
ranks are yet to save. Times are seconds.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from perdure.storage.address import open_store
from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.checkpoint_server.publish import Publisher
from perdure.storage.checkpoint_server.server import CheckpointServer, Copying
from perdure.storage.frozen_model import FrozenModel
from perdure.storage.local import LocalStore
from perdure.storage.retention import Retention, apply_retention
from perdure.storage.retry import Retry
from perdure.storage.share import SaveId
from perdure.training.config.job import Job
from perdure.training.files import write_whole
from perdure.training.injection.inside import checkpoint_server_faults
from perdure.training.journal.attempt_log import AttemptLog
from perdure.training.journal.events import CheckpointCommitted
from perdure.training.log import start_logging
from perdure.training.wire.store_wait import StoreWaitNote

_log = logging.getLogger("perdure.agent")

CLOSE_TIMEOUT_S = 900.0  # the longest grace period of a container
HASTE_S = 1.0  # between two tries once it is to end
FIRST_CONTAINER_ENV = "PERDURE_FIRST_CONTAINER"  # set by agents; empty but on the first node
HELD_FILE = "held.json"
REVIVED_AFTER_S = 5.0  # a server that dies sooner is not started again


def main() -> None:
    """Serve one node's checkpoints as long as the agent lives, then end."""
    serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an upload that hangs would be waited for at the interpreter's exit


def serve() -> None:
    """Serve one node's checkpoints until the agent's end of the pipe closes."""
    # Blocked before there are threads: without an agent it is waited for by name.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    start_logging()
    job = Job.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    disk = CheckpointStore(LocalStore(Path(sys.argv[4])), job.run_id) if sys.argv[4:] else None
    ending, note = threading.Event(), StoreWaitNote(Path.cwd(), "checkpoint-server")
    # Only the save after next waits for the checkpoint server: it can sit out an outage.
    retry = Retry.patient(
        sleep=partial(_pause, ending), on_failure=note.failed, on_success=note.passed
    )
    first = os.environ.get(FIRST_CONTAINER_ENV)
    store = CheckpointStore(
        open_store(job.storage, retry=retry),
        job.run_id,
        first_container=int(first) if first else None,
    )
    publisher = Publisher(
        store,
        disk=disk,
        retain=partial(_retain, store, job.checkpoint.retention()),
        announce=log_commit,
        reached=checkpoint_server_faults(),
    )
    spec = job.checkpoint
    checkpoint_server = CheckpointServer(
        sys.argv[2],
        publisher=publisher,
        store=store,
        disk=disk,
        note=partial(_write_inventory, Path.cwd()),
        copying=Copying(sys.argv[3], spec.copy_bytes_per_s) if spec.partner_copies else None,
    )
    threading.Thread(target=checkpoint_server.serve, daemon=True).start()
    _log.info("checkpoint server is ready")
    _await_end()
    ending.set()
    checkpoint_server.close(CLOSE_TIMEOUT_S)


def _pause(ending: threading.Event, pause_s: float) -> None:
    """Wait before another try; what is left at the end is tried more often, for little time."""
    if ending.wait(pause_s):
        time.sleep(min(HASTE_S, pause_s))


def _await_end() -> None:
    """Wait until the agent's end of the pipe closes, however it died."""
    if FIRST_CONTAINER_ENV in os.environ:  # an agent has started it
        while os.read(0, 1):
            pass
    else:
        signal.sigwait({signal.SIGTERM})


def _retain(store: CheckpointStore, retention: Retention, step: int) -> None:
    apply_retention(store, retention, protect={step})


def log_commit(log: Path, step: int) -> None:
    """Record a commit in the log of an attempt.

    Args:
        log: file of the attempt log.
        step: step of the checkpoint.

    Raises:
        OSError: the log cannot be written.
    """
    with AttemptLog(log) as attempt_log:
        attempt_log.append(CheckpointCommitted(step=step))


class MemoryInventory(FrozenModel):
    """The shares in a checkpoint server's memory, as a file in its container's folder.

    Attributes:
        process_started_s: start of the server, which tells processes with the same pid apart.
        saves: save and rank of every whole share.
    """

    pid: int
    process_started_s: float
    saves: tuple[tuple[SaveId, int], ...]


def _write_inventory(folder: Path, saves: Sequence[tuple[SaveId, int]]) -> None:
    started_s = psutil.Process().create_time()
    inventory = MemoryInventory(pid=os.getpid(), process_started_s=started_s, saves=tuple(saves))
    write_whole(folder / HELD_FILE, inventory.model_dump_json())


@dataclass(slots=True)
class CheckpointServerProcess:
    """The checkpoint server of a container, as its agent sees it.

    Attributes:
        folder: the container's folder.
        host: address that it listens on, where nodes have copies of each other's saves.
        name: name of its socket.
    """

    folder: Path
    host: str = "127.0.0.1"
    name: str = ""
    _process: subprocess.Popen[bytes] | None = None
    _command: tuple[str, ...] = ()
    _first_container: str = ""
    _started_s: float = 0.0

    def ensure(
        self, job: Job, job_file: Path, disk: Path | None, *, first_container: int | None
    ) -> str:
        """Start the server unless it lives. Returns the name of its socket.

        Args:
            job: job whose checkpoints it serves.
            job_file: file with that job.
            disk: folder of the disk tier; None: there is none.
            first_container: MA_SCHEDULE_CNT where this is the first node's container, else None.

        Raises:
            OSError: it cannot be started.
        """
        if self._process is not None and self._process.poll() is None:
            return self.name
        self.name = f"perdure-{job.run_id}-{uuid.uuid4().hex}"[-100:]
        command = (
            sys.executable,
            "-m",
            "perdure.training.agent.checkpoint_server",
            str(job_file),
            self.name,
            self.host,
        )
        self._command = (*command, str(disk)) if disk is not None else command
        self._first_container = str(first_container) if first_container is not None else ""
        self._start()
        return self.name

    def revive(self, *, now_s: float) -> bool:
        """Start a dead server again, under its name. Returns whether it did.

        Workers that connect again after a recovery would wait in vain. A server that dies at once
        is not started again for a while.
        """
        if self._process is None or self._process.poll() is None:
            return False
        if now_s - self._started_s < REVIVED_AFTER_S:
            return False
        try:
            self._start()
        except OSError as error:
            _log.error(f"the checkpoint server cannot be started again: {error}")
            return False
        return True

    def _start(self) -> None:
        self._close_pipe()
        self._started_s = time.monotonic()
        with (self.folder / "checkpoint-server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self.folder,
                env={**os.environ, FIRST_CONTAINER_ENV: self._first_container},
                stdin=subprocess.PIPE,  # closes when the agent dies
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pids(self) -> frozenset[int]:
        """Pid of the process, empty when there is none."""
        return frozenset({self._process.pid}) if self._process is not None else frozenset()

    def close(self, grace_s: float) -> None:
        """Let it publish its saves, for as long as the container may live, and end it."""
        if self._process is None or self._process.poll() is not None:
            return
        self._close_pipe()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _close_pipe(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()


if __name__ == "__main__":
    main()
