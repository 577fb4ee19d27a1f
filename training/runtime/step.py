"""One optimizer step as the training loop sees it.

`with step:` is left with every rank having applied the step, or by an exception with none
having applied it: the last thing before the optimizer runs is one small all-reduce that
carries the loss and every wish of the step boundary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from training.monitor.heartbeat import HeartbeatWriter
from training.runtime.errors import NotApplied, NumericAnomaly

MicroBatch = tuple[Tensor, Tensor]


class Scheduler(Protocol):
    """What the session needs of a learning rate scheduler."""

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


@dataclass(slots=True)
class Training:
    """What a program registered with its session."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler | None
    scaler: torch.amp.GradScaler | None
    grad_clip_norm: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know at a step boundary.

    Attributes:
        loss: mean over the global batch.
        stop: some rank was asked to end.
        save: the first rank wants a checkpoint.
    """

    loss: float
    stop: bool
    save: bool


@dataclass(frozen=True, slots=True)
class Wishes:
    """What this rank brings to the agreement of a step."""

    stop: bool
    save: bool


class Step:
    """One step, from its batch to its application. `number` counts it in, from 1."""

    def __init__(
        self,
        number: int,
        *,
        batch: Sequence[MicroBatch],
        training: Training,
        device: torch.device,
        wishes: Callable[[int], Wishes],
        heartbeat: HeartbeatWriter,
    ) -> None:
        self.number = number
        self.agreement: Agreement | None = None
        self.grad_norm = 0.0
        self._batch = batch
        self._training = training
        self._device = device
        self._wishes = wishes
        self._heartbeat = heartbeat
        self._loss_sum = torch.zeros((), device=device)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self.agreement is None:
            raise NotApplied(f"step {self.number}: the body ended without step.apply()")

    def batch(self) -> MicroBatch:
        """The batch of a step that has just one micro-batch, on the device.

        Raises:
            ValueError: the job accumulates gradients; use micro_batches().
        """
        if len(self._batch) != 1:
            raise ValueError(
                f"batch(): {len(self._batch)} micro-batches, loop over step.micro_batches()"
            )
        return next(self.micro_batches())

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Every micro-batch on the device; gradients are reduced with the last one only."""
        for index, (inputs, targets) in enumerate(self._batch):
            _reduce_gradients(self._training.model, when=index == len(self._batch) - 1)
            yield (
                inputs.to(self._device, non_blocking=True),
                targets.to(self._device, non_blocking=True),
            )

    def backward(self, loss: Tensor) -> None:
        """Backward of one micro-batch's mean loss, weighted so that the step is their mean."""
        share = loss / len(self._batch)
        self._loss_sum += share.detach()
        scaler = self._training.scaler
        (scaler.scale(share) if scaler is not None else share).backward()  # type: ignore[no-untyped-call]

    def apply(self) -> None:
        """Clip, agree, and let the optimizer run.

        Raises:
            NumericAnomaly: the loss or the gradients are not numbers; nothing has been applied.
        """
        training = self._training
        if training.scaler is not None:
            training.scaler.unscale_(training.optimizer)
        norm = _norm_value(
            nn.utils.clip_grad_norm_(training.model.parameters(), training.grad_clip_norm)
        )
        agreement = self._agree()
        if not math.isfinite(agreement.loss):
            raise NumericAnomaly(f"loss is {agreement.loss} at step {self.number}")
        # Reduced gradients: every rank sees the same norm. A scaler skips such a step by itself.
        if training.scaler is None and not math.isfinite(norm):
            raise NumericAnomaly(f"gradient norm is {norm} at step {self.number}")
        if training.scaler is not None:
            training.scaler.step(training.optimizer)
            training.scaler.update()
        else:
            training.optimizer.step()
        if training.scheduler is not None:
            training.scheduler.step()
        training.optimizer.zero_grad(set_to_none=True)
        self.grad_norm = norm
        self.agreement = agreement

    def _agree(self) -> Agreement:
        wishes = self._wishes(self.number)
        vote = torch.stack(
            [
                self._loss_sum.float(),
                torch.tensor(float(wishes.stop), device=self._device),
                torch.tensor(float(wishes.save), device=self._device),
            ]
        )
        self._heartbeat.enter_collective()
        dist.all_reduce(vote)
        loss_sum, stop, save = vote.tolist()
        self._heartbeat.leave_collective()
        return Agreement(loss_sum / dist.get_world_size(), stop > 0, save > 0)


def _norm_value(norm: Tensor) -> float:
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _reduce_gradients(model: nn.Module, *, when: bool) -> None:
    """Switch the gradient reduction of the coming backward on or off."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = when
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(when)
