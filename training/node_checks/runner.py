"""The start and the end of the program that checks a node. Times are seconds."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping

from pydantic import ValidationError

from perdure.storage.address import has_store
from perdure.training.config.job import Job
from perdure.training.environment import interface_variables, variables_of
from perdure.training.files import home_folder
from perdure.training.processes import free_port
from perdure.training.telemetry.vendor_tools import end_session
from perdure.training.wire.node import CHECKS, Check, CheckOutcome, NodeTask

_MAX_RANKS = 4
LOOPBACK = "127.0.0.1"
_NODE_PROGRAM = "perdure.training.node_checks.program"


class NodeProgram:
    """The program on this machine, a single process: a new task ends the earlier task."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, task: NodeTask, environment: Mapping[str, str]) -> tuple[Check, ...]:
        """Run a task; the lack of a result in time is a failed check, too."""
        self.end()
        try:
            process = self._start(environment)
        except OSError as error:
            return (_failed_check(task, f"the program does not start: {error}"),)
        try:
            out, _ = process.communicate(task.model_dump_json().encode(), task.timeout_s)
            return CHECKS.validate_json(out)
        except subprocess.TimeoutExpired:
            reason = f"no answer within {task.timeout_s:g} s"
        except ValidationError:
            code = process.returncode
            reason = f"the program ended with exit code {code} and no result"
        finally:
            end_session(process)
        return (_failed_check(task, reason),)

    def end(self) -> None:
        """End the running program; its caller gets a failed check."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None and process.poll() is None:
            end_session(process)

    def _start(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with self._lock:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _NODE_PROGRAM],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            return self._process


def _failed_check(task: NodeTask, reason: str) -> Check:
    return Check(name="node", node=task.node, outcome=CheckOutcome.FAILED, seen=reason)


def check_this_machine(
    job: Job, *, state_bytes: int | None, environment: Mapping[str, str]
) -> tuple[Check, ...]:
    """Check this machine as a node of the job, with the gang as processes of it.

    Args:
        job: at most _MAX_RANKS of its ranks are started.
        state_bytes: model and optimizer state of the whole job; None where it is unknown.
        environment: variables of the processes, with the keys of the store.
    """
    ranks = min(job.engine.world_size, _MAX_RANKS)
    is_new = not has_store(job.storage)
    variables, local = variables_of(job), interface_variables(LOOPBACK)
    with tempfile.TemporaryDirectory(prefix="perdure-preflight-") as folder:
        task = NodeTask(
            job=job,
            node=socket.gethostname(),
            folder=folder,
            # The local engine's containers lie in this folder, and nothing else is checked there.
            node_folder=str(home_folder() / "runs") if job.engine.on_this_machine else None,
            slots=ranks,
            first_rank=0,
            world_size=ranks,
            state_bytes=state_bytes,
            is_new=True,
            gang_host=LOOPBACK if job.preflight.gang else None,
            gang_port=free_port(),
            timeout_s=job.preflight.limit_s,
            with_store=job.storage.credentials_block is None and not is_new,
        )
        checks = NodeProgram().run(task, {**local, **environment, **variables})
    if not is_new:
        return checks
    text = f"none is in {job.storage.folder} yet; the first run makes it"
    return (*checks, Check(name="store", outcome=CheckOutcome.SKIPPED, seen=text))
