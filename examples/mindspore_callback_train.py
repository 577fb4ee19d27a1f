"""Train the network of mindspore_train.py with Perdure's callback, which saves and resumes."""

from __future__ import annotations

import argparse
from typing import Any

import mindspore as ms
from mindspore import nn
from mindspore.communication import get_group_size, get_rank, init, release
from mindspore.train import LossMonitor, Model
from mindspore_train import Network, Pause, samples

from perdure.integrations.mindspore import PerdureCallback


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--steps-per-epoch", type=int, default=5)
    parser.add_argument("--pause-s", type=float, default=0.0)
    return parser.parse_args()


def new_model() -> Any:
    """Build network and optimizer, the same on every rank."""
    ms.set_seed(1)
    network = Network()
    optimizer = nn.AdamWeightDecay(network.trainable_params(), 1e-2)
    return Model(nn.TrainOneStepCell(network, optimizer))


def main() -> None:
    """Train to the step that the job names."""
    arguments = read_arguments()
    ms.set_device("CPU")
    ms.set_deterministic(True)
    ms.set_context(mode=ms.GRAPH_MODE)
    init()
    rank, world_size = get_rank(), get_group_size()
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    model, data = new_model(), samples(arguments, rank, world_size)
    perdure = PerdureCallback(model, data)  # the first: others see the run's steps
    monitors = [LossMonitor()] if rank == 0 else []
    callbacks = [perdure, *monitors, Pause(arguments.pause_s)]
    model.train(arguments.epochs, data, callbacks=callbacks, dataset_sink_mode=False)
    release()


if __name__ == "__main__":
    main()
