"""Which settings of accelerate go together with a session: whatever else is refused by name."""

from __future__ import annotations

from typing import Any

from accelerate.data_loader import DataLoaderShard
from accelerate.utils import DistributedType
from torch.utils.data import IterableDataset

from perdure.training.config.model import ParallelKind
from perdure.training.errors import InputError
from perdure.training.runtime.session import Session

REFUSED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def check_loop(session: Session, accelerator: Any, until: int | None) -> None:
    """Check an accelerator and the number of steps.

    Raises:
        InputError: with the setting, its value, and what is allowed.
    """
    job = session.job
    if until is not None and until != job.steps:
        text = f"{job.steps} in the job, but training_steps has until={until}: leave that out"
        raise InputError("steps", text)
    if accelerator.num_processes != session.world_size:
        seen = accelerator.num_processes
        text = f"accelerate sees {seen} ranks, and the run has {session.world_size}"
        hint = ": without accelerators Accelerator(cpu=True) has it use all of them"
        raise InputError("Accelerator", text + hint)
    if accelerator.distributed_type in REFUSED:
        kind = accelerator.distributed_type.value.lower()
        raise InputError("Accelerator", f"{kind} is not possible under Perdure, leave it out")
    parallel = accelerator.parallelism_config
    if parallel is not None and parallel.active_mesh_dims:
        text = f"{', '.join(parallel.active_mesh_dims)}: is not possible under Perdure"
        raise InputError("parallelism_config", text)
    _check_wrapping(job.parallelism.kind, accelerator)


def _check_wrapping(kind: ParallelKind, accelerator: Any) -> None:
    """The wrapping says which ranks hold what, which is what saves and recovery go by."""
    if kind not in (ParallelKind.DDP, ParallelKind.FSDP2):
        text = f"{kind}: accelerate wraps in ddp, or in fsdp2"
        raise InputError("parallelism.kind", text)
    if accelerator.distributed_type is not DistributedType.FSDP:
        if kind is ParallelKind.FSDP2:
            text = f"{kind}, but accelerate wraps in ddp: give it a plugin of fsdp_version 2"
            hint = "; on the CPU, perdure.integrations.sharding.shard_on_cpu"
            raise InputError("parallelism.kind", text + hint)
        return
    plugin = accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        text = f"{plugin.fsdp_version}: fully_shard of torch alone, which is version 2"
        raise InputError("fsdp_version", text)
    if kind is not ParallelKind.FSDP2:
        text = f"{kind}, but accelerate wraps in fsdp2: give the job that"
        raise InputError("parallelism.kind", text)


def check_loader(loader: Any) -> None:
    """Check that each rank reads batches of its own, and as many as the others.

    Raises:
        InputError: it does not.
    """
    if not isinstance(loader, DataLoaderShard):
        kind = type(loader).__name__
        text = f"{kind}: each rank reads its own batches, from a loader that was prepared"
        hint = " with DataLoaderConfiguration(dispatch_batches=False)"
        raise InputError("training_steps(loader=...)", text + hint)
    if getattr(loader.batch_sampler, "even_batches", True) is False:
        text = "false: ranks would have other numbers of batches, leave it out"
        raise InputError("even_batches", text)


def samples_per_batch(accelerator: Any, loader: Any) -> int:
    """Samples that all ranks together have in one batch of each.

    Raises:
        InputError: batches are of no fixed size.
    """
    is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
    size = getattr(loader if is_stream else loader.batch_sampler, "batch_size", None)
    if size is None:
        text = f"{type(loader).__name__}: batches of one size, from a DataLoader with a batch_size"
        raise InputError("training_steps(loader=...)", text)
    return int(size * accelerator.num_processes if is_stream else loader.total_batch_size)
