"""Checking the node on a supervisor's order, before any attempt is started on it."""

from __future__ import annotations

import os
from pathlib import Path

from perdure.storage.address import open_store
from perdure.training.agent.order_job import job_of
from perdure.training.environment import interface_variables
from perdure.training.health.node_check import NodeProgram
from perdure.training.trainer.data.manifest import load_manifest
from perdure.training.trainer.data.stage import stage
from perdure.training.wire.agent import AgentConfig, CheckOrder, StartOrder
from perdure.training.wire.node import Check, NodeTask


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
            state_bytes=order.state_bytes,
            is_new=order.is_new,
            gang_host=order.gang_host,
            gang_port=order.gang_port,
            timeout_s=order.timeout_s,
        )
        environment = {**interface_variables(self._config.host), **os.environ, **order.variables}
        return self._program.run(task, environment)

    def end(self) -> None:
        """End what is being checked."""
        self._program.end()


DATA_FOLDER = "data"


def stage_data(order: StartOrder, folder: Path) -> None:
    """Have the order's shards in the container's folder; commands need none.

    Raises:
        StorageError: they cannot be read.
        OSError: they cannot be written.
    """
    if order.data_manifest_key is None:
        return
    store = open_store(job_of(order).storage)
    stage(load_manifest(store, order.data_manifest_key), store, folder / DATA_FOLDER)
