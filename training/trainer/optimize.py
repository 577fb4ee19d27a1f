"""AdamW and its learning rate: linear warm-up, then a cosine down to a fraction of the peak."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from perdure.training.specs.model import OptimizerSpec


def make_optimizer(model: nn.Module, spec: OptimizerSpec) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only; norms and other vectors go without."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": spec.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps)


def make_scheduler(
    optimizer: torch.optim.Optimizer, spec: OptimizerSpec, *, steps: int
) -> LambdaLR:
    """The schedule over `steps` optimizer steps."""
    return LambdaLR(optimizer, lambda done: lr_ratio(done, spec, steps=steps))


def lr_ratio(done: int, spec: OptimizerSpec, *, steps: int) -> float:
    """Learning rate of the step after `done` completed ones, relative to the peak."""
    if done < spec.warmup_steps:
        return (done + 1) / spec.warmup_steps
    progress = (done - spec.warmup_steps) / max(1, steps - spec.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return spec.min_lr_ratio + (1.0 - spec.min_lr_ratio) * cosine
