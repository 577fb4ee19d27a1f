"""A user's session program as people write them now: Muon and AdamW, batches that are mappings.

WRAP is ddp or fsdp2. AdamW has a schedule; the rate of Muon is set by hand before each step, as
nanoGPT's loop does.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import perdure
from perdure.training.trainer.pretrain import make_loader, open_data, seed_all
from tests.recipes.paced import Guesser


class Named:
    """A loader whose batches have names for their parts."""

    def __init__(self, loader) -> None:
        self.loader = loader

    def __getattr__(self, name: str):
        return getattr(self.loader, name)

    def next_step(self):
        return [
            {"tokens": {"inputs": inputs, "targets": targets}, "weights": (None, 2.0)}
            for inputs, targets in self.loader.next_step()
        ]


class Average:
    """An average of weights, and how many steps are in it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.weights = [p.detach().clone() for p in model.parameters()]
        self.num_steps = 0

    def update(self) -> None:
        with torch.no_grad():
            for kept, new in zip(self.weights, self.model.parameters(), strict=True):
                kept.lerp_(new, 0.05)
        self.num_steps += 1

    def state_dict(self):
        return {"weights": self.weights, "num_steps": self.num_steps}

    def load_state_dict(self, state) -> None:
        for kept, saved in zip(self.weights, state["weights"], strict=True):
            kept.copy_(saved)
        self.num_steps = state["num_steps"]


def rate(number: int) -> float:
    """Of Muon, in a step."""
    return 0.02 / (1 + 0.1 * number)


def main(job) -> None:
    seed_all(job.seed)
    session = perdure.join()
    dataset, manifest = open_data(job, session)
    with session.building():
        bare = Guesser(manifest.vocab_size)
    model: nn.Module = bare
    if os.environ["WRAP"] == "fsdp2":
        mesh = init_device_mesh("cpu", (session.world_size,))
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(bare)
    torch.manual_seed(session.rank)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    muon = torch.optim.Muon(matrices, lr=1.0)
    adam = torch.optim.AdamW(vectors, lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(adam, step_size=5, gamma=0.8)
    loader = Named(make_loader(job, session, dataset))
    average = Average(model)
    session.register(
        model=model,
        optimizer=[muon, adam],
        scheduler=schedule,
        data=loader,
        state={"average": average},
        on_applied=average.update,
    )
    for step in session.steps(until=job.steps):
        with step:
            muon.param_groups[0]["lr"] = rate(step.number)
            for batch in step.micro_batches():
                assert batch["weights"] == (None, 2.0)
                step.backward(model(**batch["tokens"]))
            step.apply()
            dist.all_reduce(torch.ones(1))  # as programs average what they print
    assert average.num_steps == job.steps
