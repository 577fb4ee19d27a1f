"""A session that keeps an average of its weights in buffers of its model, behind each step.

At its end each rank writes a digest of the average to `average-RANK` in the folder `MARKS`.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import perdure
from tests.recipes.lone_evaluation import Draws


class Averaged(nn.Module):
    """Keeps the average of its layers' parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        for name, parameter in self.layers.named_parameters():
            self.register_buffer(f"average-{name}".replace(".", "-"), parameter.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    @torch.no_grad()
    def follow(self, *_: object) -> None:
        for average, parameter in zip(self.buffers(), self.layers.parameters(), strict=True):
            average.lerp_(parameter, 0.05)


def main(job: Any) -> None:
    torch.manual_seed(job.seed)
    session = perdure.join()
    averaged = Averaged()
    model = DistributedDataParallel(averaged)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.register_step_post_hook(averaged.follow)
    session.register(model=model, optimizer=optimizer, data=Draws(session.rank, session.world_size))
    for step in session.steps(until=job.steps):
        with step:
            for x in step.micro_batches():
                step.backward(model(x).square().mean())
            step.apply()
    values = b"".join(average.numpy().tobytes() for average in averaged.buffers())
    digest = hashlib.sha256(values).hexdigest()
    (Path(os.environ["MARKS"]) / f"average-{session.rank}").write_text(digest)
