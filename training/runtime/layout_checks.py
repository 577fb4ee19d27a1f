"""Checks of the layout that a program gives, between its ranks and against its model.

Recovery copies the state of a rank to another by the layout, so the ranks compare theirs. A layout
that splits the model itself (tensor, pipeline or expert parallelism) needs parameters that are
DTensors, whose norm and parts torch knows, or a program that clips its gradients itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from perdure.storage.staging import gather_json
from perdure.training.errors import InputError
from perdure.training.recovery.replicas import ParallelLayout
from perdure.training.runtime.context import WorkerContext

FIELD = "perdure.join(layout=...)"


def fitting_layout(layout: ParallelLayout | None, context: WorkerContext) -> ParallelLayout | None:
    """Return the layout that a program gives when it joins, None where it gives none.

    Raises:
        InputError: it has another number of ranks, or is not the job's.
    """
    if layout is None:
        return None
    if layout.world_size != context.world_size:
        raise InputError(
            FIELD,
            f"dp x tp x pp x cp = {layout.world_size}, but there are {context.world_size} ranks",
        )
    if context.job.has_layout and layout != context.job.layout:
        raise InputError(
            FIELD, f"{layout} is not the job's, {context.job.layout}: leave one of them out"
        )
    return layout


def compare_layouts(context: WorkerContext, device: torch.device) -> None:
    """Check that all ranks have given the same layout. Collective where they have given any.

    A process that joins later takes what the others have agreed on.

    Raises:
        InputError: they have not.
    """
    if context.own_layout is None or context.generation is not None:
        return
    if len(set(gather_json(repr(context.own_layout), device))) > 1:
        raise InputError(FIELD, f"{context.own_layout} is not the layout of every rank")


def check_layout(model: nn.Module, context: WorkerContext, *, clips_itself: bool) -> None:
    """Check that ranks which are taken for replicas hold the same shards.

    Args:
        model: as it was registered.
        context: rank, job and folders of this process.
        clips_itself: whether the program clips its gradients.

    Raises:
        InputError: the model is sharded between them, or split in a way that only the program
            knows.
    """
    job, layout = context.job, context.layout
    if layout.is_split and not clips_itself:
        _check_parts_are_known(model, layout)
    rank = dist.get_rank()
    group = next((ranks for ranks in layout.replica_groups() if rank in ranks), (rank,))
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and not _holds_alike(parameter, group):
            raise InputError(
                "parallelism.kind",
                f"{job.parallelism.kind} has ranks {_named(group)} hold the same weights, but the "
                "model that was registered is sharded between them: give the kind that it is "
                "wrapped in, fsdp2, or hsdp with its replicas, or the sizes of its tensor "
                "parallelism",
            )


def _check_parts_are_known(model: nn.Module, layout: ParallelLayout) -> None:
    names = [
        name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)
    ]
    if not names and layout.pp * layout.ep == 1:
        return
    why = f"{names[0]} is no DTensor" if names else f"pp={layout.pp}, ep={layout.ep}"
    raise InputError(
        "session.register(clip=...)",
        f"the model is split over ranks and {why}, so that the norm of all gradients is known to "
        "the program alone: give a function that clips them and returns it",
    )


def _holds_alike(parameter: DTensor, group: Sequence[int]) -> bool:
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return True  # this rank has no part of it
    placed = zip(coordinate, parameter.placements, strict=True)
    alike = tuple(slice(None) if isinstance(p, Replicate) else at for at, p in placed)
    # Where a mesh is a part of all ranks, such as a tensor-parallel group, the others have a mesh
    # of their own.
    mesh_ranks = set(group) & set(mesh.mesh.flatten().tolist())
    return mesh_ranks <= set(mesh.mesh[alike].flatten().tolist())


def _named(group: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in group[:4])
    return f"{shown}, ..." if len(group) > 4 else shown
