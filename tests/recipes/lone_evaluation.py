"""A session in which rank 0 evaluates by itself before step `EVALUATE_BEFORE`, for `EVALUATE_S`.

The others go on to the step and wait for it there. With `IN_PHASE` all ranks say so to the session.
With `DYING_RANK` that rank is killed meanwhile, once, when the file `DEATH` is not there yet. Times
are seconds.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
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


def die_soon() -> None:
    death = Path(os.environ["DEATH"])
    if not death.exists():
        death.touch()
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()


def main(job: Any) -> None:
    torch.manual_seed(job.seed)
    session = perdure.join()
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.register(model=model, optimizer=optimizer, data=Draws(session.rank, session.world_size))
    for step in session.steps(until=job.steps):
        if step.number == int(os.environ["EVALUATE_BEFORE"]):
            with session.evaluation() if "IN_PHASE" in os.environ else nullcontext():
                if str(session.rank) == os.environ.get("DYING_RANK"):
                    die_soon()
                if session.rank == 0:
                    evaluate()
        with step:
            for x in step.micro_batches():
                step.backward(model(x).square().mean())
            step.apply()
