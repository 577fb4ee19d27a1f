"""A user's session program with a pipeline of two stages, whose layers have the same names.

Ranks of the first stage are [0, 1], those of the second [2, 3]; replicas are the ranks of a stage.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import perdure
from perdure.training.recovery.replicas import ParallelLayout
from perdure.training.trainer.pretrain import make_loader, open_data, seed_all
from tests.recipes.split import average, gradient_of

LAYOUT = ParallelLayout(dp=2, pp=2)
WIDTH = 16


class Stage(nn.Module):
    """A layer and a table; `other` is the rank of this copy's other stage."""

    def __init__(self, vocab_size: int, other: int) -> None:
        super().__init__()
        self.other = other
        self.table = nn.Embedding(vocab_size, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)


class First(Stage):
    def run(self, step, batch) -> None:
        """Forward and backward of one micro-batch."""
        hidden = self.dropout(torch.relu(self.layer(self.table(batch[0]))))
        dist.send(hidden.detach(), self.other)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, self.other)
        hidden.backward(gradient)


class Last(Stage):
    def __init__(self, vocab_size: int, other: int) -> None:
        super().__init__(vocab_size, other)
        self.scale = nn.Parameter(torch.ones(WIDTH))  # that the first stage does not have

    def run(self, step, batch) -> None:
        """Forward and backward of one micro-batch; the table of words is used as the head."""
        inputs, targets = batch
        hidden = torch.empty(*inputs.shape, WIDTH)
        dist.recv(hidden, self.other)
        hidden.requires_grad_()
        seen = hidden + self.dropout(torch.relu(self.layer(hidden))) * self.scale
        logits = seen @ self.table.weight.T
        step.backward(nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))
        assert hidden.grad is not None
        dist.send(hidden.grad, self.other)


def clipped(model: nn.Module, mesh: DeviceMesh, limit: float) -> Tensor:
    """Clip by the norm of the whole model, of which every stage has its share."""
    squares = torch.stack([gradient_of(p).square().sum() for p in model.parameters()]).sum()
    dist.all_reduce(squares, group=mesh["pp"].get_group())
    norm = squares.sqrt()
    for parameter in model.parameters():
        gradient_of(parameter).mul_(torch.clamp(limit / (norm + 1e-6), max=1.0))
    return norm


def main(job) -> None:
    seed_all(job.seed)
    session = perdure.join(layout=LAYOUT)
    dataset, manifest = open_data(job, session)
    mesh = init_device_mesh("cpu", (LAYOUT.pp, LAYOUT.dp), mesh_dim_names=("pp", "dp"))
    is_first = session.rank < LAYOUT.dp
    other = session.rank + LAYOUT.dp if is_first else session.rank - LAYOUT.dp
    model = (First if is_first else Last)(manifest.vocab_size, other)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = make_loader(job, session, dataset)
    session.register(
        model=model, optimizer=optimizer, data=loader, clip=lambda: clipped(model, mesh, 1.0)
    )
    for step in session.steps(until=job.steps):
        with step:
            for batch in step.micro_batches():
                model.run(step, batch)
            average(model, mesh)
            step.apply()
