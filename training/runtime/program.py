"""What a user's program registers with its session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

MicroBatch = tuple[Tensor, Tensor]  # inputs and targets


class Scheduler(Protocol):
    """A learning rate scheduler, as the session uses it."""

    def step(self) -> None:
        """Advance by one optimizer step."""
        ...

    def get_last_lr(self) -> Sequence[float | Tensor]:
        """Learning rate per parameter group."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Restore `state_dict`."""
        ...


class Loader(Protocol):
    """A resumable data loader, as the session uses it."""

    @property
    def position(self) -> int:
        """Global samples handed out."""
        ...

    @property
    def epoch(self) -> int:
        """Epoch of the next sample, from 0."""
        ...

    def next_step(self) -> Sequence[MicroBatch]:
        """The micro-batches of this rank for one step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-able position."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        ...

    def close(self) -> None:
        """End the worker processes."""
        ...


@dataclass(slots=True)
class Training:
    """What a program registered with its session."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler | None
    scaler: torch.amp.GradScaler | None
    loader: Loader
    grad_clip_norm: float
