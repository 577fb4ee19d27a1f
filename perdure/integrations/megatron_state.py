"""State of Megatron's optimizers, scaler and schedule, as a session saves and sends it.

The inner optimizers are the truth: with ZeRO-1 each has a rank's own shards. Parameters that other
ranks own follow from theirs, by a gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class MegatronState:
    """What the optimizers keep: settings of groups, copies of weights, moments; and the scalers.

    A scaler moves when gradients are made ready, before all ranks have agreed on a step. `keep`
    takes note of it once a step is applied, `put_back` begins a step with that.

    Args:
        optimizers: the chained ones of Megatron.
        model: whose weights are saved as such.
    """

    def __init__(self, optimizers: Sequence[Any], model: nn.Module) -> None:
        self._optimizers = optimizers
        self._model = model
        scalers = (getattr(optimizer, "grad_scaler", None) for optimizer in optimizers)
        self._scalers = list({id(s): s for s in scalers if s is not None}.values())
        self.keep()

    def keep(self) -> None:
        """Take note of the scalers: the step is applied."""
        self._kept = [_copy(scaler.state_dict()) for scaler in self._scalers]

    def put_back(self) -> None:
        """Have the scalers as they were behind the last step that was applied."""
        for scaler, scale in zip(self._scalers, self._kept, strict=True):
            if scale:  # a constant one has nothing
                scaler.load_state_dict(_copy(scale))

    def parameters(self) -> Iterator[Tensor]:
        """Yield what the inner optimizers step."""
        for inner in self._inner():
            for group in inner.param_groups:
                yield from group["params"]

    def _inner(self) -> Iterator[torch.optim.Optimizer]:
        for optimizer in self._optimizers:
            if optimizer.optimizer is not None:  # a rank without parameters has a stub
                yield optimizer.optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and settings; a copy of weights only where it is another tensor."""
        weights = {p.untyped_storage().data_ptr() for p in self._model.parameters()}

        def entry_of(inner: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
            entry = dict(inner.state.get(parameter, {}))
            if parameter.untyped_storage().data_ptr() not in weights:
                entry["main"] = parameter.detach()
            return entry

        optimizers = [
            {
                "groups": [_settings(group) for group in inner.param_groups],
                "parameters": [
                    [entry_of(inner, parameter) for parameter in group["params"]]
                    for group in inner.param_groups
                ],
            }
            for inner in self._inner()
        ]
        return {"optimizers": optimizers, "scalers": self._kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over `state_dict`, and copy the weights to the model as far as they are here."""
        for inner, saved in zip(self._inner(), state["optimizers"], strict=True):
            groups = zip(inner.param_groups, saved["groups"], saved["parameters"], strict=True)
            for group, settings, parameters in groups:
                group.update(settings)
                for parameter, entry in zip(group["params"], parameters, strict=True):
                    _put(inner, parameter, entry)
        with torch.no_grad():
            for optimizer in self._optimizers:
                if hasattr(optimizer, "_copy_main_params_to_model_params"):
                    optimizer._copy_main_params_to_model_params()  # noqa: SLF001 no other way
        self._kept = [_copy(scale) for scale in state["scalers"]]
        self.put_back()


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _put(inner: torch.optim.Optimizer, parameter: Tensor, saved: dict[str, Any]) -> None:
    entry = dict(saved)
    if (main := entry.pop("main", None)) is not None:
        with torch.no_grad():
            parameter.copy_(main)
    if not entry:
        inner.state.pop(parameter, None)
        return
    live = inner.state[parameter]
    for name, value in entry.items():
        present = live.get(name)
        if isinstance(value, Tensor) and isinstance(present, Tensor):
            present.copy_(value)
        elif isinstance(value, Tensor) and value.dim():
            live[name] = value.to(parameter.device)
        else:
            live[name] = value  # a count of steps stays on the host


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}


class Schedule:
    """Megatron's schedule of the learning rate, as a session steps it.

    Args:
        scheduler: Megatron's own.
        rates: shows the session the rate that is in use.
        increment: returns the samples of the step.
        is_skipped: tells whether the step was one of gradients that overflowed.
    """

    def __init__(
        self,
        scheduler: Any,
        rates: torch.optim.Optimizer,
        *,
        increment: Callable[[], int],
        is_skipped: Callable[[], bool],
    ) -> None:
        self._scheduler = scheduler
        self._rates = rates
        self._increment = increment
        self._is_skipped = is_skipped
        self._show()

    def _show(self) -> None:
        for group in self._rates.param_groups:
            group["lr"] = self.get_last_lr()[0]

    def step(self) -> None:
        """Advance by the samples of a step."""
        if not self._is_skipped():
            self._scheduler.step(increment=self._increment())
        self._show()

    def get_last_lr(self) -> Sequence[float]:
        """Return the rate of each group, 0 on a rank without parameters."""
        return [group["lr"] for group in self._scheduler.optimizer.param_groups] or [0.0]

    def state_dict(self) -> dict[str, Any]:
        """Return the samples that it counts."""
        return {"num_steps": self._scheduler.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to that count, and set the rates."""
        self._scheduler.num_steps = state["num_steps"]
        self._scheduler.step(increment=0)
        self._show()
