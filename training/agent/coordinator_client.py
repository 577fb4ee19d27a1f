"""The agent's side of the coordinator: its process on the first node, and the connection to it.

Times are seconds.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from perdure.training.agent.fork_server import Fork, ForkedProcess, ForkServer
from perdure.training.files import last_line, write_whole
from perdure.training.liveness.culprit import STOPPED
from perdure.training.processes import process_state
from perdure.training.recovery.protocol import GiveUp, ReplaceWorker
from perdure.training.wire.agent_status import CoordinatorEnd
from perdure.training.wire.coordinator import (
    TO_MEMBER,
    AgentJoined,
    CoordinatorAddress,
    CoordinatorConfig,
    MetricsAddress,
    NodeSampled,
    metrics_file,
)
from perdure.training.wire.node import NodeSample
from perdure.training.wire.transport import Connection

CONNECT_TIMEOUT_S = 30.0
START_TIMEOUT_S = 30.0
REJOIN_POLL_S = 0.1
_CONFIG_FILE = "coordinator-config.json"
_ADDRESS_FILE = "coordinator-address.json"


@dataclass(slots=True)
class CoordinatorProcess:
    """The coordinator of an attempt, as the agent that starts it sees it."""

    process: ForkedProcess
    address: CoordinatorAddress
    log: Path
    _stopped_s: float | None = None  # since when it was seen to be stopped by a signal
    _why_ended: str = ""

    @classmethod
    def start(
        cls,
        fork_server: ForkServer,
        config: CoordinatorConfig,
        folder: Path,
        environment: dict[str, str],
    ) -> CoordinatorProcess:
        """Start it and wait until it listens.

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
        """End it when a signal has stopped it for too long.

        Ranks that wait for it beat all the while: none of them would ever look silent.
        """
        if process_state(self.process.pid) not in STOPPED:
            self._stopped_s = None
            return
        self._stopped_s = self._stopped_s if self._stopped_s is not None else now_s
        if now_s - self._stopped_s > limit_s:
            self._why_ended = f"a signal had stopped it for {now_s - self._stopped_s:.0f} s"
            self.process.kill()

    def end(self) -> CoordinatorEnd | None:
        """How it ended by itself, None while it lives."""
        exit_code = self.process.poll()
        if exit_code is None:
            return None
        line = self._why_ended or last_line(self.log)
        return CoordinatorEnd(
            exit_code=exit_code, ended_s=time.time(), line=line, was_stopped=bool(self._why_ended)
        )

    def close(self) -> None:
        """End it: the attempt is over."""
        self.process.kill()


def new_token() -> str:
    """A secret of one attempt."""
    return secrets.token_hex(16)


def address_file(folder: Path) -> Path:
    """Where a coordinator writes its address, and where workers look for it."""
    return folder / _ADDRESS_FILE


def metrics_url(folder: Path) -> str | None:
    """Where the coordinator of an attempt on this node answers Prometheus, None without one."""
    try:
        text = metrics_file(folder).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return MetricsAddress.model_validate_json(text).url


class AgentCoordinatorClient(Connection):
    """An agent's connection to the coordinator.

    Args:
        address: where it listens.
        node: name of this node.
        ranks: global ranks on it.
        on_replace: sees to a new process for a rank, and returns at once: the next order waits.
        on_give_up: the attempt is not saved inside its processes, or the coordinator is gone.
        rejoin_s: for another coordinator to come before this one counts as gone.
    """

    def __init__(
        self,
        address: CoordinatorAddress,
        *,
        node: str,
        ranks: Sequence[int],
        on_replace: Callable[[ReplaceWorker], None],
        on_give_up: Callable[[str], None],
        rejoin_s: float = 0.0,
    ) -> None:
        self._node, self._ranks = node, tuple(ranks)
        self._rejoin_s = rejoin_s
        self._on_replace = on_replace
        self._on_give_up = on_give_up
        joined = self._joined(address)
        super().__init__(address.host, address.port, joined, timeout_s=CONNECT_TIMEOUT_S)

    def _joined(self, address: CoordinatorAddress) -> AgentJoined:
        return AgentJoined(token=SecretStr(address.token), node=self._node, ranks=self._ranks)

    def rejoin(self, address: CoordinatorAddress) -> None:
        """Go over to a coordinator on another node.

        Raises:
            OSError: nothing listens there.
        """
        joined = self._joined(address)
        self.connect(address.host, address.port, joined, timeout_s=CONNECT_TIMEOUT_S)

    def send_sample(self, sample: NodeSample) -> bool:
        """Pass a sample of the node on. Whether the connection took it."""
        return self.send(NodeSampled(node=self._node, sample=sample.model_dump(mode="json")))

    def receive(self, line: bytes) -> None:
        """Carry out an order."""
        match TO_MEMBER.validate_json(line):
            case ReplaceWorker() as order:
                self._on_replace(order)
            case GiveUp() as order:
                self._on_give_up(order.why)

    def lost(self, why: str) -> None:
        """Nothing is recovered inside processes without a coordinator; another one may come."""
        deadline_s = time.monotonic() + self._rejoin_s
        while not (self.is_open or self.is_closed) and time.monotonic() < deadline_s:
            time.sleep(REJOIN_POLL_S)
        if not (self.is_open or self.is_closed):
            self._on_give_up(f"the coordinator is gone: {why}")
