"""What of a Lightning Trainer goes together with a session: whatever else is refused by name."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, Timer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.optim import LBFGS

from perdure.training.config.model import ParallelKind
from perdure.training.errors import InputError
from perdure.training.runtime.session import Session

SERIES = "2.6"  # whose private methods the loop replaces
PASSED = "a Trainer cannot pass a batch over"
REFUSED_CALLBACKS = {
    BatchSizeFinder: "trains beside the job's steps: find the size in a run without Perdure",
    LearningRateFinder: "trains beside the job's steps: find the rate in a run without Perdure",
    Timer: "asks all ranks after every batch: leave max_time out, 'perdure cancel' ends a run",
}


def check_trainer(session: Session, trainer: Any, module: Any) -> None:
    """Check a Trainer before its model is wrapped.

    Raises:
        InputError: with the setting, its value, and what is allowed.
    """
    if version("lightning").rpartition(".")[0] != SERIES:
        text = f"PerdureCallback is written for {SERIES}: pip install 'perdure[lightning]'"
        raise InputError("lightning", f"{version('lightning')}: {text}")
    if not isinstance(trainer, Trainer):
        text = "PerdureCallback belongs to that of 'import lightning'"
        raise InputError("trainer", f"it is of {type(trainer).__module__}: {text}")
    _check_ranks(session, trainer)
    _check_strategy(session, trainer)
    if not module.automatic_optimization:
        text = f"false in {type(module).__name__}: a step is not the Trainer's own then"
        raise InputError("automatic_optimization", text)
    for callback in trainer.callbacks:
        for kind, text in REFUSED_CALLBACKS.items():
            if isinstance(callback, kind):
                raise InputError("callbacks", f"{type(callback).__name__} {text}")
    if trainer.reload_dataloaders_every_n_epochs:
        every = trainer.reload_dataloaders_every_n_epochs
        text = f"{every}: a rank that is replaced has no loader of an epoch before, leave it out"
        raise InputError("reload_dataloaders_every_n_epochs", text)
    _check_job(session, trainer)


def _check_ranks(session: Session, trainer: Any) -> None:
    if trainer.world_size != session.world_size:
        layout = f"devices={trainer.num_devices} and num_nodes={trainer.num_nodes}"
        hint = "LOCAL_WORLD_SIZE in the environment has the devices of a node"
        raise InputError(
            "devices", f"{layout} are not the {session.world_size} ranks of the run: {hint}"
        )
    if trainer.global_rank != session.rank:
        text = f"takes rank {session.rank} for {trainer.global_rank}: leave the plugin out"
        raise InputError("plugins", f"{type(trainer.strategy.cluster_environment).__name__} {text}")
    root = trainer.strategy.root_device
    if root.type != session.device.type or (root.index or 0) != (session.device.index or 0):
        text = f"the Trainer's device is {root}, and that of rank {session.rank} {session.device}"
        raise InputError("accelerator", text)


def _check_strategy(session: Session, trainer: Any) -> None:
    """Only DDP leaves every rank with the whole state, which is what replaces a lost one."""
    strategy, kind = trainer.strategy, session.job.parallelism.kind
    if kind is not ParallelKind.DDP:
        raise InputError("parallelism.kind", f"{kind}: a Trainer's model is wrapped in ddp")
    name = type(strategy).__name__
    is_alone = type(strategy) is SingleDeviceStrategy and session.world_size == 1
    if type(strategy) is not DDPStrategy and not is_alone:
        raise InputError("strategy", f"{name} is not possible under Perdure: give ddp")
    if getattr(strategy, "_start_method", "popen") != "popen":
        raise InputError("strategy", f"{name} starts processes of its own: give ddp")
    if getattr(strategy, "_model_averaging_period", None) is not None:
        raise InputError("strategy", f"{name} averages models, its ranks differ: leave that out")
    plugin = trainer.precision_plugin
    optimizer_step = type(plugin).optimizer_step
    if optimizer_step not in (Precision.optimizer_step, MixedPrecision.optimizer_step):
        text = f"{type(plugin).__name__} steps the optimizer in a way of its own"
        raise InputError("precision", text)


def _check_job(session: Session, trainer: Any) -> None:
    job, max_steps = session.job, trainer.max_steps
    if max_steps not in (-1, job.steps):
        text = f"{job.steps} in the job, but the Trainer has max_steps={max_steps}: leave that out"
        raise InputError("steps", text)
    if job.restart.data_skipping:
        raise InputError("restart.data_skipping", f"true: {PASSED}")
    every = job.restart.snapshot_every_steps
    if job.restart.numeric_retry and every != 1:
        text = f"{every}: a Trainer goes back by one step alone, so that numeric_retry needs 1"
        raise InputError("restart.snapshot_every_steps", text)


def check_checkpoint(path: Any) -> None:
    """Check that a Trainer is to restore nothing itself.

    Raises:
        InputError: it is.
    """
    if path is not None:
        text = (
            f"{str(path)!r}: Perdure restores the run itself; init_from begins with other weights"
        )
        raise InputError("ckpt_path", text)


def check_optimizer(trainer: Any) -> None:
    """Check the optimizer, once it is made.

    Raises:
        InputError: there is none, or a step of it runs the model.
    """
    optimizers = [optimizer for optimizer in trainer.optimizers if optimizer.param_groups]
    if len(optimizers) != 1:
        text = f"configure_optimizers() gave {len(optimizers)}: give one optimizer"
        raise InputError("optimizers", text)
    if isinstance(optimizers[0], LBFGS):
        raise InputError("optimizers", "LBFGS runs the model within its step")


def check_data(fit_loop: Any) -> None:
    """Check what is trained on, and how `training_step` takes it.

    Raises:
        InputError: there are several loaders, whose place in an epoch is not one number, or the
            module draws its batches itself.
    """
    loaders = fit_loop._combined_loader.flattened  # noqa: SLF001 there is no public way
    if len(loaders) != 1:
        raise InputError("train_dataloaders", f"{len(loaders)} loaders: give one")
    if isinstance(fit_loop._data_fetcher, _DataLoaderIterDataFetcher):  # noqa: SLF001 likewise
        text = "takes dataloader_iter: a step that comes again could not draw its batches again"
        raise InputError("training_step", text)
