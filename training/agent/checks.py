"""Checking the node on a supervisor's order, before any attempt is started on it."""

from __future__ import annotations

import os
from pathlib import Path

from training.health.monitor.checking import NodeProgram
from training.wire.agent import AgentConfig, CheckOrder
from training.wire.check import Check, NodeTask


class NodeChecks:
    """The checks of one container's node.

    Args:
        config: of its agent.
        folder: of the container.
    """

    def __init__(self, config: AgentConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._program = NodeProgram()

    def run(self, order: CheckOrder) -> tuple[Check, ...]:
        """Check; takes seconds."""
        task = NodeTask(
            job=order.job,
            node=self._config.node,
            folder=str(self._folder),
            node_folder=self._config.node_folder,
            slots=order.slots_per_node,
            first_rank=self._config.member * order.slots_per_node,
            world_size=order.num_nodes * order.slots_per_node,
            is_new=order.is_new,
            gang_host=order.gang_host,
            gang_port=order.gang_port,
            timeout_s=order.timeout_s,
        )
        return self._program.run(task, {**os.environ, **order.variables})

    def end(self) -> None:
        """End what is being checked."""
        self._program.end()
