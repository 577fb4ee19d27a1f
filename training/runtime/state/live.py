"""The state of a training as it is in use: what saves copy, and what a rank gets from a replica.

A tensor of it is the very one that trains; only values are put in its place. Sizes are elements.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DataParallel

from perdure.training.errors import InputError
from perdure.training.runtime.program import Training
from perdure.training.runtime.state.program_state import ProgramState, layouts_of, with_room
from perdure.training.runtime.state.transfer import TensorLayout, local_part

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
MODEL = "model/"  # how the names of its tensors begin
OPTIMIZER = "optim/"
STATE = f"{OPTIMIZER}state."


class LiveState:
    """The tensors and settings of one training.

    Args:
        training: what is trained.

    Attributes:
        program: the state that the program keeps beside.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self.program = ProgramState(training.state)
        # Torch takes the prefix of all other wrappers off the names of a state.
        model = training.model
        self._model: nn.Module = model.module if isinstance(model, DataParallel) else model

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Collect tensors by name, and the optimizer's settings, which are plain values.

        An optimizer that has no state yet gets its state by a step of nothing.
        """
        tensors = self.model_tensors()
        optimizer = get_optimizer_state_dict(
            self._model, self._training.optimizers, options=_OPTIONS
        )
        settings: dict[str, Any] = {}
        for name, value in optimizer.items():
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER}{name}"] = value
            else:
                settings[name] = value
        return tensors, settings

    def parts(self) -> dict[str, Any]:
        """Return scheduler and scaler, None where there is none; a list of several schedulers."""
        states = [_state_of(scheduler) for scheduler in self._training.schedulers]
        scheduler = states if len(states) > 1 else next(iter(states), None)
        return {"scheduler": scheduler, "scaler": _state_of(self._training.scaler)}

    def put(self, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> None:
        """Take over what a checkpoint had.

        Args:
            tensors: by name, as `tensors` names them.
            extra: the optimizer's settings under `optimizer`, and `parts`.
        """
        set_model_state_dict(self._model, _below(MODEL, tensors))
        if extra["optimizer"]:
            set_optimizer_state_dict(
                self._model,
                self._training.optimizers,
                {**_below(OPTIMIZER, tensors), **_revived(extra["optimizer"])},
                options=_OPTIONS,
            )
        self._put_parts(extra)

    def whole(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Collect everything that a replica needs: tensors by name, and the rest as JSON."""
        tensors, settings = self._trained()
        groups = [_settings_of(group) for group in self._training.param_groups]
        beside, documents = self.program.take()
        extra = {"groups": groups, "optimizer": settings, "program": documents, **self.parts()}
        return tensors | beside, json.loads(json.dumps(extra))

    def _trained(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Collect what training changes, and the optimizer's settings.

        Before the first step the optimizer has no state, and making it would count a step.
        """
        has_state = self._training.has_optimizer_state
        tensors, settings = self.tensors() if has_state else (self.model_tensors(), {})
        return tensors | self._computed(tensors), settings

    def adopt(
        self,
        extra: dict[str, Any],
        fill: Callable[[Mapping[str, Tensor]], None],
        layouts: Mapping[str, TensorLayout] | None = None,
    ) -> None:
        """Become what another rank's `whole` was.

        Args:
            extra: of it.
            fill: fills tensors, by name, with the other's.
            layouts: how the other's tensors look, where that is known.
        """
        training = self._training
        if not extra["optimizer"]:
            self._forget_optimizer_state()
        elif not training.has_optimizer_state and not self._allocate_state(layouts or {}):
            self.tensors()
        tensors, _ = self._trained()
        layouts_beside = chain.from_iterable(map(layouts_of, extra["program"].values()))
        beside = with_room(self.program.take()[0], dict(layouts_beside))
        fill(tensors | beside)
        if not self._are_live(tensors):
            self.put(tensors, extra)
        self.program.put(extra["program"], beside)
        for group, saved_group in zip(training.param_groups, extra["groups"], strict=True):
            group.update(_revived(saved_group))  # a schedule's state does not bring its rate along
        self._put_parts(extra)

    def _allocate_state(self, layouts: Mapping[str, TensorLayout]) -> bool:
        """Give an optimizer without a state one that looks like another's, values to come.

        Its own way is a step with gradients of zeros: several times the time that the values
        themselves take. Whether it was possible; sharded tensors are left to the optimizer.
        """
        names: dict[int, str] = {}
        for name, parameter_name in self.model_tensors().items():
            names.setdefault(
                parameter_name.data_ptr(), name
            )  # of tied weights the state has the first
        owned = [
            (optimizer, p)
            for optimizer in self._training.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        if any(type(p.data) is not Tensor or p.data_ptr() not in names for _, p in owned):
            return False
        by_name: dict[str, dict[str, TensorLayout]] = {}
        for key, layout in layouts.items():
            if key.startswith(STATE):
                name, _, part = key.removeprefix(STATE).rpartition(".")
                by_name.setdefault(f"model/{name}", {})[part] = layout
        for optimizer, parameter in owned:
            if parameter_state := by_name.pop(names[parameter.data_ptr()], None):
                optimizer.state[parameter] = {
                    part: layout.empty_beside(parameter) for part, layout in parameter_state.items()
                }
        if by_name:  # the other has a state for what has another name here
            self._forget_optimizer_state()
        return self._training.has_optimizer_state

    def _forget_optimizer_state(self) -> None:
        for optimizer in self._training.optimizers:
            optimizer.state.clear()

    def _are_live(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether values that were put into tensors are in the training: none is a copy."""
        training = self._training
        live = chain(training.model.parameters(), training.model.buffers(), training.kept_tensors())
        live_places = {_place_of(tensor) for tensor in live}
        return all(_place_of(tensor) in live_places for tensor in tensors.values())

    def _put_parts(self, extra: Mapping[str, Any]) -> None:
        scheduler_state = extra["scheduler"]
        states = (
            scheduler_state
            if isinstance(scheduler_state, list)
            else []
            if scheduler_state is None
            else [scheduler_state]
        )
        schedulers = self._training.schedulers
        if len(states) != len(schedulers):
            raise InputError(
                "session.register(scheduler=...)",
                f"{len(schedulers)} schedulers, but the state to take over is of {len(states)}",
            )
        for scheduler, state in zip(schedulers, states, strict=True):
            scheduler.load_state_dict(state)
        if self._training.scaler is not None:
            self._training.scaler.load_state_dict(extra["scaler"])

    def model_tensors(self) -> dict[str, Tensor]:
        """Collect the model's tensors by name: parameters and buffers."""
        model = get_model_state_dict(self._model)
        return {f"model/{k}": v for k, v in model.items() if isinstance(v, Tensor)}

    def _computed(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Collect buffers that are no part of a checkpoint: damaged memory may have held them."""
        named = self._model.named_buffers()
        short = ((name.removeprefix("module."), buffer) for name, buffer in named)
        return {f"buffer/{n}": buffer for n, buffer in short if f"model/{n}" not in saved}


def _place_of(tensor: Tensor) -> int:
    return local_part(tensor).data_ptr()


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _state_of(part: Any) -> dict[str, Any] | None:
    return dict(part.state_dict()) if part is not None else None


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that train a group of parameters: rates, betas, decay."""
    return {name: value for name, value in group.items() if name != "params"}


def _revived(settings: dict[str, Any]) -> dict[str, Any]:
    # JSON has no tuples; AdamW's betas are compared as one.
    return {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}


@dataclass(slots=True)
class _Copy:
    tensors: list[Tensor]
    step: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class Snapshots:
    """Copies of one training's state, the newest two."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []
        self._newest: int | None = None
        self._names: tuple[str, ...] = ()
        self._layouts: tuple[Any, ...] = ()

    @property
    def step(self) -> int | None:
        """Completed steps in the newest copy, None without a copy."""
        return self._copies[self._newest].step if self._newest is not None else None

    def take(self, step: int, tensors: Mapping[str, Tensor], extra: dict[str, Any]) -> None:
        """Copy the state of a step.

        Args:
            step: completed steps.
            tensors: by name; other names or shapes than the last time make the older copies void.
            extra: everything else; kept as it is given.
        """
        live = [local_part(tensor) for tensor in tensors.values()]
        layouts = tuple((name, t.dtype, t.shape) for name, t in zip(tensors, live, strict=True))
        if layouts != self._layouts:
            self._names, self._layouts, self._newest = tuple(tensors), layouts, None
            self._copies.clear()
        if len(self._copies) < 2:
            self._copies.append(_Copy([_on_host(tensor) for tensor in live]))
        free = 0 if self._newest is None else 1 - self._newest
        copy = self._copies[free]
        torch._foreach_copy_(copy.tensors, live)
        copy.step, copy.extra = step, extra
        self._newest = free

    @property
    def extra(self) -> dict[str, Any]:
        """Values beside the tensors of the newest copy."""
        return self._copies[self._newest_index].extra

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put the newest copy back into these tensors."""
        live = [local_part(tensors[name]) for name in self._names]
        with torch.no_grad():
            torch._foreach_copy_(live, self._copies[self._newest_index].tensors)

    @property
    def _newest_index(self) -> int:
        assert self._newest is not None  # noqa: S101 asked for only where `step` is not None
        return self._newest


def _on_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")


def damage(training: Training) -> None:
    """Overwrite all tensors of a training, as an injected fault of the device's memory does."""
    model = training.model
    with torch.no_grad():
        for value in chain(model.parameters(), model.buffers(), training.kept_tensors()):
            local = local_part(value)
            local.fill_(math.nan if local.is_floating_point() else -1)
