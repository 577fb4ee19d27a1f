"""Bringing the token shards to the node, before workers are started."""

from __future__ import annotations

from pathlib import Path

from storage.address import open_store
from training.job import Job
from training.trainer.data.manifest import load_manifest
from training.trainer.data.stage import stage
from training.wire.agent import StartOrder

DATA_FOLDER = "data"


def stage_data(order: StartOrder, folder: Path) -> None:
    """Have the order's shards in the container's folder; none are asked for by commands.

    Raises:
        StorageError: they cannot be read.
        OSError: they cannot be written.
    """
    if order.data_manifest_key is None:
        return
    store = open_store(Job.model_validate_json(order.job).storage)
    stage(load_manifest(store, order.data_manifest_key), store, folder / DATA_FOLDER)
