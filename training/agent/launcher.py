"""What an agent starts processes with: the fork server of its container, and the coordinator.

The fork server outlives attempts, so that only the first one waits for imports. Times are seconds.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path

from perdure.training.agent.coordinator_client import CoordinatorProcess, address_file, new_token
from perdure.training.agent.fork_server import Fork, ForkedProcess, ForkServer, start_alone
from perdure.training.config.job import RESERVED_NAMES
from perdure.training.journal import attempt_log
from perdure.training.wire.agent import RendezvousOrder
from perdure.training.wire.agent_status import CoordinatorEnd
from perdure.training.wire.coordinator import CoordinatorAddress, CoordinatorConfig

_log = logging.getLogger("perdure.agent")

Key = tuple[int, int]  # placement and attempt
# In the agent's environment: workers start as plain processes, for programs whose libraries do
# not survive a fork. Each then waits for its imports.
COLD_START = "PERDURE_COLD_START"


class Launcher:
    """Starts session programs on one node.

    Args:
        folder: the container's.
        host: address that the coordinator binds.
    """

    def __init__(self, folder: Path, host: str) -> None:
        self._folder = folder
        self._host = host
        self._lock = threading.RLock()
        self._fork_server: ForkServer | None = None
        self._is_warm = False
        self._coordinator: tuple[Key, CoordinatorProcess] | None = None

    @property
    def pids(self) -> frozenset[int]:
        """Of processes that are not an attempt's own."""
        fork_server = self._fork_server.pids if self._fork_server is not None else frozenset()
        coordinator = {self._coordinator[1].process.pid} if self._coordinator is not None else ()
        return fork_server | frozenset(coordinator)

    @property
    def is_warm(self) -> bool:
        """Whether a fork server stands that has imported everything."""
        return self._is_warm

    def warm(self, variables: Mapping[str, str]) -> None:
        """Begin with the fork server before an attempt needs it: its imports take seconds."""
        threading.Thread(target=self._warm, args=(variables,), daemon=True).start()

    def _warm(self, variables: Mapping[str, str]) -> None:
        try:
            self.prepare(variables)
        except OSError as error:  # the attempt that needs it tries again, and fails
            _log.warning(str(error))

    def prepare(self, job_variables: Mapping[str, str]) -> None:
        """Have a fork server for the programs of an attempt; takes seconds the first time.

        Args:
            job_variables: added to the environment of the programs.

        Raises:
            OSError: it does not start.
        """
        variables = _variables(os.environ, job_variables)
        with self._lock:
            if self._fork_server is not None and self._fork_server.serves(variables):
                return
            self._is_warm = False
            if self._fork_server is not None:
                self._fork_server.close()
            self._fork_server = ForkServer(variables, self._folder / "fork-server.log")
            self._fork_server.start()
            self._is_warm = True

    def fork(self, wanted: Fork) -> ForkedProcess | subprocess.Popen[bytes]:
        """A process from the fork server, or an interpreter of its own with `COLD_START`.

        Raises:
            OSError: there is none.
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
        with self._lock:  # an order may be repeated while the first one is at it
            return self._open_coordinator(order, attempt_folder)

    def _open_coordinator(self, order: RendezvousOrder, attempt_folder: Path) -> CoordinatorAddress:
        key = (order.start.placement, order.start.attempt)
        if self._coordinator is not None and self._coordinator[0] == key:
            return self._coordinator[1].address
        self.close_coordinator()
        self.prepare(order.start.variables)
        assert self._fork_server is not None  # noqa: S101 just prepared
        attempt_folder.mkdir(parents=True, exist_ok=True)
        config = CoordinatorConfig(
            job=order.start.job,
            host=self._host,
            store_port=order.port,
            token=new_token(),
            placement=order.start.placement,
            attempt=order.start.attempt,
            live_file=str(attempt_folder / attempt_log.FILE_NAME),
            address_file=str(address_file(attempt_folder)),
            supported=order.supported,
            past=order.start.past,
            resumes=order.resumes,
        )
        variables = _variables(os.environ, order.start.variables)
        process = CoordinatorProcess.start(self._fork_server, config, attempt_folder, variables)
        self._coordinator = (key, process)
        return process.address

    def coordinator_end(self) -> CoordinatorEnd | None:
        """How the coordinator ended by itself; None while it lives, and where there is none."""
        return self._coordinator[1].end() if self._coordinator is not None else None

    def end_stopped_coordinator(self, limit_s: float, *, now_s: float) -> None:
        """End the coordinator if a signal has stopped it for longer than this."""
        if self._coordinator is not None:
            self._coordinator[1].end_if_stopped(limit_s, now_s=now_s)

    def close_coordinator(self) -> None:
        """The attempt is over, if there was one."""
        if self._coordinator is not None:
            self._coordinator[1].close()
            self._coordinator = None

    def close(self) -> None:
        """End everything."""
        self.close_coordinator()
        if self._fork_server is not None:
            self._fork_server.close()


def _variables(environment: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    # The supervisor may itself run as a rank of another program.
    inherited = {k: v for k, v in environment.items() if k not in RESERVED_NAMES}
    return {**inherited, **variables}
