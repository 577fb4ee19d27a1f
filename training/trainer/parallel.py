"""Wrapping of the model: DDP, FSDP2, HSDP, or single-process DataParallel."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from perdure.training.specs.model import ParallelKind, ParallelSpec, Precision
from perdure.training.trainer.model import Decoder

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
