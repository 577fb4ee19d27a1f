"""The context of a worker process, from the environment that the node agent set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from perdure.training.config.job import Job
from perdure.training.config.model import ParallelKind
from perdure.training.errors import InputError
from perdure.training.recovery.replicas import ParallelLayout


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
