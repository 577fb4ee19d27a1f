"""MindSpore's `Model.train` in a run of Perdure: one callback, without torch.

    perdure = PerdureCallback(model, data)
    model.train(epochs, data, callbacks=[perdure, ...], dataset_sink_mode=False)

The callback restores the newest checkpoint and the place in the data when it is made, before
`Model.train` opens its iterator. It ends training at the job's `steps`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mindspore as ms
import numpy as np
from mindspore.train import Callback, Model

from perdure.storage.arrays import Array
from perdure.training.errors import InputError
from perdure.training.runtime.array_session import ArraySession, DataPlace, join_arrays

SINK = "dataset_sink_mode=True hides steps from callbacks: give dataset_sink_mode=False"


class PerdureCallback(Callback):  # type: ignore[misc] # mindspore has no types
    """Takes part in a run: heartbeats, losses, checkpoints, restore, pause, requests.

    Args:
        model: as it trains; its network and optimizer are saved.
        dataset: that `model.train` gets, with its batches.

    Raises:
        InputError: the program was not started by a node agent, or its checkpoint does not fit.
        SystemExit: code 0, when the run is at its target already.
    """

    def __init__(self, model: Model, dataset: Any) -> None:
        super().__init__()
        self._network = model.train_network
        self._optimizer = _optimizer_of(model)
        self._session: ArraySession = join_arrays()
        samples = dataset.get_batch_size() * self._session.context.layout.dp
        self._place = DataPlace(samples, dataset.get_dataset_size())
        self.initial_step = self._session.open(self, self._place)
        if self._session.is_at_target:
            self._session.end()
            raise SystemExit(0)
        dataset.set_init_step(self.initial_step)

    def arrays(self) -> Mapping[str, Array]:
        """Return all parameters by name, those of the optimizer among them; no copies on a CPU."""
        return {p.name: _array_of(p) for p in self._network.get_parameters()}

    def put(self, arrays: Mapping[str, Array]) -> None:
        """Take the values of all parameters."""
        for parameter in self._network.get_parameters():
            values = ms.Tensor(arrays[parameter.name], dtype=parameter.dtype)
            parameter.set_data(values)

    def on_train_begin(self, run_context: Any) -> None:
        """Continue the count of the steps."""
        parameters = run_context.original_args()
        if parameters.get("dataset_sink_mode"):
            raise InputError("Model.train", SINK)
        parameters.cur_step_num = self.initial_step

    def on_train_epoch_begin(self, run_context: Any) -> None:
        """Show later callbacks the epoch of the run, not that of the process."""
        parameters = run_context.original_args()
        parameters.cur_epoch_num = parameters.cur_step_num // self._place.steps_per_epoch + 1

    def on_train_step_begin(self, _run_context: Any) -> None:
        """Note that a batch is there."""
        self._session.begin_step()

    def on_train_step_end(self, run_context: Any) -> None:
        """Note a completed step, and do what is due before the next."""
        parameters = run_context.original_args()
        loss = _loss_of(parameters.net_outputs)
        if self._session.end_step(loss=loss, lr=self._learning_rate()):
            run_context.request_stop()

    def on_train_end(self, _run_context: Any) -> None:
        """End the loop at its target, or where the ranks are asked to end."""
        if self._session.is_over:
            self._session.end()

    def _learning_rate(self) -> float:
        optimizer = self._optimizer
        if optimizer is None or getattr(optimizer, "dynamic_lr", False):
            return 0.0
        rate = optimizer.learning_rate
        return float(rate.asnumpy()) if hasattr(rate, "asnumpy") else 0.0


def _optimizer_of(model: Model) -> Any:
    cells = (cell for _, cell in model.train_network.cells_and_names())
    return next((cell for cell in cells if isinstance(cell, ms.nn.Optimizer)), None)


def _array_of(parameter: Any) -> Array:
    """View the values of a parameter; numpy has no bfloat16, which float32 holds exactly."""
    if parameter.dtype == ms.bfloat16:
        array: Array = parameter.astype(ms.float32).asnumpy()
        return array
    return np.asarray(parameter.asnumpy())


def _loss_of(outputs: Any) -> float:
    """Read the loss of this rank, as MindSpore's LossMonitor does."""
    if isinstance(outputs, (tuple, list)):
        outputs = outputs[0]
    return float(np.mean(outputs.asnumpy())) if hasattr(outputs, "asnumpy") else math.nan
