"""Where drills run when not on this machine: on the engine of a job, with its store.

Of a job they take what says where and how its processes run; model, data and policies are the
drills' own, so that the same is expected of them everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from training.drill.job import NUM_RANKS
from training.drill.table import Drill
from training.errors import InputError
from training.job import Job
from training.recovery.rungs import ISOLATES
from training.specs.model import ParallelKind

MIN_NODES = 2


def sections_of(job: Job, folder: str, kind: ParallelKind) -> Mapping[str, Mapping[str, Any]]:
    """What the jobs of drills have of a job, by section.

    Args:
        job: whose engine, store and environment are meant.
        folder: below the address of its store, for the drills alone.
        kind: of parallelism of the drills.
    """
    address = f"{job.storage.address.rstrip('/')}/{folder}"
    is_own = kind is ParallelKind.HSDP and kind is job.parallelism.kind
    return {
        "parallelism": {"replicas": job.parallelism.replicas} if is_own else {},
        "storage": {**job.storage.model_dump(), "address": address},
        "engine": job.engine.model_dump(),
        # Whether links are mended under the operations is each drill's to say.
        "comm": {**job.comm.model_dump(exclude_unset=True), "link_retry": False},
        "preflight": job.preflight.model_dump(),
        "restart": {"start_timeout_s": job.restart.start_timeout_s},
        "worker": {"cwd": job.worker.cwd},
        "env": job.env,
    }


def check_site(job: Job, drills: Iterable[Drill]) -> None:
    """Whether the nodes of a job are enough for these drills.

    Raises:
        InputError: they are not.
    """
    engine = job.engine
    if engine.nodes < MIN_NODES or engine.world_size < NUM_RANKS:
        raise InputError(
            "engine",
            f"nodes={engine.nodes}, slots_per_node={engine.slots_per_node}: drills need "
            f"{MIN_NODES} nodes and {NUM_RANKS} ranks at least",
        )
    for drill in drills:
        if engine.spares == 0 and ISOLATES & set(drill.expected.rungs):
            raise InputError(
                "engine.spares", f"0: the drill {drill.name} leaves a node and needs another one"
            )
