"""The reference recipe: pretrain the decoder on the job's corpus, on every rank.

The optimizer is AdamW with linear warm-up, then a cosine down to a fraction of the peak; the model
is wrapped in DDP, FSDP2, HSDP, or single-process DataParallel. The recipe knows nothing of faults:
`session.steps()` restores, saves, and decides when to end.
"""

from __future__ import annotations

import logging
import math
import os
import random
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import perdure
from perdure.storage.address import open_store
from perdure.training.config.job import Job
from perdure.training.config.model import OptimizerSpec, ParallelKind, ParallelSpec, Precision
from perdure.training.device import peak_flops
from perdure.training.recovery.replicas import Axis
from perdure.training.runtime.session import Session
from perdure.training.trainer.data.loader import ResumableLoader, TokenDataset
from perdure.training.trainer.data.manifest import CorpusManifest, load_manifest
from perdure.training.trainer.data.stage import stage
from perdure.training.trainer.model import Decoder, flops_per_token


def make_optimizer(model: nn.Module, spec: OptimizerSpec) -> torch.optim.AdamW:
    """Make AdamW with weight decay on matrices only; norms and other vectors go without."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": spec.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps)


def make_scheduler(
    optimizer: torch.optim.Optimizer, spec: OptimizerSpec, *, steps: int
) -> LambdaLR:
    """Make the schedule over `steps` optimizer steps."""
    return LambdaLR(optimizer, lambda done: lr_ratio(done, spec, steps=steps))


def lr_ratio(done: int, spec: OptimizerSpec, *, steps: int) -> float:
    """Compute the learning rate of the step after `done` steps, relative to the peak."""
    if done < spec.warmup_steps:
        return (done + 1) / spec.warmup_steps
    progress = (done - spec.warmup_steps) / max(1, steps - spec.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return spec.min_lr_ratio + (1.0 - spec.min_lr_ratio) * cosine


DTYPES = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
}


def wrap(
    model: Decoder,
    spec: ParallelSpec,
    *,
    precision: Precision,
    device: torch.device,
    world_size: int,
) -> nn.Module:
    """Spread the model over the ranks; collective, every rank calls it."""
    model.to(device)
    match spec.kind:
        case ParallelKind.DDP:
            return data_parallel(model, spec, device=device)
        case ParallelKind.DATA_PARALLEL:
            return model if device.type == "cpu" else DataParallel(model)
        case ParallelKind.FSDP2 | ParallelKind.HSDP:
            replicas = spec.replicas or 1
            shape = (replicas, world_size // replicas) if spec.replicas else (world_size,)
            names = ("replicate", "shard") if spec.replicas else ("shard",)
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
            policy = MixedPrecisionPolicy(param_dtype=DTYPES[precision], reduce_dtype=torch.float32)
            for block in model.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            # In place: the model is an FSDPModule afterwards.
            fully_shard(model, mesh=mesh, mp_policy=policy)
            return model


def data_parallel(
    model: nn.Module, spec: ParallelSpec, *, device: torch.device
) -> DistributedDataParallel:
    """Wrap any model on its device in DDP, as the job has it; collective."""
    return DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device.index],
        gradient_as_bucket_view=True,
        bucket_cap_mb=spec.bucket_cap_mb,
    )


_log = logging.getLogger("perdure.trainer")


def main(job: Job, *, in_step: Callable[[], None] = lambda: None) -> None:
    """Train up to the job's target step.

    Args:
        job: this process's.
        in_step: called in every step, before its first micro-batch.
    """
    seed_all(job.seed)
    session = perdure.join()
    dataset, manifest = open_data(job, session)
    with session.building():
        model = Decoder(job.model, manifest.vocab_size)
    wrapped = wrap(
        model, job.parallelism,
        precision=job.precision, device=session.device, world_size=session.world_size,
    )  # fmt: skip
    # The weights are alike everywhere; dropout must not be.
    torch.manual_seed((job.seed + session.rank + 1) % 2**63)
    optimizer = make_optimizer(wrapped, job.optimizer)
    is_fp16 = job.precision is Precision.FP16
    scaler = torch.amp.GradScaler(session.device.type) if is_fp16 else None
    session.register(
        model=wrapped,
        optimizer=optimizer,
        scheduler=make_scheduler(optimizer, job.optimizer, steps=job.steps),
        scaler=scaler,
        data=make_loader(job, session, dataset),
    )
    _measure(job, session, manifest.vocab_size)
    autocast = _autocast(job, session)
    for step in session.steps(until=job.steps):
        with step:
            in_step()
            for inputs_BS, targets_BS in step.micro_batches():  # noqa: N806 shape suffix
                with autocast:
                    loss = wrapped(inputs_BS, targets_BS)
                step.backward(loss.mean())
            step.apply()


def _measure(job: Job, session: Session, vocab_size: int) -> None:
    tokens = job.batch.global_batch_size * job.model.seq_len
    session.measure(
        tokens_per_step=tokens,
        flops_per_step=tokens * flops_per_token(job.model, vocab_size),
        peak_flops=_peak(job, session),
    )


def _autocast(job: Job, session: Session) -> torch.autocast:
    # FSDP2 casts by its own policy; autocast serves the other wrappings.
    is_sharded = job.parallelism.kind in (ParallelKind.FSDP2, ParallelKind.HSDP)
    return torch.autocast(
        session.device.type,
        dtype=DTYPES[job.precision],
        enabled=job.precision is not Precision.FP32 and not is_sharded,
    )


def seed_all(seed: int) -> None:
    """Seed every generator alike on all ranks: they build the same weights."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 the generator that libraries use
    random.seed(seed)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)


def open_data(job: Job, session: Session) -> tuple[TokenDataset, CorpusManifest]:
    """Open the prepared corpus, memory-mapped; the node agent has staged it already."""
    store = open_store(job.storage)
    manifest = load_manifest(store, session.context.data_manifest_key)
    staged = stage(manifest, store, session.context.data_folder)
    if session.context.local_rank == 0:
        verb = "found" if staged.skipped else "staged"
        _log.info(
            f"rank {session.rank} pid {os.getpid()} "
            f"MA_SCHEDULE_CNT={session.context.schedule_cnt} "
            f"MA_PROC_START_CNT={session.context.proc_start_cnt}: "
            f"{verb} {len(staged.paths)} token shards in {staged.duration_s * 1e3:.0f} ms"
        )
    return TokenDataset(staged.paths, manifest, job.model.seq_len), manifest


def make_loader(job: Job, session: Session, dataset: TokenDataset) -> ResumableLoader:
    """Make this rank's loader; ranks with parts of the same model copy read the same samples."""
    assert job.data is not None  # noqa: S101 the job's validation asks for it
    return ResumableLoader(
        dataset,
        global_batch_size=job.batch.global_batch_size,
        micro_batch_size=job.batch.micro_batch_size,
        rank=session.layout.place(session.rank)[Axis.DP],
        world_size=session.layout.dp,
        seed=job.seed,
        shuffle=job.data.shuffle,
        num_workers=job.data.num_workers,
        prefetch_factor=job.data.prefetch_factor,
        persistent_workers=job.data.persistent_workers is not False,
        pin_memory=session.device.type != "cpu",
    )


def _peak(job: Job, session: Session) -> float:
    if job.peak_tflops is not None:
        return job.peak_tflops * 1e12
    return peak_flops(session.device, DTYPES[job.precision])
