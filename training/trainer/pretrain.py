"""The reference recipe: pretrain the decoder on the job's corpus, on every rank.

It knows nothing of faults: `session.steps()` restores, saves, and decides when to end.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable

import numpy as np
import torch

import perdure
from perdure.storage.address import open_store
from perdure.training.device import peak_flops
from perdure.training.job import Job
from perdure.training.recovery.replicas import Axis
from perdure.training.runtime.session import Session
from perdure.training.specs.model import ParallelKind, Precision
from perdure.training.trainer.data.loader import ResumableLoader, TokenDataset
from perdure.training.trainer.data.manifest import CorpusManifest, load_manifest
from perdure.training.trainer.data.stage import stage
from perdure.training.trainer.model import Decoder, flops_per_token
from perdure.training.trainer.optimize import make_optimizer, make_scheduler
from perdure.training.trainer.parallel import DTYPES, wrap

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
        model,
        job.parallelism,
        precision=job.precision,
        device=session.device,
        world_size=session.world_size,
    )
    # The weights are alike everywhere; dropout must not be.
    torch.manual_seed((job.seed + session.rank + 1) % 2**63)
    optimizer = make_optimizer(wrapped, job.optimizer)
    scaler = None
    if job.precision is Precision.FP16:
        scaler = torch.amp.GradScaler(session.device.type)
    session.register(
        model=wrapped,
        optimizer=optimizer,
        scheduler=make_scheduler(optimizer, job.optimizer, steps=job.steps),
        scaler=scaler,
        data=make_loader(job, session, dataset),
    )
    tokens = job.batch.global_batch_size * job.model.seq_len
    session.measure(
        tokens_per_step=tokens,
        flops_per_step=tokens * flops_per_token(job.model, manifest.vocab_size),
        peak_flops=_peak(job, session),
    )
    # FSDP2 casts by its own policy; autocast serves the other wrappings.
    sharded = job.parallelism.kind in (ParallelKind.FSDP2, ParallelKind.HSDP)
    autocast = torch.autocast(
        session.device.type,
        dtype=DTYPES[job.precision],
        enabled=job.precision is not Precision.FP32 and not sharded,
    )
    for step in session.steps(until=job.steps):
        with step:
            in_step()
            for inputs_BS, targets_BS in step.micro_batches():  # noqa: N806 shape suffix
                with autocast:
                    loss = wrapped(inputs_BS, targets_BS)
                step.backward(loss.mean())
            step.apply()


def seed_all(seed: int) -> None:
    """Seed every generator alike on all ranks: they build the same weights."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 the generator that libraries use
    random.seed(seed)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)


def open_data(job: Job, session: Session) -> tuple[TokenDataset, CorpusManifest]:
    """The prepared corpus, memory-mapped; the node agent has staged it already."""
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
    """This rank's loader; ranks that hold parts of one copy of the model read the same samples."""
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
