"""A user's session program with tensor parallelism of its own: a DeviceMesh of dp x tp.

Its parameters are DTensors on the tp dimension; it averages gradients over dp by itself. With
`LAYOUT` in the environment the program says how it is laid out, otherwise the job does. `STYLE` is
dtensor, or plain: shards as Megatron has them, plain tensors whose norm only the program knows.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import perdure
from perdure.training.recovery.replicas import ParallelLayout
from perdure.training.trainer.pretrain import make_loader, open_data, seed_all

LAYOUT = ParallelLayout(dp=2, tp=2)
WIDTH = 16


class Sum(torch.autograd.Function):
    """The sum over a group, whose backward leaves every rank its gradient."""

    @staticmethod
    def forward(_ctx, part, group):
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(_ctx, gradient):
        return gradient, None


class Cut(nn.Module):
    """Megatron's pair of linear layers: the first cut by columns, the second by rows."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group, parts = mesh["tp"].get_group(), mesh["tp"].size()
        own = slice(mesh["tp"].get_local_rank() * 32 // parts, None)
        own = slice(own.start, own.start + 32 // parts)
        up, down = torch.randn(32, WIDTH) * 0.1, torch.randn(WIDTH, 32) * 0.1
        self.up = nn.Parameter(up[own].clone())
        self.down = nn.Parameter(down[:, own].clone())

    def forward(self, x):
        return Sum.apply(torch.relu(x @ self.up.T) @ self.down.T, self.group)


class Guesser(nn.Module):
    def __init__(self, vocab_size: int, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, WIDTH)
        self.middle = middle
        if middle is None:
            self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.head = nn.Linear(WIDTH, vocab_size)
        self.dropout = nn.Dropout(0.1)

    def forward(self, inputs, targets):
        hidden = self.embedding(inputs)
        if self.middle is None:
            hidden = hidden + self.down(torch.relu(self.up(hidden)))
        else:
            hidden = hidden + self.middle(hidden)
        logits = self.head(self.dropout(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_model(vocab_size: int, mesh: DeviceMesh) -> nn.Module:
    if os.environ["STYLE"] == "plain":
        return Guesser(vocab_size, Cut(mesh))
    plan = {
        "embedding": ColwiseParallel(output_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": RowwiseParallel(input_layouts=Replicate()),
    }
    return parallelize_module(Guesser(vocab_size), mesh["tp"], plan)


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """The gradient of this rank's part."""
    gradient = parameter.grad
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def average(model: nn.Module, mesh: DeviceMesh) -> None:
    """Average the gradients over the copies of the model."""
    for parameter in model.parameters():
        gradient = gradient_of(parameter)
        dist.all_reduce(gradient, group=mesh["dp"].get_group())
        gradient /= mesh["dp"].size()


def clipped(model: nn.Module, mesh: DeviceMesh, limit: float) -> Tensor:
    """Clip by the norm of the whole model: of cut parameters every part counts, of others one."""
    squares = {name: gradient_of(p).square().sum() for name, p in model.named_parameters()}
    cut = torch.stack([one for name, one in squares.items() if name.startswith("middle.")]).sum()
    dist.all_reduce(cut, group=mesh["tp"].get_group())
    whole = torch.stack([one for name, one in squares.items() if not name.startswith("middle.")])
    norm = (cut + whole.sum()).sqrt()
    for parameter in model.parameters():
        gradient_of(parameter).mul_(torch.clamp(limit / (norm + 1e-6), max=1.0))
    return norm


def main(job) -> None:
    seed_all(job.seed)
    session = perdure.join(layout=LAYOUT if "LAYOUT" in os.environ else None)
    dataset, manifest = open_data(job, session)
    mesh = init_device_mesh("cpu", (LAYOUT.dp, LAYOUT.tp), mesh_dim_names=("dp", "tp"))
    model = make_model(manifest.vocab_size, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    own = (lambda: clipped(model, mesh, 1.0)) if os.environ["STYLE"] == "plain" else None
    loader = make_loader(job, session, dataset)
    session.register(model=model, optimizer=optimizer, data=loader, clip=own)
    for step in session.steps(until=job.steps):
        with step:
            for inputs, targets in step.micro_batches():
                step.backward(model(inputs, targets))
            average(model, mesh)
            step.apply()
