"""What an exception in the middle of a step leaves behind in wrappings, and how it goes away.

Written against torch 2.13: DDP's reducer keeps which gradients have come, FSDP2 keeps unsharded
gradients that the next backward would add to, a GradScaler keeps that it has unscaled.
"""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from training.runtime.buckets import settle_buckets
from training.runtime.process_group.generations import Generations
from training.runtime.step import Training


def reset(training: Training, generations: Generations) -> None:
    """Make a training ready to begin a step again; talks to nobody."""
    model = training.model
    training.optimizer.zero_grad(set_to_none=True)
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
    for one in state._state_ctx.all_states:  # noqa: SLF001
        for group in one._fsdp_param_groups:  # noqa: SLF001
            for parameter in group.fsdp_params:
                unsharded = getattr(parameter, "_unsharded_param", None)
                if unsharded is not None:
                    unsharded.grad = None
                parameter.unsharded_accumulated_grad = None
    model.reset_iter_state()
