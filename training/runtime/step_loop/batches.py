"""Micro-batches of any form: what a loader may return for a step, and the way to the device.

Programs that accumulate gradients by hand divide their losses by the number of micro-batches, as
the step does itself. Done twice, the gradient is too small by that number; clipping and adaptive
optimizers hide it, so that nothing but a slower curve shows it: `DivisionCheck` warns.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from perdure.training.errors import InputError
from perdure.training.runtime.program import MicroBatch


def checked(batches: Any) -> Sequence[MicroBatch]:
    """Check that a loader returned a list of micro-batches for a step.

    Raises:
        InputError: it is one batch, whose parts would be taken for micro-batches, or nothing.
    """
    is_pair = isinstance(batches, tuple) and all(isinstance(item, Tensor) for item in batches)
    if isinstance(batches, (list, tuple)) and batches and not is_pair:
        return batches
    kind = "nothing" if batches is None else f"an empty {type(batches).__name__}"
    if is_pair and batches:
        kind = "a tuple of tensors"
    elif not isinstance(batches, (list, tuple, type(None))):
        kind = f"a {type(batches).__name__}"
    raise InputError(
        "session.register(data=...)",
        f"next_step() returned {kind}: it returns the list of this rank's micro-batches of a "
        "step, [(inputs, targets)] for one",
    )


def on_device(batch: Any, device: torch.device) -> Any:
    """Move the tensors of a structure to a device; parts without tensors stay as they are.

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
        parts = [on_device(part, device) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = (field.name for field in dataclasses.fields(batch) if field.init)
        return dataclasses.replace(
            batch, **{name: on_device(getattr(batch, name), device) for name in fields}
        )
    return batch


_log = logging.getLogger("perdure.runtime")

# An example in each of the first steps is enough, and reading a divisor may wait for the device.
MAX_LOOKS = 8


class DivisionCheck:
    """Looks at the first losses of a process, and warns once.

    Args:
        notice: takes what is wrong, beside the log of the process.
    """

    def __init__(self, notice: Callable[[str], None] = lambda _: None) -> None:
        self._notice = notice
        self._left = MAX_LOOKS

    def check(self, loss: Tensor, num_micro_batches: int) -> None:
        """Warn if the last thing that was done to the loss is the division."""
        if self._left == 0 or num_micro_batches == 1:
            return
        self._left -= 1
        divisor = divisor_of(loss)
        if divisor is None or not math.isclose(divisor, num_micro_batches):
            return
        self._left = 0
        text = (
            f"the loss given to step.backward() was divided by {num_micro_batches}, the number of "
            "micro-batches of a step, and step.backward() divides by it as well: if that is the "
            "accumulation of gradients, leave the division out, or the gradient is too small"
        )
        _log.warning(text)
        self._notice(text)


def divisor_of(loss: Tensor) -> float | None:
    """Find the number that a tensor was divided by last, as autograd recorded it; None: none."""
    node = loss.grad_fn
    kind = type(node).__name__
    if kind not in {"DivBackward0", "MulBackward0"}:
        return None
    other = getattr(node, "_saved_other", None)
    if not isinstance(other, Tensor) or other.numel() != 1 or other.requires_grad:
        return None
    value = float(other)
    if kind == "DivBackward0":
        return value
    return 1.0 / value if value else None
