"""A session in which rank 0 evaluates by itself before step `EVALUATE_BEFORE`, for `EVALUATE_S`.

The others go on to the step and wait for it there. With `IN_PHASE` all ranks say so to the session.
Times are seconds.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import perdure


class Draws:
    """Random inputs, the same for a step in every life."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.step = rank, world_size, 0

    @property
    def position(self) -> int:
        return 4 * self.step * self.world_size

    @property
    def epoch(self) -> int:
        return 0

    def next_step(self) -> list[torch.Tensor]:
        drawn = torch.Generator().manual_seed(self.step * self.world_size + self.rank)
        self.step += 1
        return [torch.randn(4, 8, generator=drawn)]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def close(self) -> None:
        pass


def evaluate() -> None:
    until_s = time.monotonic() + float(os.environ["EVALUATE_S"])
    while time.monotonic() < until_s:
        time.sleep(0.05)


def main(job: Any) -> None:
    torch.manual_seed(job.seed)
    session = perdure.join()
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.register(model=model, optimizer=optimizer, data=Draws(session.rank, session.world_size))
    for step in session.steps(until=job.steps):
        if step.number == int(os.environ["EVALUATE_BEFORE"]):
            with session.evaluation() if "IN_PHASE" in os.environ else nullcontext():
                if session.rank == 0:
                    evaluate()
                if "IN_PHASE" in os.environ:
                    dist.barrier()
        with step:
            for x in step.micro_batches():
                step.backward(model(x).square().mean())
            step.apply()
