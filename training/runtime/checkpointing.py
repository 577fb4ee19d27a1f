"""Saving and restoring the full state of a training: bit-exact, on any number of ranks.

Tensors (model, optimizer, random states) go through torch.distributed.checkpoint's planners;
everything else (scheduler, scaler, data position, optimizer settings) is JSON in the manifest.
"""

from __future__ import annotations

import json
import random
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from storage import dcp
from storage.checkpoint import CheckpointStore, Manifest
from training.device import device_rng_state, set_device_rng_state
from training.runtime.context import WorkerContext
from training.runtime.step import Training

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_NOT_FOUND = -1


class DataPosition(Protocol):
    """What the session needs of a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-able position."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        ...


class Checkpointer:
    """Saves and restores one training."""

    def __init__(
        self,
        context: WorkerContext,
        checkpoints: CheckpointStore,
        training: Training,
        data: DataPosition,
        device: torch.device,
    ) -> None:
        self._context = context
        self._checkpoints = checkpoints
        self._training = training
        self._data = data
        self._device = device

    def save(self, step: int) -> bool:
        """Save on all ranks, commit on the first.

        Returns:
            False when the step was committed before: the same state, by an earlier attempt.

        Raises:
            StorageError: the save failed, on every rank; nothing was committed.
        """
        tensors, settings = self._state()
        extra: dict[str, Any] = {
            "data": self._data.state_dict(),
            "optimizer": settings,
            "scheduler": _state_of(self._training.scheduler),
            "scaler": _state_of(self._training.scaler),
        }
        committed = step in self._checkpoints.steps() if self._context.rank == 0 else False
        if _broadcast_int(int(committed), self._device):
            return False
        dcp.save(
            {**tensors, **self._random_states()},
            checkpoints=self._checkpoints,
            step=step,
            placement=self._context.placement,
            attempt=self._context.attempt,
            # JSON has no tuples: say so here and not in the manifest's validation.
            extra=json.loads(json.dumps(extra)),
        )
        return True

    def restore(self) -> int:
        """Restore the newest intact checkpoint. Returns its step, 0 when there is none."""
        found = self._choose() if self._context.rank == 0 else _NOT_FOUND
        step = _broadcast_int(found, self._device)
        if step == _NOT_FOUND:
            return 0
        self._load(self._checkpoints.manifest(step))
        return step

    def _choose(self) -> int:
        found = self._checkpoints.newest_intact()
        for damaged in found.set_aside:
            print(  # noqa: T201 the rank's own log
                f"perdure: checkpoint of step {damaged.step} set aside: {damaged.reason}",
                flush=True,
            )
        return found.manifest.step if found.manifest is not None else _NOT_FOUND

    def _load(self, manifest: Manifest) -> None:
        tensors, _ = self._state()
        random_states = {
            name: torch.empty(entry.shape, dtype=torch.uint8)
            for name, entry in manifest.tensors.items()
            if name.startswith(self._random_prefix)
        }
        wanted: dict[str, Tensor] = {**tensors, **random_states}
        dcp.load(wanted, manifest, checkpoints=self._checkpoints)
        extra: dict[str, Any] = dict(manifest.extra)
        set_model_state_dict(self._training.model, _below("model/", wanted))
        set_optimizer_state_dict(
            self._training.model,
            self._training.optimizer,
            {**_below("optim/", wanted), **_revived(extra["optimizer"])},
            options=_OPTIONS,
        )
        if self._training.scheduler is not None:
            self._training.scheduler.load_state_dict(extra["scheduler"])
        if self._training.scaler is not None:
            self._training.scaler.load_state_dict(extra["scaler"])
        self._data.load_state_dict(extra["data"])
        self._set_random_states(random_states)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors by name, and the optimizer's settings, which are plain values."""
        model = get_model_state_dict(self._training.model)
        optimizer = get_optimizer_state_dict(
            self._training.model, self._training.optimizer, options=_OPTIONS
        )
        tensors = {f"model/{k}": v for k, v in model.items() if isinstance(v, Tensor)}
        settings: dict[str, Any] = {}
        for name, value in optimizer.items():
            if isinstance(value, Tensor):
                tensors[f"optim/{name}"] = value
            else:
                settings[name] = value
        return tensors, settings

    @property
    def _random_prefix(self) -> str:
        return f"random/rank{self._context.rank:05d}/"

    def _random_states(self) -> dict[str, Tensor]:
        """Random states of this rank as uint8 tensors, [bytes]."""
        states = {"torch": torch.get_rng_state(), "python": _as_tensor(_python_states())}
        device_state = device_rng_state(self._device)
        if device_state is not None:
            states["device"] = device_state.cpu()
        return {self._random_prefix + name: state for name, state in states.items()}

    def _set_random_states(self, states: dict[str, Tensor]) -> None:
        # A rank that the saved world did not have keeps the state its seed gave it.
        for name, state in states.items():
            match name.removeprefix(self._random_prefix):
                case "torch":
                    torch.set_rng_state(state)
                case "device":
                    set_device_rng_state(self._device, state)
                case "python":
                    _set_python_states(json.loads(bytes(state.tolist())))


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _state_of(part: Any) -> dict[str, Any] | None:
    return dict(part.state_dict()) if part is not None else None


def _revived(settings: dict[str, Any]) -> dict[str, Any]:
    # JSON has no tuples; AdamW's betas are compared as one.
    return {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}


def _python_states() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "random": [version, list(internal), gauss],
        "numpy": [name, keys.tolist(), position, has_gauss, cached],  # type: ignore[union-attr]
    }


def _set_python_states(states: dict[str, Any]) -> None:
    version, internal, gauss = states["random"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, cached))  # noqa: NPY002


def _as_tensor(document: dict[str, Any]) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)


def _broadcast_int(value: int, device: torch.device) -> int:
    """The first rank's value, on every rank."""
    tensor = torch.tensor([value], dtype=torch.int64, device=device)
    dist.broadcast(tensor, src=0)
    return int(tensor.item())
