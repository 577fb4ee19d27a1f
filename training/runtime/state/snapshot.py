"""The last good step in the host's memory, to go back to when a step comes out abnormal.

Two buffers: the older one is written, and offered only once it is whole. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


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

    @property
    def step(self) -> int | None:
        """Completed steps in the newest copy, None without one."""
        return self._copies[self._newest].step if self._newest is not None else None

    @property
    def size_bytes(self) -> int:
        """Of all buffers."""
        return sum(t.nbytes for one in self._copies for t in one.tensors)

    def take(self, step: int, tensors: Mapping[str, Tensor], extra: dict[str, Any]) -> None:
        """Copy the state of a step.

        Args:
            step: completed steps.
            tensors: by name; other names than the last time make the older copies void.
            extra: everything else; kept as it is given.
        """
        if (names := tuple(tensors)) != self._names:
            self._names, self._newest = names, None
            self._copies.clear()
        live = [_local(tensor) for tensor in tensors.values()]
        if len(self._copies) < 2:
            self._copies.append(_Copy([_on_host(one) for one in live]))
        free = 0 if self._newest is None else 1 - self._newest
        copy = self._copies[free]
        torch._foreach_copy_(copy.tensors, live)
        copy.step, copy.extra = step, extra
        self._newest = free

    @property
    def extra(self) -> dict[str, Any]:
        """What the newest copy was given beside its tensors."""
        return self._copies[self._newest_index].extra

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put the newest copy back into these tensors."""
        live = [_local(tensors[name]) for name in self._names]
        with torch.no_grad():
            torch._foreach_copy_(live, self._copies[self._newest_index].tensors)

    @property
    def _newest_index(self) -> int:
        assert self._newest is not None  # noqa: S101 asked for only where `step` is told
        return self._newest


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _on_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
