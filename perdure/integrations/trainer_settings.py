"""Which settings of a Trainer go together with a session: whatever else is refused by name."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import transformers

from perdure.training.config.job import Job
from perdure.training.config.model import ParallelKind
from perdure.training.errors import InputError
from perdure.training.runtime.session import Session

SERIES = "5.24"  # whose private methods the loop replaces


def check_settings(session: Session, trainer: Any) -> None:
    """Check a Trainer before it trains.

    Raises:
        InputError: with the setting, its value, and what is allowed.
    """
    args, job = trainer.args, session.job
    if version("transformers").rpartition(".")[0] != SERIES:
        text = f"PerdureCallback is written for {SERIES}: pip install 'perdure[transformers]'"
        raise InputError("transformers", f"{version('transformers')}: {text}")
    if args.world_size != session.world_size:
        text = f"the Trainer sees {args.world_size} ranks, and the run has {session.world_size}"
        hint = ": without accelerators TrainingArguments(use_cpu=True) has it use all of them"
        raise InputError("use_cpu", f"{args.use_cpu}: {text}{hint if not args.use_cpu else ''}")
    if not args.accelerator_config.use_seedable_sampler:
        text = "false: the order of an epoch could not be had again"
        raise InputError("accelerator_config.use_seedable_sampler", text)
    if type(trainer).get_batch_samples is not transformers.Trainer.get_batch_samples:
        raise InputError(
            "trainer",
            f"{type(trainer).__name__} takes its batches by a get_batch_samples of its own",
        )
    _check_wrapping(job, trainer)
    if job.restart.data_skipping:
        raise InputError("restart.data_skipping", "true: a Trainer cannot pass a batch over")
    every = job.restart.snapshot_every_steps
    if job.restart.numeric_retry and every != 1:
        text = f"{every}: a Trainer goes back by one step alone, so that numeric_retry needs 1"
        raise InputError("restart.snapshot_every_steps", text)


def _check_wrapping(job: Job, trainer: Any) -> None:
    """The wrapping says which ranks hold what, which is what saves and recovery go by."""
    args, kind = trainer.args, job.parallelism.kind
    if args.n_gpu > 1:
        raise InputError("engine.slots_per_node", f"{args.n_gpu} devices for one rank: give it one")
    others = {
        "deepspeed": trainer.is_deepspeed_enabled,
        "auto_find_batch_size": args.auto_find_batch_size,
        "distributed_config": trainer.is_distributed_loading_by_transformers,
    }
    for name, is_on in others.items():
        if is_on:
            raise InputError(name, "is not possible under Perdure, leave it out")
    if kind not in (ParallelKind.DDP, ParallelKind.FSDP2):
        text = f"{kind}: a Trainer's model is wrapped in ddp, or in fsdp2"
        raise InputError("parallelism.kind", text)
    if args.fsdp:
        _check_sharding(args, kind)
    elif kind is ParallelKind.FSDP2:
        text = f"{kind}, but the Trainer wraps its model in ddp: TrainingArguments(fsdp=True)"
        raise InputError("parallelism.kind", text)


def _check_sharding(args: Any, kind: ParallelKind) -> None:
    if kind is not ParallelKind.FSDP2:
        raise InputError("fsdp", f"is on, but parallelism.kind is {kind}: give the job fsdp2")
    config = args.fsdp_config
    if args.fsdp_plugin_args is None or args.fsdp_plugin_args["fsdp_version"] != 2:
        named = "xla" if args.fsdp_plugin_args is None else "version"
        text = f"{config[named]}: fully_shard of torch alone, which is version 2"
        raise InputError(f"fsdp_config.{named}", text)
    if args.fsdp_plugin_args.get("cpu_offload"):
        text = "true: parameters that wait on the host are not restored in place, leave it out"
        raise InputError("fsdp_config.cpu_offload", text)


def check_training(
    job: Job, max_steps: int, resume: Any, dataloader: Any, dispatcher: type[Any]
) -> None:
    """Check what a Trainer is about to do.

    Raises:
        InputError: as `check_settings`.
    """
    if resume is not None:
        text = f"{resume!r}: Perdure restores the run itself; init_from begins with other weights"
        raise InputError("resume_from_checkpoint", text)
    if max_steps != job.steps:
        text = f"{job.steps} in the job, but the Trainer has max_steps={max_steps}: leave that out"
        raise InputError("steps", text)
    if isinstance(dataloader, dispatcher):
        raise InputError(
            "accelerator_config.dispatch_batches", "must be false: each rank reads its own batches"
        )
