"""Hashes of a rank's weights and gradients, made on its device for the vote of a step.

A hash is a sum of the bits of all elements, modulo 2**48: exact, in whatever order the device adds
them up, and every single flipped bit changes it. Tensors are read once; the host does not wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from perdure.training.recovery.consistency import Hashes
from perdure.training.runtime.state.transfer import local_part

_HALF_BITS = 24  # what a float of the vote holds exactly
_HALF = 1 << _HALF_BITS
_NUM_HASHES = 3
WIDTH = 2 * _NUM_HASHES  # floats of one rank
NOT_FINITE = -1.0  # in place of the hashes of gradients
_INTEGERS = {1: torch.int8, 2: torch.int16}


def fingerprint(
    model: nn.Module,
    device: torch.device,
    *,
    is_split: bool = False,
    further: Iterable[Tensor] = (),
) -> Tensor:
    """Hash this rank's weights and gradients, as floats [WIDTH].

    To be taken when gradients are reduced and not yet clipped: a norm of sharded gradients may
    differ in its last bit between the replicas of a shard, and so do weights that follow from it.

    Args:
        model: as it was registered.
        device: the rank's accelerator, or the CPU.
        is_split: ranks have different parts of the model: all parameters count as shards.
        further: tensors that ranks which hold the same shards have alike, too.
    """
    plain, shards = _parts(model)
    if is_split:
        plain, shards = [], [p for n, p in model.named_parameters() if n not in _ignored(model)]
    sums = [
        _sum_of(plain, device),
        _sum_of((parameter.grad for parameter in plain), device),
        _sum_of(chain((parameter.grad for parameter in shards), further), device),
    ]
    halves = [(bits >> shift) & (_HALF - 1) for bits in sums for shift in (0, _HALF_BITS)]
    return torch.stack(halves).float()


def slots(hashes: Tensor, *, rank: int, world_size: int, is_finite: bool = True) -> Tensor:
    """Put a rank's hashes in its own place of a vote, [world_size * WIDTH].

    Args:
        hashes: its hashes.
        rank: global rank of this process.
        world_size: number of ranks.
        is_finite: whether its gradients are. What is not a number has many forms, and no rank is
            wrong that has another one.
    """
    filled = hashes.new_zeros(world_size, WIDTH)
    filled[rank] = hashes
    if not is_finite:
        filled[rank, 2:] = NOT_FINITE
    return filled.flatten()


def hashes_of(voted: Sequence[float]) -> list[Hashes]:
    """Read the hashes by rank, from the sum of all ranks' slots."""
    halves = zip(voted[::2], voted[1::2], strict=True)
    whole = [int(low) + int(high) * _HALF for low, high in halves]
    return [
        Hashes(*whole[start : start + _NUM_HASHES]) for start in range(0, len(whole), _NUM_HASHES)
    ]


def _parts(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Divide parameters into those that every rank holds alike, and sharded ones."""
    parameters = [p for name, p in model.named_parameters() if name not in _ignored(model)]
    shards: list[nn.Parameter] = [p for p in parameters if isinstance(p, DTensor)]
    plain = [p for p in parameters if not isinstance(p, DTensor)]
    return (plain if _are_alike(model, shards) else []), shards


def _ignored(model: nn.Module) -> frozenset[str]:
    """Find parameters that a program keeps different on purpose."""
    if not isinstance(model, DistributedDataParallel):
        return frozenset()
    return frozenset(f"module.{name}" for name in model.parameters_to_ignore)


def _are_alike(model: nn.Module, shards: Iterable[nn.Parameter]) -> bool:
    """Whether what is not sharded is equal on all ranks: the model is only data-parallel."""
    world_size = dist.get_world_size()
    if isinstance(model, DistributedDataParallel):
        return dist.get_world_size(model.process_group) == world_size
    return all(
        tensor.device_mesh.size() == world_size
        and sum(not isinstance(p, Replicate) for p in tensor.placements) <= 1
        for tensor in shards
        if isinstance(tensor, DTensor)
    )


def _sum_of(tensors: Iterable[Tensor | None], device: torch.device) -> Tensor:
    """Sum all bits, int64; odd factors make it depend on the tensor that an element belongs to."""
    parts = [(2 * n + 1, tensor) for n, tensor in enumerate(tensors) if tensor is not None]
    sums = [
        _bits_of(local_part(tensor)).to(device).long() * factor
        for factor, tensor in parts
        if not tensor.is_sparse
    ]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64, device=device)


def _bits_of(tensor: Tensor) -> Tensor:
    """Sum a tensor's elements, each taken as an integer: int32, modulo 2**32."""
    flat = tensor.detach().contiguous().view(-1)
    size = flat.element_size()
    is_fit = flat.numel() * size % 4 == 0 and flat.storage_offset() * size % 4 == 0
    words = flat.view(torch.int32) if is_fit else flat.view(_INTEGERS[size]).int()
    # Not as int64, torch's default: the device would make a copy of twice the size first.
    return words.sum(dtype=torch.int32)
