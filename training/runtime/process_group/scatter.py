"""Collectives of gloo whose end can be followed.

Gloo's reduce_scatter (torch 2.13) returns a work without a future: it is an all-reduce of a copy,
whose result is cut when somebody waits for it. So it is here, and the copy can be followed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Started = tuple[dist.Work, Callable[[], None]]


def start(group: Any, operation: str, arguments: Sequence[Any], *, rank: int, size: int) -> Started:
    """Begin a collective.

    Args:
        group: that runs it.
        operation: method of the group.
        arguments: of the method.
        rank: of this process in the group.
        size: number of ranks in it.

    Returns:
        The work, and what is to be done once it has succeeded.
    """
    if not operation.startswith("reduce_scatter"):
        return getattr(group, operation)(*arguments), lambda: None
    outputs, inputs, given = arguments
    if operation == "reduce_scatter_single":
        outputs, inputs = [outputs], [inputs]
    wholes = [_copy(one) for one in inputs]
    options = dist.AllreduceCoalescedOptions()
    if given is not None:
        options.reduceOp = given.reduceOp

    def cut() -> None:
        for output, whole in zip(outputs, wholes, strict=True):
            output.copy_(whole.view(size, -1)[rank].view_as(output))

    return group.allreduce_coalesced(wholes, options), cut


def _copy(given: Tensor | Sequence[Tensor]) -> Tensor:
    """One flat tensor, from the part of every rank or from the whole of them."""
    parts = [given] if isinstance(given, Tensor) else given
    return torch.cat([part.detach().reshape(-1) for part in parts])
