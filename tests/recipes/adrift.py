"""A user's session program whose ranks drift apart: it wraps nothing, or a bit flips on one rank.

WRAP is none, ddp or fsdp2. FLIP is part:rank:step: in that step the rank's weights or gradients
change by one bit, once, before the step is applied; the file MARK shows that it has happened.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import perdure
from perdure.training.trainer.pretrain import make_loader, open_data, seed_all
from tests.recipes.paced import Guesser


def wrapped(model: nn.Module, world_size: int) -> nn.Module:
    match os.environ["WRAP"]:
        case "ddp":
            return DistributedDataParallel(model)
        case "fsdp2":
            fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
            return model
        case _:
            return model


def flip(tensor: Tensor | None) -> None:
    """One bit in the middle of the mantissa: no loss shows it."""
    assert tensor is not None
    tensor.detach().view(-1).view(torch.int32)[5] ^= 1 << 11


def main(job) -> None:
    seed_all(job.seed)
    session = perdure.join()
    dataset, manifest = open_data(job, session)
    model = wrapped(Guesser(manifest.vocab_size), session.world_size)
    torch.manual_seed(session.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.register(model=model, optimizer=optimizer, data=make_loader(job, session, dataset))
    part, rank, at_step = os.environ.get("FLIP", "none:0:0").split(":")
    mark = Path(os.environ.get("MARK", "/not/there"))
    for step in session.steps(until=job.steps):
        with step:
            for inputs, targets in step.micro_batches():
                step.backward(model(inputs, targets))
            is_due = (step.number, session.rank) == (int(at_step), int(rank))
            if is_due and not mark.exists():
                mark.touch()
                weight = next(model.parameters())
                flip(weight if part == "weights" else weight.grad)
            step.apply()
