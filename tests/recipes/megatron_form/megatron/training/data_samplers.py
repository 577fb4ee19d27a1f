"""A sampler by consumed samples: each data-parallel rank has its part of a global micro-batch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core import mpu
from torch.utils.data import DataLoader, Dataset

from .global_vars import get_args


class _Sampler:
    def __init__(self, total: int, consumed: int, size: int, rank: int, ranks: int) -> None:
        self._total, self._consumed = total, consumed
        self._size, self._rank, self._ranks = size, rank, ranks

    def __iter__(self) -> Iterator[list[int]]:
        width = self._size * self._ranks
        for start in range(self._consumed, self._total - width + 1, width):
            first = start + self._rank * self._size
            yield list(range(first, first + self._size))


def build_pretraining_data_loader(dataset: Dataset | None, consumed_samples: int):
    if dataset is None:
        return None
    args = get_args()
    ranks = mpu.get_data_parallel_world_size()
    sampler = _Sampler(
        len(dataset),  # type: ignore[arg-type]
        consumed_samples,
        args.micro_batch_size,
        mpu.get_data_parallel_rank(),
        ranks,
    )
    return DataLoader(dataset, batch_sampler=sampler, num_workers=args.num_workers)
