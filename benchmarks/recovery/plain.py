"""The training as a plain DDP loop on gloo; where it is asked to, with a checkpoint every step.

    python -m benchmarks.recovery.plain

The environment says which rank this is, as torchrun sets it.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.recovery.workload import (
    OPTIMIZER,
    StepLog,
    Turns,
    Workload,
    new_model,
    new_optimizer,
    prepare,
    tokens,
)

CHECKPOINT = "checkpoint.pt"


def main() -> None:
    """Train, as one rank."""
    workload = Workload.of_environment()
    prepare()
    dist.init_process_group("gloo")
    base = new_model()
    optimizer = new_optimizer(base)
    try:
        train(workload, base, optimizer)
    except RuntimeError:  # of a collective whose connection broke
        workload.noticed()
        raise
    dist.destroy_process_group()


def train(workload: Workload, base: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The loop, from the newest checkpoint on."""
    rank = dist.get_rank()
    optimizer.zero_grad(set_to_none=True)  # of a step that a restart in the process cut short
    done = restore(workload, base, optimizer)
    model = DistributedDataParallel(base, gradient_as_bucket_view=True)
    log = StepLog(workload, rank)
    turns = Turns(workload, rank)
    for step in range(done + 1, workload.steps + 1):
        turns.wait(step)
        loss = model(*tokens(step=step, rank=rank))
        workload.kill_if_due(step=step, rank=rank)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.grad_clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        log.completed(step, float(loss.detach()))
        if workload.saves and rank == 0:
            save(workload, base, optimizer, step)


def save(workload: Workload, base: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write a checkpoint that is there whole or not at all."""
    path = workload.folder / CHECKPOINT
    state = {"step": step, "model": base.state_dict(), "optimizer": optimizer.state_dict()}
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    torch.save(state, temporary)
    temporary.replace(path)


def restore(workload: Workload, base: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint. Returns its step, 0 when there is none."""
    path = workload.folder / CHECKPOINT
    if not workload.saves or not path.exists():
        return 0
    state = torch.load(path, mmap=True)
    base.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


if __name__ == "__main__":
    main()
