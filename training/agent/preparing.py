"""The preparation of data on a node, by a command, before the program starts.

The command runs in a thread's care: the agent goes on answering, and a supervisor that comes later
finds it running. Times are seconds.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from pathlib import Path

from perdure.training.agent.worker_output import tail
from perdure.training.commands.arguments import fill_in
from perdure.training.commands.prepared import Preparation
from perdure.training.environment import worker_path
from perdure.training.processes import MARKER
from perdure.training.wire.agent import AgentConfig
from perdure.training.wire.preparation import PrepareOrder, PrepareReply

_log = logging.getLogger("perdure.agent")

TAIL_BYTES = 64 * 1024
LINE_BYTES = 1024
NOT_STARTED = 127  # as a shell has it: the program cannot be executed


class NodePreparation:
    """The preparation on one container's node.

    Args:
        folder: the container's folder.
        marker: mark of its processes, in their environment.
    """

    def __init__(self, folder: Path, marker: str) -> None:
        self._folder = folder / "prepare"
        self._marker = marker
        self._lock = threading.Lock()
        self._work: _Work | None = None

    def prepare(self, order: PrepareOrder, config: AgentConfig) -> PrepareReply:
        """Prepare, unless that is done, under way, or was tried with this number."""
        try:
            variables = _variables(order, config, self._marker)
            preparation = _preparation(order, variables)
            if not order.starts:
                why = preparation.why_not()
                return PrepareReply(is_prepared=why is None, why=why or "")
            with self._lock:
                work = self._work
                if work is None or not (work.is_running or work.number == order.number):
                    path = self._folder / f"{order.number:08d}.log"
                    command = fill_in(order.command, variables)
                    work = self._work = _Work(order, path, preparation, command, variables)
                    threading.Thread(target=work.run, daemon=True).start()
        except (OSError, ValueError) as error:
            return _not_started(error)
        return work.reply()


class _Work:
    """One run of the command, if its outputs are not there."""

    def __init__(
        self,
        order: PrepareOrder,
        path: Path,
        preparation: Preparation,
        command: list[str],
        variables: dict[str, str],
    ) -> None:
        self.number = order.number
        self._cwd = order.cwd
        self._path = path
        self._preparation = preparation
        self._command = command
        self._variables = variables
        self._began_s = time.monotonic()
        self._end: PrepareReply | None = None

    @property
    def is_running(self) -> bool:
        """Whether the command, or a look at its files, is under way."""
        return self._end is None

    def reply(self) -> PrepareReply:
        """Return how far it is."""
        if self._end is not None:
            return self._end
        seconds = time.monotonic() - self._began_s
        lines = tail(self._path, LINE_BYTES).splitlines() if self._path.exists() else []
        line = lines[-1] if lines else ""
        return PrepareReply(is_running=True, last_line=line, seconds=seconds)

    def run(self) -> None:
        """Carry it out to its end."""
        try:
            why = self._preparation.why_not()
            self._end = PrepareReply(is_prepared=True) if why is None else self._prepare(why)
        except OSError as error:
            self._end = _not_started(error)

    def _prepare(self, why: str) -> PrepareReply:
        _log.info("data is prepared: %s", why)
        fingerprint = self._preparation.fingerprint()
        self._preparation.begin()
        exit_code = self._await_command()
        problem = self._preparation.complete(fingerprint) if exit_code == 0 else None
        text = tail(self._path, TAIL_BYTES)
        return PrepareReply(
            is_prepared=exit_code == 0 and problem is None,
            why=problem or "",
            exit_code=exit_code if problem is None else 1,
            tail=f"{text}{problem}\n" if problem else text,
            log_path=str(self._path),
            seconds=time.monotonic() - self._began_s,
        )

    def _await_command(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("wb") as output:
            process = subprocess.Popen(
                self._command,
                cwd=self._cwd,
                env=self._variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return process.wait()


def _not_started(error: Exception) -> PrepareReply:
    if isinstance(error, ValueError | FileNotFoundError | NotADirectoryError | PermissionError):
        return PrepareReply(why=str(error), exit_code=NOT_STARTED, tail=f"{error}\n")
    return PrepareReply(exit_code=1, tail=f"OSError: {error}\n")  # a disk, which may recover


def _variables(order: PrepareOrder, config: AgentConfig, marker: str) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": worker_path(),
        **order.variables,
        "PERDURE_RUN_ID": config.run_id,
        "PERDURE_NODE": config.node,
        MARKER: marker,
    }


def _preparation(order: PrepareOrder, variables: dict[str, str]) -> Preparation:
    command, inputs, outputs = (
        fill_in(parts, variables) for parts in (order.command, order.inputs, order.outputs)
    )
    return Preparation(command, inputs, outputs, Path(order.cwd))
