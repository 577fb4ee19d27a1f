"""The training in a session of Perdure's: what a job's worker.recipe names."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import perdure
from benchmarks.recovery.workload import (
    BATCH,
    StepLog,
    Turns,
    Workload,
    new_model,
    new_optimizer,
    prepare,
    tokens,
)
from perdure.training.config.job import Job


class Tokens:
    """The loader: a position, and tokens made from it."""

    epoch = 0

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._steps = 0

    @property
    def position(self) -> int:
        """Samples of all ranks handed out."""
        return self._steps * BATCH * self._num_ranks

    def next_step(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The one micro-batch of the next step."""
        self._steps += 1
        return [tokens(step=self._steps, rank=self._rank)]

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        self._steps = int(state["steps"])

    def close(self) -> None:
        """There is nothing to end."""


def main(job: Job) -> None:
    """Train up to the job's target step."""
    workload = Workload.of_environment()
    prepare()
    session = perdure.join()
    with session.building():
        plain = new_model()
    model = DistributedDataParallel(plain, gradient_as_bucket_view=True)
    data = Tokens(session.rank, workload.num_ranks)
    session.register(model=model, optimizer=new_optimizer(model), data=data)
    log = StepLog(workload, session.rank)
    turns = Turns(workload, session.rank)
    for step in session.steps(until=job.steps):
        turns.wait(step.number)
        with step:
            loss = model(*step.batch())
            workload.kill_if_due(step=step.number, rank=session.rank)
            step.backward(loss)
            step.apply()
            log.completed(step.number, float(loss.detach()))
