"""State of torch's wrappers between steps, brought to the same values on every rank.

DDP's reducer keeps which gradients have come, FSDP2 keeps unsharded gradients that the next
backward would add to, a GradScaler keeps that it has unscaled: after an exception in the middle of
a step all of that is stale. DDP also sorts its buckets again after the first backward. The sum
over four or more ranks depends, in its last bit, on where in a bucket a gradient lies, so the
first step after a restart would differ from the same step of an undisturbed run. Written against
torch 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from perdure.training.runtime.process_group.generations import Generations
from perdure.training.runtime.program import Training


def reset(training: Training, generations: Generations) -> None:
    """Make a training ready to begin a step again; not collective."""
    model = training.model
    training.zero_grad()
    training.reset()
    if training.scaler is not None:
        training.scaler._per_optimizer_states.clear()  # noqa: SLF001 update() would change the scale
    if isinstance(model, DistributedDataParallel):
        model.reducer._reset_state()  # noqa: SLF001 there is no public way
        # Buffers are sent to all before a forward that follows one with a reduction, as the
        # first of a step does; ranks that were cut short in different micro-batches disagree.
        model.require_forward_param_sync = True
        with generations.alone():
            settle_buckets(model)
    elif isinstance(model, FSDPModule):
        _reset_sharded(model)


def _reset_sharded(model: FSDPModule) -> None:
    state = model._get_fsdp_state()  # noqa: SLF001 reset_iter_state() leaves these gradients
    if state._is_root is None:  # noqa: SLF001 no forward yet: nothing is left of one
        return
    for module_state in state._state_ctx.all_states:  # noqa: SLF001
        for group in module_state._fsdp_param_groups:  # noqa: SLF001
            for parameter in group.fsdp_params:
                unsharded = getattr(parameter, "_unsharded_param", None)
                if unsharded is not None:
                    unsharded.grad = None
                parameter.unsharded_accumulated_grad = None
    model.reset_iter_state()


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
    if model.find_unused_parameters and not model.static_graph:
        return  # then DDP never sorts them
    parameters = [p for p in model.parameters() if p.requires_grad]
    reducer = model.reducer
    reducer.prepare_for_forward()
    reducer.prepare_for_backward([])
    # Gradients arrive in reverse of this order, which is how DDP guesses the model's own. All of it
    # is on the parameters' device: autograd has a thread for each, and between two of them the
    # order would be that of a race, another one on each rank.
    total = torch.zeros((), device=parameters[0].device, requires_grad=True)
    for parameter in parameters:
        total = _Without.apply(total, parameter)  # type: ignore[no-untyped-call]
    total.backward()  # type: ignore[no-untyped-call]
    reducer._rebuild_buckets()  # noqa: SLF001 what DDP.forward does before the second step
    for parameter in parameters:
        parameter.grad = None
