"""The connection of an agent to the coordinator of its attempt. Times are seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import SecretStr, ValidationError

from perdure.training.recovery.protocol import GiveUp, ReplaceWorker
from perdure.training.wire.coordinator import (
    TO_MEMBER,
    AgentJoined,
    CoordinatorAddress,
    MetricsAddress,
    NodeSampled,
    metrics_file,
)
from perdure.training.wire.node import NodeSample
from perdure.training.wire.transport import Connection

CONNECT_TIMEOUT_S = 30.0
REJOIN_POLL_S = 0.1
_ADDRESS_FILE = "coordinator-address.json"


def address_file(folder: Path) -> Path:
    """Return the file in which a coordinator writes its address, and workers look for it."""
    return folder / _ADDRESS_FILE


def metrics_url(folder: Path) -> str | None:
    """Return where the coordinator on this node answers Prometheus, None without one."""
    try:
        text = metrics_file(folder).read_text(encoding="utf-8")
        return MetricsAddress.model_validate_json(text).url
    except (OSError, ValidationError):  # the state of a node is told all the same
        return None


class AgentCoordinatorClient(Connection):
    """An agent's connection to the coordinator.

    Args:
        address: where the coordinator listens.
        node: name of this node.
        ranks: global ranks on this node.
        on_replace: begins to replace a rank's process, and returns at once: the next order waits.
        on_give_up: called when nothing more is recovered inside processes.
        rejoin_s: time for another coordinator to come before this one counts as lost.
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
        """Connect to a coordinator on another node.

        Raises:
            OSError: nothing listens there.
        """
        joined = self._joined(address)
        self.connect(address.host, address.port, joined, timeout_s=CONNECT_TIMEOUT_S)

    def send_sample(self, sample: NodeSample) -> bool:
        """Send a sample of the node. Returns whether the connection took it."""
        return self.send(NodeSampled(node=self._node, sample=sample.model_dump(mode="json")))

    def receive(self, line: bytes) -> None:
        """Carry out an order."""
        match TO_MEMBER.validate_json(line):
            case ReplaceWorker() as order:
                self._on_replace(order)
            case GiveUp() as order:
                self._on_give_up(order.why)

    def lost(self, why: str) -> None:
        """Wait for another coordinator; without one, nothing is recovered inside processes."""
        deadline_s = time.monotonic() + self._rejoin_s
        while not (self.is_open or self.is_closed) and time.monotonic() < deadline_s:
            time.sleep(REJOIN_POLL_S)
        if not (self.is_open or self.is_closed):
            self._on_give_up(f"the coordinator is gone: {why}")
