"""The loop of a transformers Trainer, its steps being those of a session.

Methods of the one Trainer are replaced by methods that call them. A step, from its first forward
to the agreement of all ranks, runs as a whole when the Trainer asks for its first micro-batch; a
fault in it is recovered from, and it runs again. The Trainer clips nothing then, and lets its
optimizer run as ever. Written against transformers 5.24 and accelerate 1.15. Steps are completed
optimizer steps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import transformers
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn

from perdure.integrations.accelerate_data import set_epoch
from perdure.integrations.framework_steps import FrameworkSteps
from perdure.integrations.sharding import shard_on_cpu
from perdure.integrations.trainer_data import EpochEnded, TrainerData
from perdure.integrations.trainer_settings import check_settings, check_training
from perdure.training.liveness.heartbeat import Phase
from perdure.training.runtime.session import Session
from perdure.training.runtime.state.random_numbers import seed_epoch
from perdure.training.runtime.step_loop.step import Step

REPLACED = (
    "set_initial_training_values",
    "_prepare_for_training",
    "_run_epoch",
    "get_batch_samples",
    "training_step",
    "compute_loss",
    "_clip_grad_norm",
    "_get_grad_norm",
    "_load_rng_state",
    "store_flos",
    "_finalize_training",
)
PHASES = {"evaluate": Phase.EVALUATE, "predict": Phase.EVALUATE, "_save_checkpoint": Phase.SAVE}
# Fields of TrainerState that a checkpoint has; the step is the session's.
KEPT = (
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
    "total_flos",
    "num_input_tokens_seen",
)


class TrainerLoop:
    """Drives one Trainer's steps through its session.

    Args:
        session: of this process.
        trainer: before it trains.
    """

    def __init__(self, session: Session, trainer: Any) -> None:
        check_settings(session, trainer)
        _shard(trainer)
        if trainer.args.max_steps < 0:
            trainer.args.max_steps = session.job.steps
        self._session = session
        self._trainer = trainer
        self._own: dict[str, Any] = {}  # methods of the Trainer
        self._steps = FrameworkSteps(session, completed=lambda: int(trainer.state.global_step))
        self._data: TrainerData | None = None
        self._losses: list[Tensor] = []
        self._num_items: Any = None
        self._counted: Step | None = None

    def attach(self) -> None:
        """Replace the Trainer's methods."""
        for name in REPLACED:
            self._own[name] = getattr(self._trainer, name)
            setattr(self._trainer, name, getattr(self, name.lstrip("_")))
        for name, phase in PHASES.items():
            self._own[name] = getattr(self._trainer, name)
            setattr(self._trainer, name, partial(self._steps.during, phase, self._own[name]))
        self._trainer.args.ignore_data_skip = False  # skipping reads no data
        # Its log gathers losses; those that it is given are the mean of all ranks. A fault in a
        # collective between two steps would cost a restart.
        transformers.trainer.nested_gather = _as_they_are

    @property
    def data(self) -> TrainerData:
        """The position, once the model is prepared."""
        assert self._data is not None  # noqa: S101 no step comes before
        return self._data

    def set_initial_training_values(self, *given: Any) -> Any:
        """As the Trainer has them, but for its number of epochs, which nothing may end at.

        Steps that were done on another number of ranks had another share of an epoch.
        """
        _, *values = self._own["set_initial_training_values"](*given)
        max_steps = values[-1]
        return max_steps, *values  # each epoch has a step

    def prepare_for_training(self, max_steps: int, train_dataloader: Any, resume: Any) -> Any:
        """Once model and optimizer are wrapped: restore them, or take another process's place."""
        trainer, session = self._trainer, self._session
        check_training(session.job, max_steps, resume, train_dataloader, DataLoaderDispatcher)
        prepared = self._own["_prepare_for_training"](max_steps, train_dataloader, resume)
        model, _ = prepared
        args = trainer.args
        limit = args.max_grad_norm or math.inf
        own_length = max_steps * args.gradient_accumulation_steps
        length = _length(train_dataloader)
        self._data = TrainerData(
            setting="per_device_train_batch_size",
            samples_per_batch=args.train_batch_size * args.world_size,
            batches_in_epoch=length or own_length,
            # The Trainer applies no such step; it would carry its gradients into the next epoch.
            only_whole=not length,
            alone=session.alone,
            kept=lambda: {name: getattr(trainer.state, name) for name in KEPT},
        )
        session.register(
            model=model,
            optimizer=trainer.optimizer.optimizer,
            data=self._data,
            scheduler=trainer.lr_scheduler,
            scaler=trainer.accelerator.scaler,
            clip=lambda: nn.utils.clip_grad_norm_(model.parameters(), limit),
        )
        self._steps.open(until=max_steps)
        self._restore_state()
        return prepared

    def _restore_state(self) -> None:
        state, data = self._trainer.state, self.data
        state.global_step = self._steps.loop.state.step
        state.epoch = data.epoch + data.batches / data.batches_in_epoch
        for name, value in data.restored.items():
            setattr(state, name, value)

    def run_epoch(self, **given: Any) -> None:
        """An epoch, or what is left of it; nothing of one that was trained before."""
        trainer, data, epoch = self._trainer, self.data, given["epoch"]
        if trainer.state.global_step >= trainer.state.max_steps:
            trainer.control.should_training_stop = True
            return
        if epoch < data.epoch:
            return
        data.begin_epoch(epoch)
        set_epoch(given["train_dataloader"], epoch)
        seed_epoch(self._session.job.seed, epoch=epoch)
        if data.batches:
            given["resume_from_checkpoint"] = "perdure"
            given["epochs_trained"] = epoch
            given["steps_trained_in_current_epoch"] = data.batches
        self._own["_run_epoch"](**given)

    def load_rng_state(self, _checkpoint: Any) -> None:
        """Nothing: every step is seeded by its number."""

    def store_flos(self) -> None:
        """Take the operations of all ranks for those of this one times their number."""
        trainer = self._trainer
        trainer.state.total_flos += trainer.current_flos * self._session.world_size
        trainer.current_flos = 0

    def get_batch_samples(self, iterator: Iterator[Any], count: int, device: Any) -> Any:
        """The batches of the next step; saves, pauses and ends come before them."""
        self.data.draw_from(iterator, count)
        try:
            self._steps.begin()
        except EpochEnded:
            return [], None
        self._losses = []
        self._in_step(partial(self._count, device))
        return list(self._steps.step.data), self._num_items

    def _count(self, device: Any) -> None:
        """How many tokens have a label, on all ranks."""
        count = self._trainer._get_num_items_in_batch  # noqa: SLF001 there is no public way
        self._counted = self._steps.step
        self._num_items = count(list(self._counted.data), device)

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """A share of the step's mean loss; the first call of a step runs all micro-batches."""
        del inputs, num_items_in_batch  # the step has them
        if not self._losses:
            self._in_step(partial(self._run_step, model))
            self._steps.measure(self._steps.step.data)
            count, vote = len(self._steps.step.data), self._steps.step.vote
            assert vote is not None  # noqa: S101 the step has come to its end
            share = torch.tensor(vote.loss / count, device=self._trainer.args.device)
            self._losses = [share] * count
        return self._losses.pop()

    def _run_step(self, model: nn.Module) -> None:
        step = self._steps.step
        if self._counted is not step:
            self._count(self._trainer.args.device)
        for inputs in step.micro_batches():
            # The Trainer takes labels out of its inputs; the step may come again.
            loss = self._own["training_step"](model, copy.copy(inputs), self._num_items)
            step.report_loss(loss)
        step.agree()

    def compute_loss(self, model: nn.Module, *given: Any, **named: Any) -> Any:
        """The Trainer's own, as drills have it."""
        found = self._own["compute_loss"](model, *given, **named)
        if not model.training or not self._steps.has_begun:
            return found
        if isinstance(found, tuple):
            return self._steps.step.drilled(found[0]), *found[1:]
        return self._steps.step.drilled(found)

    def _in_step(self, work: Any) -> None:
        """Do a part of the step under way, as often as faults have it done again."""
        if self._steps.run(work):
            self._apply_nothing()

    def _apply_nothing(self) -> None:
        """All ranks were brought behind the step that the Trainer would apply."""
        trainer = self._trainer
        trainer.optimizer, trainer.lr_scheduler = (
            _Applied(trainer.optimizer),
            _Applied(trainer.lr_scheduler),
        )

    def clip_grad_norm(self, _model: nn.Module) -> float | None:
        """The norm before clipping; the gradients are clipped already."""
        vote = self._steps.step.vote
        return vote.grad_norm if vote is not None else None

    def get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float | None:
        """The same, where nothing is clipped."""
        del grad_norm
        return self.clip_grad_norm(model)

    def applied(self) -> None:
        """The Trainer has let its optimizer and scheduler run."""
        trainer = self._trainer
        if isinstance(trainer.optimizer, _Applied):
            trainer.optimizer = trainer.optimizer.inner
            trainer.lr_scheduler = trainer.lr_scheduler.inner
        elif self._steps.has_begun:
            self._steps.step.is_applied = True

    def finalize_training(self, *given: Any) -> Any:
        """Save the last step and wait for the store, before the Trainer may load another model."""
        self._steps.finish(at=self._trainer.state.global_step)
        return self._own["_finalize_training"](*given)


def _shard(trainer: Any) -> None:
    """Have the Trainer wrap its model as its arguments say, also on the CPU."""
    if trainer.args.fsdp_plugin_args is None:
        return
    plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    shard_on_cpu(trainer.accelerator, plugin)
    trainer.is_fsdp_enabled = True


def _as_they_are(tensors: Tensor, *_: Any) -> Tensor:
    return tensors


class _Applied:
    """An optimizer or a scheduler whose next step has been taken."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self) -> None:
        """Nothing."""


def _length(dataloader: Any) -> int:
    try:
        return len(dataloader)
    except TypeError:  # of an IterableDataset
        return 0
