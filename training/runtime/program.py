"""Parts of a user's program, as it registers them with its session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

MicroBatch = Any  # inputs and targets, or whatever the program's loader puts together


class Scheduler(Protocol):
    """A learning rate scheduler, as the session uses it."""

    def step(self) -> None:
        """Advance by one optimizer step."""
        ...

    def get_last_lr(self) -> Sequence[float | Tensor]:
        """Return the learning rate per parameter group."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
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
        """Return this rank's micro-batches of a step: tensors, or tuples or mappings of them."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        ...

    def close(self) -> None:
        """End the worker processes."""
        ...


class Stateful(Protocol):
    """State that a program keeps beside model and optimizer, as the session uses it."""

    def state_dict(self) -> Any:
        """Return tensors, numbers, text and None, in dicts, lists and tuples."""
        ...

    def load_state_dict(self, state: Any) -> Any:
        """Restore `state_dict`; tensors may be on the host, and may be those of the state."""
        ...


@dataclass(slots=True)
class Training:
    """Parts of a training that a program registered with its session.

    Attributes:
        optimizers: each with parameters of its own; all of them run in every step.
        schedulers: they set the optimizers' learning rates.
        clip: clips the gradients of all ranks and returns their norm before it; None: torch does.
        optimize: lets the optimizers and the scaler run, by a program's own way; None: torch's.
        state: further parts of the state, by name, alike on ranks that are replicas.
        on_applied: runs once for each step that is applied, behind optimizers and schedules.
        reset: makes the program ready to begin a step again, whatever an interrupted step left.
        compare: returns further tensors that replicas have alike once gradients are reduced.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    schedulers: Sequence[Scheduler]
    scaler: torch.amp.GradScaler | None
    loader: Loader
    grad_clip_norm: float
    clip: Callable[[], Tensor | float] | None = None
    optimize: Callable[[], None] | None = None
    state: Mapping[str, Stateful] = field(default_factory=dict)
    on_applied: Callable[[], None] = lambda: None
    reset: Callable[[], None] = lambda: None
    compare: Callable[[], Iterable[Tensor]] = tuple

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def lr(self) -> float:
        """The learning rate of the first group of the first optimizer, for records."""
        return float(self.param_groups[0]["lr"])

    @property
    def has_optimizer_state(self) -> bool:
        """Whether any optimizer keeps something; none does before the first step."""
        return any(optimizer.state for optimizer in self.optimizers)

    def kept_tensors(self) -> Iterator[Tensor]:
        """Tensors that the optimizers keep."""
        states = chain.from_iterable(optimizer.state.values() for optimizer in self.optimizers)
        values = chain.from_iterable(state.values() for state in states)
        return (value for value in values if isinstance(value, Tensor))

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
