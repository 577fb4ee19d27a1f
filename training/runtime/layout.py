"""Whether the ranks hold what the job says: recovery copies the state of one to another by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from training.errors import InputError
from training.job import Job


def check_layout(model: nn.Module, job: Job) -> None:
    """Check that ranks which the job takes for replicas hold the same shards.

    Raises:
        InputError: the model is sharded between them.
    """
    rank = dist.get_rank()
    group = next((one for one in job.layout.replica_groups() if rank in one), (rank,))
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and not _holds_alike(parameter, group):
            raise InputError(
                "parallelism.kind",
                f"{job.parallelism.kind} has ranks {_named(group)} hold the same weights, but the "
                "model that was registered is sharded between them: give the kind that it is "
                "wrapped in, fsdp2, or hsdp with its replicas",
            )


def _holds_alike(parameter: DTensor, group: Sequence[int]) -> bool:
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return True  # this rank has no part of it
    placed = zip(coordinate, parameter.placements, strict=True)
    alike = tuple(slice(None) if isinstance(p, Replicate) else at for at, p in placed)
    return set(group) <= set(mesh.mesh[alike].flatten().tolist())


def _named(group: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in group[:4])
    return f"{shown}, ..." if len(group) > 4 else shown
