"""The training under torchft: every rank a replica of its own, a quorum before every step.

    python -m benchmarks.recovery.replicas

Survivors go on with a smaller batch; a replica that comes back takes the state from another.
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
    NUM_RANKS,
    OPTIMIZER,
    REPLICA,
    StepLog,
    Workload,
    new_model,
    new_optimizer,
    prepare,
    tokens,
)

# A survivor whose own connections are whole waits so long for the killed replica: as long as the
# lighthouse of itself waits for its heartbeat.
COLLECTIVE_S = 5.0
TIMEOUT_S = 20.0  # of everything else: a replica that comes back is given the state within it


def main() -> None:
    """Train, as one replica."""
    workload = Workload.of_environment()
    prepare()
    rank = int(os.environ[REPLICA])
    base = new_model()
    bare = new_optimizer(base)

    def load(state: dict[str, Any]) -> None:
        base.load_state_dict(state["model"])
        bare.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=COLLECTIVE_S)),
        load_state_dict=load,
        state_dict=lambda: {"model": base.state_dict(), "optimizer": bare.state_dict()},
        min_replica_size=2,
        replica_id=f"replica_{rank}",
        timeout=timedelta(seconds=TIMEOUT_S),
        hostname="127.0.0.1",
        init_sync=False,
    )
    model = torchft.DistributedDataParallel(manager, base, gradient_as_bucket_view=True)
    _wait_for_all(workload, rank)
    _train(workload, rank, manager, model, torchft.Optimizer(manager, bare))
    manager.shutdown(wait=False)


def _wait_for_all(workload: Workload, rank: int) -> None:
    """At the first start alone: replicas that are late would begin with a healing."""
    (workload.folder / f"ready-{rank}").touch()
    while len(list(workload.folder.glob("ready-*"))) < NUM_RANKS:
        time.sleep(0.01)


def _train(workload: Workload, rank: int, manager: Any, model: nn.Module, optimizer: Any) -> None:
    log = StepLog(workload, rank)
    while (step := manager.current_step() + 1) <= workload.steps:
        optimizer.zero_grad()
        loss = model(*tokens(step=step, rank=rank))
        workload.kill_if_due(step=step, rank=rank)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.grad_clip_norm)
        took_part = manager.is_participating()
        optimizer.step()
        if took_part and manager.current_step() == step:
            log.completed(step, float(loss.detach()))


if __name__ == "__main__":
    main()
