"""The launcher of session programs on one node: its fork server, and the coordinator's process.

The fork server outlives attempts, so that only the first attempt waits for imports. Times are
seconds.
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from perdure.training.agent.coordinator_client import address_file
from perdure.training.agent.fork_server import Fork, ForkedProcess, ForkServer, start_alone
from perdure.training.config.job import RESERVED_NAMES
from perdure.training.files import last_line, write_whole
from perdure.training.journal import attempt_log
from perdure.training.liveness.culprit import STOPPED
from perdure.training.processes import process_state
from perdure.training.wire.agent import RendezvousOrder
from perdure.training.wire.agent_status import CoordinatorEnd
from perdure.training.wire.coordinator import CoordinatorAddress, CoordinatorConfig

_log = logging.getLogger("perdure.agent")

Key = tuple[int, int]  # placement and attempt
START_TIMEOUT_S = 30.0
_CONFIG_FILE = "coordinator-config.json"
# In the agent's environment: workers start as plain processes, for programs whose libraries do
# not survive a fork. Each then waits for its imports.
COLD_START = "PERDURE_COLD_START"


@dataclass(slots=True)
class _CoordinatorProcess:
    """The coordinator of an attempt, as the agent that starts it sees it."""

    process: ForkedProcess
    address: CoordinatorAddress
    log: Path
    _stopped_s: float | None = None  # since when a signal has stopped it
    _why_ended: str = ""

    @classmethod
    def start(
        cls,
        fork_server: ForkServer,
        config: CoordinatorConfig,
        folder: Path,
        environment: dict[str, str],
    ) -> _CoordinatorProcess:
        """Start a coordinator and wait until it listens.

        Raises:
            OSError: it did not.
        """
        config_file, address_file = folder / _CONFIG_FILE, Path(config.address_file)
        address_file.unlink(missing_ok=True)
        write_whole(config_file, config.model_dump_json(), private=True)
        log = folder / "coordinator.log"
        process = fork_server.fork(
            Fork(
                function="perdure.training.coordinator.server:main",
                name="coordinator",
                arguments=(str(config_file),),
                environment=environment,
                cwd=str(folder),
                stdout=str(log),
                stderr=str(log),
            )
        )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not address_file.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                process.kill()
                raise OSError(f"the coordinator did not start: {last_line(log)}")
            time.sleep(0.005)
        text = address_file.read_text(encoding="utf-8")
        return cls(process, CoordinatorAddress.model_validate_json(text), log)

    def end_if_stopped(self, limit_s: float, *, now_s: float) -> None:
        """Kill it when a signal has stopped it for too long.

        Ranks that wait for it write heartbeats all the while: none of them ever looks silent.
        """
        if process_state(self.process.pid) not in STOPPED:
            self._stopped_s = None
            return
        self._stopped_s = self._stopped_s if self._stopped_s is not None else now_s
        if now_s - self._stopped_s > limit_s:
            self._why_ended = f"a signal had stopped it for {now_s - self._stopped_s:.0f} s"
            self.process.kill()

    def end(self) -> CoordinatorEnd | None:
        """Report how it ended by itself, None while it lives."""
        exit_code = self.process.poll()
        if exit_code is None:
            return None
        line = self._why_ended or last_line(self.log)
        return CoordinatorEnd(
            exit_code=exit_code, ended_s=time.time(), line=line, was_stopped=bool(self._why_ended)
        )

    def close(self) -> None:
        """Kill it: the attempt is over."""
        self.process.kill()


class Launcher:
    """Launcher of session programs on one node.

    Args:
        folder: the container's folder.
        host: address that the coordinator binds.
    """

    def __init__(self, folder: Path, host: str) -> None:
        self._folder = folder
        self._host = host
        self._lock = threading.RLock()
        self._fork_server: ForkServer | None = None
        self._is_warm = False
        self._coordinator: tuple[Key, _CoordinatorProcess] | None = None

    @property
    def pids(self) -> frozenset[int]:
        """Processes that outlive the workers."""
        fork_server = self._fork_server.pids if self._fork_server is not None else frozenset()
        coordinator = {self._coordinator[1].process.pid} if self._coordinator is not None else ()
        return fork_server | frozenset(coordinator)

    @property
    def is_warm(self) -> bool:
        """Whether a fork server has imported everything."""
        return self._is_warm

    def warm(self, variables: Mapping[str, str]) -> None:
        """Begin to start the fork server before an attempt needs it: its imports take seconds."""
        threading.Thread(target=self._warm, args=(variables,), daemon=True).start()

    def _warm(self, variables: Mapping[str, str]) -> None:
        try:
            self.prepare(variables)
        except OSError as error:  # the attempt that needs it tries again, and fails
            _log.warning(str(error))

    def prepare(self, variables: Mapping[str, str]) -> ForkServer:
        """Start a fork server for programs with these variables; the first takes seconds.

        Raises:
            OSError: it does not start.
        """
        environment = _inherit(os.environ, variables)
        with self._lock:
            if self._fork_server is not None and self._fork_server.serves(environment):
                return self._fork_server
            self._is_warm = False
            if self._fork_server is not None:
                self._fork_server.close()
            self._fork_server = ForkServer(environment, self._folder / "fork-server.log")
            self._fork_server.start()
            self._is_warm = True
            return self._fork_server

    def fork(self, wanted: Fork) -> ForkedProcess | subprocess.Popen[bytes]:
        """Fork a process from the fork server, or start an interpreter with `COLD_START`.

        Raises:
            OSError: there is no fork server.
        """
        if os.environ.get(COLD_START):
            return start_alone(wanted)
        if self._fork_server is None:
            raise OSError("no fork server was prepared")
        return self._fork_server.fork(wanted)

    def open_coordinator(self, order: RendezvousOrder, attempt_folder: Path) -> CoordinatorAddress:
        """Start the coordinator of an attempt, once.

        Raises:
            OSError: it does not start.
        """
        with self._lock:  # an order may be repeated while the first is carried out
            return self._open_coordinator(order, attempt_folder)

    def _open_coordinator(self, order: RendezvousOrder, attempt_folder: Path) -> CoordinatorAddress:
        key = (order.start.placement, order.start.attempt)
        if self._coordinator is not None and self._coordinator[0] == key:
            return self._coordinator[1].address
        self.close_coordinator()
        fork_server = self.prepare(order.start.variables)
        attempt_folder.mkdir(parents=True, exist_ok=True)
        config = CoordinatorConfig(
            job=order.start.job,
            host=self._host,
            store_port=order.port,
            token=secrets.token_hex(16),
            placement=order.start.placement,
            attempt=order.start.attempt,
            live_file=str(attempt_folder / attempt_log.FILE_NAME),
            address_file=str(address_file(attempt_folder)),
            supported=order.supported,
            past=order.start.past,
            resumes=order.resumes,
        )
        environment = _inherit(os.environ, order.start.variables)
        process = _CoordinatorProcess.start(fork_server, config, attempt_folder, environment)
        self._coordinator = (key, process)
        return process.address

    def coordinator_end(self) -> CoordinatorEnd | None:
        """Report how the coordinator ended by itself; None while it lives, and without one."""
        return self._coordinator[1].end() if self._coordinator is not None else None

    def end_stopped_coordinator(self, limit_s: float, *, now_s: float) -> None:
        """Kill the coordinator if a signal has stopped it for longer than this."""
        if self._coordinator is not None:
            self._coordinator[1].end_if_stopped(limit_s, now_s=now_s)

    def close_coordinator(self) -> None:
        """Kill the coordinator, if there is one: the attempt is over."""
        if self._coordinator is not None:
            self._coordinator[1].close()
            self._coordinator = None

    def close(self) -> None:
        """End fork server and coordinator."""
        self.close_coordinator()
        if self._fork_server is not None:
            self._fork_server.close()


def _inherit(environment: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    # The supervisor may itself run as a rank of another program.
    inherited = {k: v for k, v in environment.items() if k not in RESERVED_NAMES}
    return {**inherited, **variables}
