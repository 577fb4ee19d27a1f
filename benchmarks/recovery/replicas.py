"""The training under torchft: every rank a replica of its own, a quorum before every step.

    python -m benchmarks.recovery.replicas

Survivors go on with a smaller batch; a replica that comes back takes the state from another. With
spares, the number of replicas that take part stays the same, and each trains on the batch of its
place among them.
Written against a nightly of 2026-10: a survivor of 0.2 on gloo dies of the error of its allreduce.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torchft
from torch import nn

from benchmarks.recovery.workload import (
    COLLECTIVE_S,
    LIMIT,
    NUM_RANKS,
    OPTIMIZER,
    REPLICA,
    SPARES,
    StepLog,
    Workload,
    new_model,
    new_optimizer,
    prepare,
    tokens,
)

DYNAMIC = torchft.manager.WorldSizeMode.DYNAMIC
FIXED_WITH_SPARES = torchft.manager.WorldSizeMode.FIXED_WITH_SPARES
TIMEOUT_S = 20.0  # of everything else: a replica that comes back is given the state within it


def main() -> None:
    """Train, as one replica."""
    workload = Workload.of_environment()
    prepare()
    rank, num_spares = int(os.environ[REPLICA]), int(os.environ.get(SPARES, "0"))
    # A survivor whose own connections are whole waits so long for a killed replica.
    limit_s = float(os.environ.get(LIMIT, COLLECTIVE_S))
    base = new_model()
    bare = new_optimizer(base)

    def load(state: dict[str, Any]) -> None:
        base.load_state_dict(state["model"])
        bare.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=limit_s)),
        load_state_dict=load,
        state_dict=lambda: {"model": base.state_dict(), "optimizer": bare.state_dict()},
        min_replica_size=NUM_RANKS if num_spares else 2,
        world_size_mode=FIXED_WITH_SPARES if num_spares else DYNAMIC,
        replica_id=f"replica_{rank}",
        timeout=timedelta(seconds=TIMEOUT_S),
        hostname="127.0.0.1",
        init_sync=False,
    )
    model = torchft.DistributedDataParallel(manager, base, gradient_as_bucket_view=True)
    _wait_for_all(workload, rank, NUM_RANKS + num_spares)
    _train(workload, None if num_spares else rank, manager, model, torchft.Optimizer(manager, bare))
    manager.shutdown(wait=False)


def _wait_for_all(workload: Workload, rank: int, count: int) -> None:
    """At the first start alone: replicas that are late would begin with a healing."""
    (workload.folder / f"ready-{rank}").touch()
    while len(list(workload.folder.glob("ready-*"))) < count:
        time.sleep(0.01)


def _train(
    workload: Workload, fixed: int | None, manager: Any, model: nn.Module, optimizer: Any
) -> None:
    """The loop; without a fixed rank, each quorum gives one, or none to a spare."""
    logs: dict[int, StepLog] = {}
    while (step := manager.current_step() + 1) <= workload.steps:
        optimizer.zero_grad()
        rank = fixed
        if rank is None:
            place = manager.participating_rank()
            rank = place if place is not None else NUM_RANKS
        loss = model(*tokens(step=step, rank=rank))
        workload.kill_if_due(step=step, rank=rank)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.grad_clip_norm)
        took_part = manager.is_participating()
        optimizer.step()
        if manager.current_step() != step:
            workload.noticed()
        elif took_part:
            log = logs.setdefault(rank, StepLog(workload, rank))
            log.completed(step, float(loss.detach()))


if __name__ == "__main__":
    main()
