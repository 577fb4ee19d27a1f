"""Train a small network with MindSpore on the CPU, data-parallel over the ranks that msrun starts.

Each rank saves its file of every epoch below `--out`, in a folder of its own. With `--resume` it
goes on from the epoch of such a file; the path may be that of any rank.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank, init, release
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, CheckpointConfig, LossMonitor, Model, ModelCheckpoint

FEATURES, BATCH = 16, 8


class Network(nn.Cell):
    """Three layers and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Dense(FEATURES, 64), nn.Dense(64, 64)
        self.last = nn.Dense(64, 1)

    def construct(self, inputs: Any, targets: Any) -> Any:
        """Return the mean squared error."""
        hidden = ops.tanh(self.second(ops.tanh(self.first(inputs))))
        return ops.square(self.last(hidden) - targets).mean()


class Pause(Callback):
    """Make a step as long as that of a large model."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self._pause_s = pause_s

    def on_train_step_end(self, run_context: Any) -> None:  # noqa: ARG002 MindSpore's signature
        """Wait after a step."""
        time.sleep(self._pause_s)


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--steps-per-epoch", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--format", default="safetensors", choices=("ckpt", "safetensors"))
    return parser.parse_args()


def samples(arguments: argparse.Namespace, rank: int, world_size: int) -> Any:
    """Return this rank's share of the samples of an epoch."""

    def generate() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for index in range(rank, arguments.steps_per_epoch * BATCH, world_size):
            inputs = np.random.default_rng(index).standard_normal(FEATURES).astype(np.float32)
            yield inputs, np.sin(inputs.sum(keepdims=True))

    data = GeneratorDataset(list(generate()), ["inputs", "targets"], shuffle=False)
    return data.batch(BATCH // world_size)


def restore(step_cell: Any, path: Path, rank: int, file_format: str) -> int:
    """Load this rank's file of a checkpoint. Returns the epoch that it completes."""
    own = Path(re.sub(r"rank_\d+", f"rank_{rank}", str(path)))
    parameters = ms.load_checkpoint(str(own), format=file_format)
    ms.load_param_into_net(step_cell, parameters)
    return int(parameters["epoch_num"].asnumpy())


def main(callbacks: Sequence[Callback] = ()) -> None:
    """Train; further callbacks run after those of the program."""
    arguments = read_arguments()
    ms.set_device("CPU")
    ms.set_deterministic(True)
    ms.set_context(mode=ms.GRAPH_MODE)
    init()
    rank, world_size = get_rank(), get_group_size()
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    ms.set_seed(1)
    network = Network()
    optimizer = nn.AdamWeightDecay(network.trainable_params(), 1e-2)
    step_cell, epoch = nn.TrainOneStepCell(network, optimizer), 0
    if arguments.resume is not None:
        epoch = restore(step_cell, arguments.resume, rank, arguments.format)
    saves = CheckpointConfig(
        save_checkpoint_steps=arguments.steps_per_epoch,
        append_info=["epoch_num", "step_num"],
        format=arguments.format,
    )
    saver = ModelCheckpoint("tiny", str(arguments.out / f"rank_{rank}"), saves)
    monitors = [LossMonitor()] if rank == 0 else []
    Model(step_cell).train(
        arguments.epochs,
        samples(arguments, rank, world_size),
        callbacks=[*monitors, saver, Pause(arguments.pause_s), *callbacks],
        dataset_sink_mode=False,
        initial_epoch=epoch,
    )
    # Without it the scheduler waits for 30 s, and msrun exits with 1.
    release()


if __name__ == "__main__":
    main()
