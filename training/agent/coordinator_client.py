"""The agent's side of the coordinator: its process on the first node, and the line to it.

Times are seconds.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr, ValidationError

from training.agent.fork_server import Fork, ForkedProcess, ForkServer
from training.coordinator.config import CoordinatorConfig, MetricsAddress, metrics_file
from training.files import last_line, write_whole
from training.recovery.protocol import CoordinatorMessage, GiveUp, ReplaceWorker
from training.wire.coordinator import (
    TO_MEMBER,
    AgentJoined,
    CoordinatorAddress,
    NodeSampled,
    dump_line,
)
from training.wire.sample import NodeSample

CONNECT_TIMEOUT_S = 30.0
START_TIMEOUT_S = 30.0
_CONFIG_FILE = "coordinator-config.json"
_ADDRESS_FILE = "coordinator-address.json"


@dataclass(slots=True)
class CoordinatorProcess:
    """The coordinator of an attempt, as the agent that starts it sees it."""

    process: ForkedProcess
    address: CoordinatorAddress

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
        log = str(folder / "coordinator.log")
        process = fork_server.fork(
            Fork(
                function="training.coordinator.server:main",
                name="coordinator",
                arguments=(str(config_file),),
                environment=environment,
                cwd=str(folder),
                stdout=log,
                stderr=log,
            )
        )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not address_file.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                process.kill()
                raise OSError(f"the coordinator did not start: {last_line(Path(log))}")
            time.sleep(0.005)
        text = address_file.read_text(encoding="utf-8")
        return cls(process, CoordinatorAddress.model_validate_json(text))

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


class AgentCoordinatorClient:
    """An agent's connection to the coordinator.

    Args:
        address: where it listens.
        node: name of this node.
        ranks: global ranks on it.
        on_replace: starts a new process for a rank.
        on_give_up: the attempt is not saved inside its processes, or the line is dead.
    """

    def __init__(
        self,
        address: CoordinatorAddress,
        *,
        node: str,
        ranks: Sequence[int],
        on_replace: Callable[[int, int], None],
        on_give_up: Callable[[str], None],
    ) -> None:
        self._on_replace = on_replace
        self._on_give_up = on_give_up
        self._socket = socket.create_connection(
            (address.host, address.port), timeout=CONNECT_TIMEOUT_S
        )
        self._socket.settimeout(None)
        self._saying = threading.Lock()  # lines come from several threads, each is to be whole
        self.is_open = True
        self.say(AgentJoined(token=SecretStr(address.token), node=node, ranks=tuple(ranks)))
        threading.Thread(target=self._listen, daemon=True).start()

    def say(self, message: CoordinatorMessage) -> bool:
        """Tell the coordinator something. Whether the line was open."""
        try:
            with self._saying:
                self._socket.sendall(dump_line(message))
        except OSError:
            self.is_open = False
        return self.is_open

    def sampled(self, node: str, sample: NodeSample) -> bool:
        """Pass on what a look at the node has shown. Whether the line was open."""
        return self.is_open and self.say(
            NodeSampled(node=node, sample=sample.model_dump(mode="json"))
        )

    def close(self) -> None:
        """Hang up."""
        self.is_open = False
        with suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _listen(self) -> None:
        why = "the coordinator is gone"
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    match TO_MEMBER.validate_json(line):
                        case ReplaceWorker() as order:
                            self._on_replace(order.rank, order.generation)
                        case GiveUp() as given:
                            self._on_give_up(given.why)
        except (OSError, ValidationError, ValueError) as exc:
            why = f"{why}: {exc}"
        if self.is_open:
            self.is_open = False
            self._on_give_up(why)
