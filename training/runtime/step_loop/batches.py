"""Micro-batches of any form, brought to the device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor


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
