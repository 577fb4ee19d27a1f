"""DDP's gradient buckets, settled before the first step.

DDP sorts its buckets anew after the first backward. The sum over four or more ranks depends,
in its last bit, on where in a bucket a gradient lies, so the first step after a restart would
differ from the same step of an undisturbed run. One backward of zeros, before anything is
restored, has the sorting over with in every attempt alike. Written against torch 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class _Without(torch.autograd.Function):
    """A sum to which a parameter adds nothing, and whose backward reads none of it."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, parameter: Tensor) -> Tensor:
        ctx.parameter = parameter
        return total.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        parameter = ctx.parameter
        return gradient, parameter.new_zeros(()).expand(parameter.shape)


def settle_buckets(model: nn.Module) -> None:
    """Have DDP sort its buckets now; collective, and nothing to do for other wrappings."""
    if not isinstance(model, DistributedDataParallel):
        return
    parameters = [p for p in model.parameters() if p.requires_grad]
    reducer = model.reducer
    reducer.prepare_for_forward()
    reducer.prepare_for_backward([])
    # Gradients arrive in reverse of this order, which is how DDP guesses the model's own.
    total = torch.zeros((), requires_grad=True)
    for parameter in parameters:
        total = _Without.apply(total, parameter)  # type: ignore[no-untyped-call]
    total.backward()  # type: ignore[no-untyped-call]
    reducer._rebuild_buckets()  # noqa: SLF001 what DDP.forward does before the second step
    for parameter in parameters:
        parameter.grad = None
