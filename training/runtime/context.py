"""The context of a worker process, from the environment that the node agent set, and its layout.

Recovery copies the state of a rank to another by the layout, so the ranks compare theirs. A layout
that splits the model itself (tensor, pipeline or expert parallelism) needs parameters that are
DTensors, whose norm and parts torch knows, or a program that clips its gradients itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from perdure.storage.staging import gather_json
from perdure.training.config.job import Job
from perdure.training.config.model import ParallelKind
from perdure.training.errors import InputError
from perdure.training.recovery.replicas import ParallelLayout

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


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The place of this process in its run.

    Attributes:
        rank: global rank.
        local_rank: index among the ranks of this node.
        world_size: number of ranks.
        placement: number of the placement, from 1.
        attempt: number of the attempt in this placement, from 1.
        schedule_cnt: MA_SCHEDULE_CNT of this container.
        proc_start_cnt: MA_PROC_START_CNT of this container.
        data_folder: where staged token shards lie on this node.
        data_manifest_key: key of the data manifest in the store.
        metrics_path: file the first rank writes its step records to.
        heartbeat_path: file of this process's heartbeat.
        checkpoint_server: name of the node's checkpoint server's socket, None: saves go straight to
            the store.
        disk_tier: folder for checkpoints on the node's disk, None: there is none.
        coordinator: file with the address of the attempt's coordinator, None: there is no
            recovery inside the process.
        generation: the process groups' generation, in which this process takes another's place;
            None: it is among the first.
        own_layout: the layout that the program gave when it joined; None: the job's.
        rejoin_s: limit for another coordinator to come after the loss of the first; 0: none does.
    """

    job: Job
    rank: int
    local_rank: int
    world_size: int
    placement: int
    attempt: int
    schedule_cnt: int
    proc_start_cnt: int
    node: str
    data_folder: Path
    data_manifest_key: str
    metrics_path: Path
    heartbeat_path: Path
    checkpoint_server: str | None = None
    disk_tier: Path | None = None
    coordinator: Path | None = None
    generation: int | None = None
    own_layout: ParallelLayout | None = None
    rejoin_s: float = 0.0

    @property
    def layout(self) -> ParallelLayout:
        """How the ranks are laid out: the program's own layout, else the job's."""
        return self.own_layout or self.job.layout

    @property
    def holds_parts(self) -> bool:
        """Whether plain tensors of one name are different ones on ranks that are no replicas.

        With FSDP2 and HSDP what is sharded are DTensors, and all else is alike on all ranks.
        """
        kind = self.job.parallelism.kind
        shards = self.layout.optimizer_shards if kind is ParallelKind.DDP else 1
        return self.layout.is_split or shards > 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Read the context of this process.

        Raises:
            InputError: a variable is missing: the program was not started by a node agent.
        """
        disk = environment.get("PERDURE_DISK_TIER")
        coordinator = environment.get("PERDURE_COORDINATOR")
        generation = environment.get("PERDURE_GENERATION")
        try:
            job = Job.model_validate_json(
                Path(environment["PERDURE_JOB"]).read_text(encoding="utf-8")
            )
            return cls(
                job=job,
                rank=int(environment["RANK"]),
                local_rank=int(environment["LOCAL_RANK"]),
                world_size=int(environment["WORLD_SIZE"]),
                placement=int(environment["PERDURE_PLACEMENT"]),
                attempt=int(environment["PERDURE_ATTEMPT"]),
                schedule_cnt=int(environment["MA_SCHEDULE_CNT"]),
                proc_start_cnt=int(environment["MA_PROC_START_CNT"]),
                node=environment["PERDURE_NODE"],
                data_folder=Path(environment["PERDURE_DATA_FOLDER"]),
                data_manifest_key=environment["PERDURE_DATA_MANIFEST"],
                metrics_path=Path(environment["PERDURE_METRICS"]),
                heartbeat_path=Path(environment["PERDURE_HEARTBEAT"]),
                checkpoint_server=environment.get("PERDURE_CHECKPOINT_SERVER") or None,
                disk_tier=Path(disk) if disk else None,
                coordinator=Path(coordinator) if coordinator else None,
                generation=int(generation) if generation else None,
                rejoin_s=float(environment.get("PERDURE_REJOIN_S", "0")),
            )
        except KeyError as error:
            raise InputError(
                str(error.args[0]),
                "is not in the environment: session programs are started by 'perdure run'",
            ) from error
