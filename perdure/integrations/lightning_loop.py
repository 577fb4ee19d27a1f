"""The fit loop of a Lightning Trainer, its steps being those of a session.

Methods of the one Trainer and of its loops are replaced by methods that call them. A step runs as
a whole with its last micro-batch, from the first forward to the optimizer and its schedulers; a
fault in it is recovered from, and it runs again. Written against lightning 2.6. Steps are
completed optimizer steps.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn

from perdure.integrations.framework_steps import FrameworkSteps
from perdure.integrations.lightning_data import HostBatch, StepBatches, host_batches, place_loader
from perdure.integrations.lightning_settings import (
    check_checkpoint,
    check_data,
    check_optimizer,
    check_trainer,
)
from perdure.integrations.trainer_data import EpochEnded, TrainerData
from perdure.training.errors import InputError
from perdure.training.liveness.heartbeat import Phase
from perdure.training.runtime.session import Session
from perdure.training.runtime.state.random_numbers import seed_epoch, seed_step

_EPOCH_LOOP = "fit_loop.epoch_loop"
# Method here: object, by its path from the Trainer, and its method.
REPLACED: Mapping[str, tuple[str, str]] = {
    "register_signals": ("_signal_connector", "register_signal_handlers"),
    "restore_checkpoint": ("_checkpoint_connector", "_restore_modules_and_callbacks"),
    "prepare_loader": ("_data_connector", "_prepare_dataloader"),
    "run_optimizer": ("precision_plugin", "optimizer_step"),
    "fit": ("fit_loop", "run"),
    "begin_fit": ("fit_loop", "on_run_start"),
    "end_fit": ("fit_loop", "on_run_end"),
    "begin_epoch": ("fit_loop", "on_advance_start"),
    "begin_batches": (_EPOCH_LOOP, "on_run_start"),
    "run_batch": (_EPOCH_LOOP, "advance"),
    "ask_for_signals": (_EPOCH_LOOP, "_broadcast_sigterm_tensor"),
    "update_schedulers": (_EPOCH_LOOP, "update_lr_schedulers"),
    "train_batch": (f"{_EPOCH_LOOP}.automatic_optimization", "run"),
}
PHASES: Mapping[Phase, tuple[str, str]] = {
    Phase.EVALUATE: (f"{_EPOCH_LOOP}.val_loop", "run"),
    Phase.SAVE: ("", "save_checkpoint"),
}


class LightningLoop:
    """Drives one Trainer's fit through its session.

    Args:
        session: of this process.
        trainer: before its model is wrapped.
        module: the LightningModule.
    """

    def __init__(self, session: Session, trainer: Any, module: Any) -> None:
        check_trainer(session, trainer, module)
        self._session = session
        self._trainer = trainer
        self._module = module
        self._fit = trainer.fit_loop
        self._epoch = trainer.fit_loop.epoch_loop
        self._own: dict[str, Any] = {}  # methods of the Trainer
        self._completed = 0
        self._steps = FrameworkSteps(session, completed=lambda: self._completed)
        self._data: TrainerData | None = None
        self._is_placed = False
        self._joins = False
        self._is_finished = False
        self._host: Iterator[HostBatch] = iter(())
        self._batches = StepBatches(self._begin_step)
        self._is_undone = False
        self._collected: list[Any] = []
        self._indices: list[int] = []
        self._logged: dict[str, dict[str, Any]] = {}
        self._forward: Any = None
        self._outputs: dict[str, Any] = {}

    def attach(self) -> None:
        """Replace the Trainer's methods, and give it the job's target."""
        for name, (path, method) in REPLACED.items():
            target = _at(self._trainer, path)
            self._own[name] = getattr(target, method)
            setattr(target, method, getattr(self, name))
        for phase, (path, method) in PHASES.items():
            target = _at(self._trainer, path)
            setattr(target, method, partial(self._steps.during, phase, getattr(target, method)))
        self._epoch.max_steps = self._session.job.steps
        self._fit.max_epochs = -1
        context = self._session.context
        if (context.placement, context.attempt, context.generation) != (1, 1, None):
            self._trainer.num_sanity_val_steps = 0  # the first attempt has had it

    @property
    def data(self) -> TrainerData:
        """The position, once the fit has begun."""
        assert self._data is not None  # noqa: S101 no step comes before
        return self._data

    def register_signals(self) -> None:
        """Nothing: the session has handlers, and those of the Trainer run collectives."""

    def ask_for_signals(self) -> None:
        """Nothing: ranks agree on the end with the vote of a step."""

    def restore_checkpoint(self, path: Any, *given: Any, **named: Any) -> None:
        """Restore nothing; the session does."""
        check_checkpoint(path)
        self._own["restore_checkpoint"](path, *given, **named)

    def prepare_loader(self, loader: Any, *given: Any, **named: Any) -> Any:
        """A loader as it is used; the one that is trained on begins at the place in the epoch."""
        prepared = self._own["prepare_loader"](loader, *given, **named)
        if named.get("mode") is RunningStage.TRAINING:
            self._is_placed = place_loader(prepared, self._place)
        return prepared

    def _place(self) -> int | None:
        """How many batches of the epoch were trained on; None: it is not known yet."""
        if self._data is None or not self._steps.is_open:
            return None
        seed_epoch(self._session.job.seed, epoch=self._data.epoch)
        return self._data.batches

    def fit(self) -> None:
        """The whole fit; a run that was complete before it has its last step saved, too."""
        self._own["fit"]()
        self._finish()

    def begin_fit(self) -> None:
        """Restore, or take another process's place, once everything is set up."""
        trainer = self._trainer
        check_optimizer(trainer)
        check_data(self._fit)
        if trainer.enable_validation:  # which is collective, and not again with the first one
            trainer.validating = True
            self._epoch.val_loop.setup_data()
            trainer.training = True
        self._register()
        loop = self._steps.open(until=self._fit.max_steps)
        self._joins = self._session.context.generation is not None and loop.has_applied
        self._restore_state(loop.state.step)
        self._forward = self._module.forward
        self._own["begin_fit"]()

    def _register(self) -> None:
        trainer, fit = self._trainer, self._fit
        (loader,) = fit._combined_loader.flattened  # noqa: SLF001 there is no public way
        own_length = fit.max_steps * trainer.accumulate_grad_batches
        self._data = TrainerData(
            setting="batch_size",
            samples_per_batch=_batch_size(loader) * trainer.world_size,
            batches_in_epoch=own_length if math.isinf(fit.max_batches) else fit.max_batches,
        )
        configs = trainer.lr_scheduler_configs
        self._session.register(
            model=trainer.model,
            optimizer=trainer.optimizers[0],
            data=self._data,
            scheduler=_Schedulers(configs, self._step_schedulers) if configs else None,
            scaler=self._scaler,
            clip=self._clip,
            optimize=self._optimize,
        )

    @property
    def _scaler(self) -> Any:
        return getattr(self._trainer.precision_plugin, "scaler", None)

    def _restore_state(self, step: int) -> None:
        data, batches = self.data, self._epoch.batch_progress
        self._count_step(step)
        self._epoch._batches_that_stepped = step - self._joins  # noqa: SLF001 the loggers' step
        for tracker in (self._fit.epoch_progress.total, self._fit.epoch_progress.current):
            _set_tracker(tracker, data.epoch)
        _set_tracker(batches.total, data.epoch * data.batches_in_epoch + data.batches)

    def _count_step(self, step: int) -> None:
        self._completed = step
        total = self._epoch.automatic_optimization.optim_progress.optimizer.step.total
        total.ready = total.completed = step

    def begin_epoch(self) -> None:
        """The Trainer begins with an epoch."""
        self.data.begin_epoch(self._fit.epoch_progress.current.processed)
        self._own["begin_epoch"]()

    def begin_batches(self, fetcher: Any) -> None:
        """The batches of an epoch, or what is left of them."""
        data, progress = self.data, self._epoch.batch_progress
        self._own["begin_batches"](fetcher)  # begins with the loader, but in the first epoch
        if self._is_placed:
            if self._trainer.current_epoch == 0:
                iter(fetcher)
            fetcher.fetched = data.batches
        else:
            seed_epoch(self._session.job.seed, epoch=data.epoch)
            iter(fetcher)
            for _ in range(data.batches):
                next(fetcher)
        if fetcher.length is not None:
            fetcher.done = fetcher.fetched >= fetcher.length
        _set_tracker(progress.current, data.batches)
        progress.is_last_batch = fetcher.done
        self._host = host_batches(fetcher)
        if self._joins and data.batches:
            # The others leave the step that a recovery has applied: what comes behind it may be
            # an evaluation, whose collectives need this rank.
            self._epoch.on_advance_end(fetcher)
        self._joins = False

    def run_batch(self, _fetcher: Any) -> None:
        """Advance by one batch of those that were drawn for a step."""
        self._own["run_batch"](self._batches)

    def _begin_step(self) -> list[HostBatch]:
        """Begin the next step; saves, pauses and ends come before it.

        Raises:
            StopIteration: the epoch is over.
        """
        if self._is_undone:
            text = f"-1, or a batch that is None, has left step {self._steps.step.number} undone"
            raise InputError("on_train_batch_start", text)
        every = self._trainer.accumulate_grad_batches
        begun = self._epoch.batch_progress.current.ready % every
        self.data.draw_from(self._host, every - begun)
        try:
            step = self._steps.begin()
        except EpochEnded:
            raise StopIteration from None
        self._collected, self._indices, self._is_undone = [], [], True
        return list(step.data)

    def train_batch(self, _optimizer: Any, index: int, named: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs of a micro-batch, the last of its step; the others have none yet."""
        self._collected.append(named["batch"])
        self._indices.append(index)
        if self._fit._should_accumulate():  # noqa: SLF001 there is no public way
            return {}
        results = self._trainer._results  # noqa: SLF001 likewise
        self._logged = {key: dict(vars(one)) for key, one in results.items()}
        self._steps.run(self._run_step)
        step = self._steps.step
        self._count_step(step.number)
        self._steps.measure(host.batch for host in step.data)
        self._is_undone = False
        outputs, self._outputs = self._outputs, {}
        return outputs

    def _run_step(self) -> None:
        trainer, step = self._trainer, self._steps.step
        batches, self._collected = self._collected, []
        if not batches:
            self._undo()
            batches = [self._on_device(host.batch) for host in step.data]
        session = self._session
        seed_step(session.job.seed, rank=session.layout.stream(session.rank), step=step.number)
        share = trainer.accumulate_grad_batches / len(batches)
        for batch, index, _ in zip(batches, self._indices, step.micro_batches(), strict=True):
            result = self._run_micro_batch(batch, index)
            if result.loss is not None:
                step.report_loss(result.loss * share)
            self._outputs = result.asdict() if result.loss is not None else {}
        step.apply()

    def _run_micro_batch(self, batch: Any, index: int) -> Any:
        """Forward and backward."""
        trainer, optimization = self._trainer, self._epoch.automatic_optimization
        results = trainer._results  # noqa: SLF001 as _LoggerConnector.on_batch_start
        results.batch, results.batch_size = batch, None
        named = self._epoch._build_kwargs(OrderedDict(), batch, index)  # noqa: SLF001
        closure = optimization._make_closure(named, trainer.optimizers[0], index)  # noqa: SLF001
        closure._step_fn = partial(self._drilled, closure._step_fn)  # noqa: SLF001
        closure()
        return closure.consume_result()

    def _drilled(self, forward: Callable[[], Any]) -> Any:
        """The outputs of a forward, with the loss as drills have it."""
        result = forward()
        if result.closure_loss is None:
            return result
        return replace(result, closure_loss=self._steps.step.drilled(result.closure_loss))

    def _undo(self) -> None:
        """What an attempt at the step that was cut short has left in the Trainer."""
        self._module.forward = self._forward  # Lightning swaps it for the time of a forward
        results = self._trainer._results  # noqa: SLF001 means of the epoch
        for key in list(results):
            if key in self._logged:
                vars(results[key]).update(self._logged[key])
            else:
                del results[key]

    def _on_device(self, batch: Any) -> Any:
        trainer = self._trainer
        batch = trainer.precision_plugin.convert_input(batch)
        batch = self._module._on_before_batch_transfer(batch, dataloader_idx=0)  # noqa: SLF001
        return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)  # noqa: SLF001

    def _clip(self) -> Tensor:
        """Clip the gradients in the Trainer's way; their norm before it."""
        trainer, module = self._trainer, self._module
        optimizer = trainer.optimizers[0]
        call._call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)  # noqa: SLF001
        call._call_lightning_module_hook(trainer, "on_before_optimizer_step", optimizer)  # noqa: SLF001
        norm = nn.utils.get_total_norm(p.grad for p in module.parameters() if p.grad is not None)
        trainer.precision_plugin._clip_gradients(  # noqa: SLF001
            module,
            optimizer,
            trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        )
        return norm

    def _optimize(self) -> None:
        """Let the optimizer run, by the `optimizer_step` of the LightningModule."""
        loss = self._outputs.get("loss")
        self._epoch.automatic_optimization._optimizer_step(self._indices[-1], lambda: loss)  # noqa: SLF001

    def run_optimizer(self, optimizer: Any, model: Any, closure: Any, **named: Any) -> Any:
        """The optimizer's own step; the gradients are there, unscaled and clipped."""
        del model
        loss = closure()
        if self._scaler is None:
            optimizer.step(**named)
        else:
            self._scaler.step(optimizer, **named)
            self._scaler.update()
        return loss

    def _step_schedulers(self) -> None:
        """Those of steps, and with the last batch of an epoch those of epochs."""
        self._own["update_schedulers"]("step", update_plateau_schedulers=False)
        if self._epoch._num_ready_batches_reached():  # noqa: SLF001 as advance() does
            self._own["update_schedulers"]("epoch", update_plateau_schedulers=False)

    def update_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:  # noqa: FBT001 Lightning's signature
        """Those that wait for a metric; the others belong to the step."""
        if update_plateau_schedulers:
            self._own["update_schedulers"](interval, update_plateau_schedulers=True)

    def end_fit(self) -> None:
        """Save the last step, before a hook may load another model."""
        self._finish()
        self._own["end_fit"]()

    def _finish(self) -> None:
        if self._is_finished or not self._steps.is_open:
            return
        self._is_finished = True
        data = self.data
        if data.batches >= data.batches_in_epoch:
            data.begin_epoch(data.epoch + 1)
        self._steps.finish(at=self._trainer.global_step)


class _Schedulers:
    """All schedulers of a Trainer as one, which it steps in its own way."""

    def __init__(self, configs: Any, step: Any) -> None:
        self._schedulers = [one.scheduler for one in configs]
        self.step = step

    def get_last_lr(self) -> Any:
        """Of the first one."""
        return self._schedulers[0].get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Of all."""
        return {"schedulers": [one.state_dict() for one in self._schedulers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        for one, own in zip(self._schedulers, state["schedulers"], strict=True):
            one.load_state_dict(own)


def _at(trainer: Any, path: str) -> Any:
    return attrgetter(path)(trainer) if path else trainer


def _batch_size(loader: Any) -> int:
    """Samples in a batch; 1 where the loader does not say, so that batches are counted."""
    size = getattr(loader, "batch_size", None) or getattr(
        getattr(loader, "batch_sampler", None), "batch_size", None
    )
    return int(size) if size is not None else 1


def _set_tracker(tracker: Any, count: int) -> None:
    tracker.ready = tracker.started = tracker.processed = tracker.completed = count
