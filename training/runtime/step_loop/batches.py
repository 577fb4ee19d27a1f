"""Micro-batches of any form: what a loader may return for a step, and the way to the device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from perdure.training.errors import InputError
from perdure.training.runtime.program import MicroBatch


def checked(given: Any) -> Sequence[MicroBatch]:
    """What a loader returned for a step, if it is a list of micro-batches.

    Raises:
        InputError: it is one batch, whose parts would be taken for micro-batches, or nothing.
    """
    is_pair = isinstance(given, tuple) and all(isinstance(one, Tensor) for one in given)
    if isinstance(given, (list, tuple)) and given and not is_pair:
        return given
    what = "nothing" if given is None else f"an empty {type(given).__name__}"
    if is_pair and given:
        what = "a tuple of tensors"
    elif not isinstance(given, (list, tuple, type(None))):
        what = f"a {type(given).__name__}"
    raise InputError(
        "session.register(data=...)",
        f"next_step() returned {what}: it returns the list of this rank's micro-batches of a "
        "step, [(inputs, targets)] for one",
    )


def on_device(batch: Any, device: torch.device) -> Any:
    """The same structure with its tensors on a device; what holds no tensor stays as it is.

    Tensors, mappings, lists, tuples and dataclasses of them, and whatever has a method `to`, as
    the batches of tokenizers have.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, MutableMapping):
        moved = copy.copy(batch)  # of the same type
        moved.update((key, on_device(value, device)) for key, value in batch.items())
        return moved
    if isinstance(batch, (list, tuple)):
        parts = [on_device(one, device) for one in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = (field.name for field in dataclasses.fields(batch) if field.init)
        return dataclasses.replace(
            batch, **{name: on_device(getattr(batch, name), device) for name in fields}
        )
    return batch
