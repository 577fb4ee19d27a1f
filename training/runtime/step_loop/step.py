"""One optimizer step as the training loop sees it.

`with step:` is left with every rank having applied the step, or by an exception with none
having applied it: the last thing before the optimizer runs is one small all-reduce that
carries the loss and every request for the step boundary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from perdure.training.injection.inside import WorkerInjector
from perdure.training.liveness.heartbeat import HeartbeatWriter
from perdure.training.recovery.consistency import NOTHING, Cause, find_difference, is_due
from perdure.training.recovery.repair import StepPhase, Vote
from perdure.training.runtime.errors import (
    NotApplied,
    NumericAnomaly,
    RanksDiffer,
    SilentCorruption,
)
from perdure.training.runtime.program import MicroBatch, Training
from perdure.training.runtime.step_loop.batches import DivisionCheck, on_device
from perdure.training.runtime.step_loop.fingerprint import fingerprint, hashes_of, slots


@dataclass(frozen=True, slots=True)
class StepRequests:
    """Requests of this rank for the step boundary; the vote carries them to the others."""

    stop: bool
    save: bool
    pause: bool = False


MIN_SCALE = 1.0  # below it a scaler only makes losses smaller


@dataclass(frozen=True, slots=True)
class Limits:
    """From which on a step is abnormal; None: only what is not a number is.

    Attributes:
        loss: mean over the global batch.
        grad_norm: before clipping. MindFormers' global_norm_spike_threshold: a norm that reaches
            it is abnormal (`global_norm >= threshold`, core/callback/callback.py).
    """

    loss: float | None = None
    grad_norm: float | None = None

    def refusal(self, vote: Vote, *, has_scaler: bool) -> str | None:
        """Explain why a step is abnormal, None while it is not. The same on every rank.

        Args:
            vote: of the step.
            has_scaler: whether a scaler skips a step of infinite gradients by itself.
        """
        if has_scaler and not math.isfinite(vote.grad_norm):
            return None
        if not math.isfinite(vote.loss):
            return f"loss is {vote.loss}"
        if not math.isfinite(vote.grad_norm):
            return f"gradient norm is {vote.grad_norm}"
        if self.loss is not None and vote.loss >= self.loss:
            return f"loss is {vote.loss:g}, the limit is {self.loss:g}"
        if self.grad_norm is not None and vote.grad_norm >= self.grad_norm:
            return f"gradient norm is {vote.grad_norm:g}, the limit is {self.grad_norm:g}"
        return None


@dataclass(slots=True)
class Comparison:
    """Which steps have ranks compare what they should hold alike.

    Attributes:
        groups: ranks that hold the same shards, every rank in one of them.
        every_steps: between two comparisons; 0: none.
        aligned_at: newest step from which all ranks began together.
        is_split: ranks of different groups have different parts of the model.
        notice: takes that nothing was compared, once.
    """

    groups: Sequence[Sequence[int]]
    every_steps: int
    aligned_at: int = 0
    is_split: bool = False
    notice: Callable[[str], None] = lambda _: None
    _is_noticed: bool = False

    def is_due(self, step: int) -> bool:
        """Whether a step is compared. The same on every rank."""
        is_alone = len(self.groups) == 1 and len(self.groups[0]) == 1
        due = is_due(step, aligned_at=self.aligned_at, every_steps=self.every_steps)
        return due and not is_alone

    def check(self, voted: Sequence[float], step: int) -> None:
        """Compare what all ranks have brought to a vote.

        Raises:
            RanksDiffer: the program trains differently on each rank.
            SilentCorruption: values have changed on a rank.
        """
        hashes = hashes_of(voted)
        if hashes[0] == NOTHING and not self._is_noticed:
            self._is_noticed = True
            self.notice(
                f"no values of the ranks were compared at step {step}: no parameter that they "
                "have alike has a gradient in .grad; a silent corruption is seen where "
                "session.register(compare=...) returns the gradients and the optimizer's copies"
            )
        difference = find_difference(hashes, self.groups, step=step, aligned_at=self.aligned_at)
        if difference is None:
            return
        if difference.cause is Cause.PROGRAM:
            raise RanksDiffer(difference.text)
        raise SilentCorruption(difference.text, culprits=difference.culprits)


@dataclass(frozen=True, slots=True)
class StepContext:
    """Common context of a loop's steps.

    Attributes:
        training: what is trained.
        device: the rank's accelerator, or the CPU.
        heartbeat: takes the time of the vote.
        faults: injects the faults of a drill.
        requests: this rank's for the boundary after a step, by its number.
        is_recoverable: whether recovery handles an exception that leaves the step.
        limits: from which on a step is abnormal.
        skips: an abnormal step is left, and its batch with it; else it is an error.
        division: warns of losses that are divided twice.
        comparison: compares the ranks' values.
        settle: waits for the optimizer where a recovery would cut it short.
    """

    training: Training
    device: torch.device
    heartbeat: HeartbeatWriter
    faults: WorkerInjector
    requests: Callable[[int], StepRequests]
    is_recoverable: Callable[[BaseException], bool]
    limits: Limits
    comparison: Comparison
    skips: bool = False
    division: DivisionCheck = field(default_factory=DivisionCheck)
    settle: Callable[[], None] = lambda: None


class Step:
    """One step, from its batch to its application. `number` counts it in, from 1.

    Attributes:
        data: its micro-batches, on the host.
        vote: what all ranks agreed on, None before.
        phase: how far this rank is in it.
        is_applied: the optimizer has run.
        is_skipped: it was abnormal: nothing is applied, and no rank trains on its batch.
        is_dirty: the optimizer is running: the state belongs to no step.
        error: a fault that left the step undone, for the loop to recover from.
    """

    def __init__(self, number: int, data: Sequence[MicroBatch], context: StepContext) -> None:
        self.number = number
        self.data = data
        self.vote: Vote | None = None
        self.phase = StepPhase.RUN
        self.is_applied = False
        self.is_skipped = False
        self.is_dirty = False
        self.error: BaseException | None = None
        self._training = context.training
        self._context = context
        self._loss_sum = torch.zeros((), device=context.device)
        self._has_loss = False
        self._factor: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            if not self.is_applied and not self.is_skipped:
                raise NotApplied(f"step {self.number}: the body ended without step.apply()")
            return False
        if not self._context.is_recoverable(error):
            return False
        # Its frames hold tensors and groups of the broken step.
        error.__traceback__ = None
        self.error = error
        return True

    def batch(self) -> MicroBatch:
        """Return the batch of a step with a single micro-batch, on the device.

        Raises:
            ValueError: the job accumulates gradients; use micro_batches().
        """
        if len(self.data) != 1:
            raise ValueError(
                f"batch(): {len(self.data)} micro-batches, loop over step.micro_batches()"
            )
        return next(self.micro_batches())

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches on the device; gradients are reduced with the last alone."""
        self._reached("start")  # not on entering: __exit__ does not handle its errors
        for index, batch in enumerate(self.data):
            _reduce_gradients(self._training.model, when=index == len(self.data) - 1)
            yield on_device(batch, self._context.device)

    def backward(self, loss: Tensor) -> None:
        """Run backward on a micro-batch's mean loss, weighted so that the step is their mean."""
        self._reached("backward")
        self._context.division.check(loss, len(self.data))
        share = self.drilled(loss / len(self.data))
        self._count(share)
        scaler = self._training.scaler
        (scaler.scale(share) if scaler is not None else share).backward()  # type: ignore[no-untyped-call]

    def drilled(self, loss: Tensor) -> Tensor:
        """Return the loss as a drill has it, for a program that runs backward by itself."""
        if self._factor is None:  # one for all micro-batches
            self._factor = self._context.faults.loss_factor(self.number)
        return loss if self._factor == 1.0 else loss * self._factor

    def report_loss(self, loss: Tensor) -> None:
        """Report the mean loss of a step whose pipeline schedule runs backward by itself.

        Ranks of stages that have no loss report none.
        """
        self._reached("backward")
        self._count(loss)

    def _count(self, loss: Tensor) -> None:
        self._loss_sum += loss.detach().to(self._loss_sum.device)
        self._has_loss = True

    def apply(self) -> None:
        """Clip, agree, and let the optimizer run, unless the step is to be skipped.

        Raises:
            NumericAnomaly: loss or gradients are abnormal; nothing has been applied.
            RanksDiffer: the ranks train different models.
            SilentCorruption: a rank's values have changed.
        """
        if (vote := self.agree()) is not None:
            self.finish(vote)

    def agree(self) -> Vote | None:
        """Clip, and agree with all ranks that the optimizer is to run; None: it is not.

        For a program that runs the optimizer itself afterwards.

        Raises:
            NumericAnomaly: as `apply` does, and its other errors.
        """
        training = self._training
        if training.scaler is not None:
            for optimizer in training.optimizers:
                training.scaler.unscale_(optimizer)
        is_compared = self._context.comparison.is_due(self.number)
        hashes = (
            fingerprint(
                training.model,
                self._context.device,
                is_split=self._context.comparison.is_split,
                further=training.compare(),
            )
            if is_compared
            else None
        )
        norm = _norm_value(_clip(training))
        self.phase = StepPhase.PREPARED
        self._reached("prepared")
        self.vote = self._agree(norm, hashes)
        has_scaler = _may_skip(training.scaler, self.vote)
        refused = self._context.limits.refusal(self.vote, has_scaler=has_scaler)
        if refused is not None and self._context.skips:
            self._skip()
            return None
        if refused is not None:
            raise NumericAnomaly(f"{refused} at step {self.number}")
        self.phase = StepPhase.VOTED
        self._reached("voted")
        return self.vote

    def _skip(self) -> None:
        """Leave the state as it was before the batch; every rank has had the same vote."""
        training = self._training
        training.zero_grad()
        if training.scaler is not None:
            training.scaler._per_optimizer_states.clear()  # noqa: SLF001 update() changes the scale
        self.phase, self.is_skipped = StepPhase.RUN, True

    def finish(self, vote: Vote | None) -> None:
        """Let the optimizer run on this rank's gradient, once: all ranks hold theirs."""
        if self.is_applied:  # a fault cut short what the program does behind apply()
            return
        training = self._training
        self.vote = vote or self.vote
        self.phase, self.is_dirty = StepPhase.APPLYING, True
        self._reached("applying")
        self._run_optimizers()
        self._reached("half_applied")
        for scheduler in training.schedulers:
            scheduler.step()
        training.zero_grad()
        training.on_applied()
        self._context.settle()
        self.is_dirty, self.is_applied = False, True
        self._reached("applied")

    def _run_optimizers(self) -> None:
        if self._training.optimize is not None:
            self._training.optimize()
            return
        scaler = self._training.scaler
        for optimizer in self._training.optimizers:
            if scaler is not None:
                scaler.step(optimizer)
            else:
                optimizer.step()
        if scaler is not None:
            scaler.update()

    def _reached(self, point: str) -> None:
        self._context.faults.reached(point, self.number)

    def _agree(self, norm: float, hashes: Tensor | None) -> Vote:
        requests = self._context.requests(self.number)
        # The norm is the first rank's: between replica groups its last bit may differ, and all
        # ranks have to find the same step abnormal.
        own_norm = norm if dist.get_rank() == 0 else 0.0
        flags = [float(requests.stop), float(requests.save), float(requests.pause), own_norm]
        flags.append(float(self._has_loss))
        # One copy to the device for everything from the host. The number of ranks whose loss is
        # abnormal, and the sum of those ranks, name the culprit where it is the only one.
        peer_sums = torch.tensor([*flags, 1.0, float(dist.get_rank())], device=self._context.device)
        own_loss = self._loss_sum.float().reshape(1)
        peer_sums[len(flags) :] *= self._is_abnormal(own_loss)
        vote = torch.cat([own_loss, peer_sums, *self._slots(norm, hashes)])
        began_ns = time.monotonic_ns()
        dist.all_reduce(vote)
        loss_sum, stop, save, pause, norm, num_losses, *others_found = vote.tolist()
        num_culprits, culprits, *compared = others_found
        self._context.heartbeat.record_vote(time.monotonic_ns() - began_ns)
        if compared:
            self._context.comparison.check(compared, self.number)
        return Vote(
            step=self.number,
            loss=loss_sum / max(1.0, num_losses),
            grad_norm=norm,
            stop=stop > 0,
            save=save > 0,
            pause=pause > 0,
            culprit=int(culprits) if num_culprits == 1 else None,
            lr=self._training.lr,
        )

    def _slots(self, norm: float, hashes: Tensor | None) -> list[Tensor]:
        """Return this rank's hashes, in a step that is compared."""
        if hashes is None:
            return []
        rank, world_size = dist.get_rank(), dist.get_world_size()
        return [slots(hashes, rank=rank, world_size=world_size, is_finite=math.isfinite(norm))]

    def _is_abnormal(self, own_loss: Tensor) -> Tensor:
        """Whether this rank's own loss is, as a tensor: the host does not wait for the device."""
        is_abnormal = ~own_loss.isfinite()
        if self._context.limits.loss is not None:
            is_abnormal |= own_loss >= self._context.limits.loss
        return is_abnormal


def _may_skip(scaler: torch.amp.GradScaler | None, vote: Vote) -> bool:
    """Whether a scaler handles a step of infinite gradients.

    Halved at every such step, its scale shows whether losses stay infinite whatever it is.
    """
    if scaler is None or not scaler.is_enabled():
        return False
    return math.isfinite(vote.loss) or scaler.get_scale() >= MIN_SCALE


def _clip(training: Training) -> Tensor | float:
    if training.clip is not None:
        return training.clip()
    return nn.utils.clip_grad_norm_(training.model.parameters(), training.grad_clip_norm)


def _norm_value(norm: Tensor | float) -> float:
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _reduce_gradients(model: nn.Module, *, when: bool) -> None:
    """Switch the gradient reduction of the coming backward on or off."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = when
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(when)
