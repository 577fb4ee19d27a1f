"""Model chunks and optimizers of Megatron, in the phases of a session's step.

The optimizer runs without the gather of weights that Megatron has behind it: a death there would
leave ranks with a step half applied. Weights are gathered behind the step, as Megatron gathers
them, and once more when a step begins behind a recovery, on all ranks alike. Written against
megatron-core 0.16.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor, nn

from perdure.integrations.megatron_state import MegatronState


class MegatronParts:
    """A model and its optimizers.

    Args:
        chunks: of the model on this rank, each in Megatron's DistributedDataParallel.
        optimizer: Megatron's ChainedOptimizer.
        args: of the program.
        alone: has collectives return at once.

    Attributes:
        model: the weights, without wrappers.
        state: of the optimizers.
        is_skipped: gradients of the newest step have overflowed, and nothing is applied.
        num_zeros: in its gradients, where the program counts them.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Any,
        args: Any,
        *,
        alone: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._chunks = chunks
        self._optimizer = optimizer
        self._args = args
        self._alone = alone
        bare = [unwrapped(chunk) for chunk in chunks]
        self.model = bare[0] if len(bare) == 1 else nn.ModuleList(bare)
        self.state = MegatronState(optimizer.chained_optimizers, self.model)
        self.is_skipped = False
        self.num_zeros: int | None = None
        self._is_sharded = bool(args.use_distributed_optimizer)
        self._is_gathered = not self._is_sharded
        self._is_left_to_hooks = False
        for chunk in chunks:
            # Else a bad gradient ends the program; the vote of a step finds it, on every rank.
            chunk.ddp_config.check_for_nan_in_grad = False
            chunk.ddp_config.check_for_large_grads = False

    def _bucket_groups(self) -> Iterator[Any]:
        for chunk in self._chunks:
            yield from chunk.bucket_groups
            yield from chunk.expert_parallel_bucket_groups

    def reset(self) -> None:
        """Forget what an interrupted step has left: handles, counts, and who has gathered.

        All ranks take the next step for the first one, as a new process does: in it, reductions
        are launched in the order of the buckets, and later in the order of the gradients.
        """
        for group in self._bucket_groups():
            group.grad_reduce_handle = group.param_gather_handle = None
            group.param_gather_dispatched = False
            group.golden_per_param_grad_ready_counts = {}
            group.per_param_grad_ready_counts = {}  # before `reset`, which would keep them
            group.is_first_batch = True
            group.reset()
        self._is_gathered = not self._is_sharded
        self._is_left_to_hooks = False

    def begin(self, seed: int) -> None:
        """Begin a step, any number of times. Collective behind a recovery, with ZeRO-1."""
        for chunk in self._chunks:
            chunk.train()  # an evaluation may have been cut short
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        self.state.put_back()
        self.is_skipped = False
        args = self._args
        model_parallel_cuda_manual_seed(seed, args.te_rng_tracker, args.inference_rng_tracker)
        if not self._is_left_to_hooks:
            self.gather()

    def compared(self) -> Iterator[Tensor]:
        """Yield what replicas have alike when gradients are reduced."""
        if self._is_sharded:
            for group in self._bucket_groups():
                rank = group.intra_distributed_optimizer_instance_rank
                size = group.intra_distributed_optimizer_instance_size
                for bucket in group.buckets:
                    yield bucket.grad_data.chunk(size)[rank]
        else:
            for chunk in self._chunks:
                for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                    yield buffer.grad_data
        yield from self.state.parameters()

    @torch.no_grad()
    def clip(self) -> float:
        """Make gradients ready, and clip them by their norm, which is returned. Collective.

        0 for gradients that have overflowed: the scaler handles them.
        """
        optimizer = self._optimizer
        self.is_skipped = bool(optimizer.prepare_grads())
        if self.is_skipped:
            return 0.0
        norm = float(optimizer.get_grad_norm() or 0.0)
        for part in optimizer.chained_optimizers:
            parameters = [] if part.is_stub_optimizer else part.get_parameters()
            if parameters and part.config.clip_grad > 0.0:
                limit = part.config.clip_grad
                clip_grad_by_total_norm_fp32(parameters, max_norm=limit, total_norm=norm)
        counts = self._args.log_num_zeros_in_grad
        self.num_zeros = optimizer.count_zeros() if counts else None
        return norm

    def apply(self) -> None:
        """Let the optimizers run on this rank alone, unless gradients have overflowed."""
        if not self.is_skipped:
            with self._alone():  # the barriers of its timers
                for part in self._optimizer.chained_optimizers:
                    _step(part)
            self._is_gathered = not self._is_sharded
            self._is_left_to_hooks = self._is_sharded and bool(self._args.overlap_param_gather)
        elif self._is_sharded:
            self._keep_hooks_from_gathering()  # the weights are whole
        self.state.keep()

    def gather(self) -> None:
        """Have all weights here, also those that other ranks own. Collective, with ZeRO-1."""
        if self._is_gathered:
            return
        for chunk in self._chunks:
            chunk.start_param_sync(force_sync=True)
        self._keep_hooks_from_gathering()
        self._is_gathered, self._is_left_to_hooks = True, False

    def gather_behind(self, *, is_needed: bool) -> None:
        """Gather behind a step, where nothing gathers later, or the weights are needed now."""
        if is_needed or not self._is_left_to_hooks:
            self.gather()

    def _keep_hooks_from_gathering(self) -> None:
        for group in self._bucket_groups():
            group.param_gather_dispatched = True


def _step(part: Any) -> None:
    if isinstance(part, DistributedOptimizer):
        MixedPrecisionOptimizer.step_with_ready_grads(part)  # without its gather
    else:
        part.step_with_ready_grads()


def unwrapped(chunk: Any) -> Any:
    """Return the model that Megatron's wrappers have inside, which names its own state."""
    while type(chunk).__name__ in ("DistributedDataParallel", "Float16Module"):
        chunk = chunk.module
    return chunk
