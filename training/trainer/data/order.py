"""The order of samples: a function of one global position, the seed, and nothing else.

`position` counts samples from 0 across epochs. Epoch `position // num_samples` visits every sample
once, in a pseudo-random order of its own: a keyed Feistel network over [0, num_samples), so no
list of samples exists anywhere and any position is reached at once. Ranks, world size and worker
processes play no part.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

NUM_ROUNDS = 12  # small corpora mix slowly; for large ones 6 would do
MASK_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """Which sample stands at a position.

    Raises:
        ValueError: there are no samples.
    """

    num_samples: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"num_samples={self.num_samples} must be at least 1")

    def indices(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Sample indices [count] at positions start .. start + count - 1."""
        positions = np.arange(start, start + count, dtype=np.int64)
        epochs, offsets = np.divmod(positions, self.num_samples)
        if not self.shuffle:
            return offsets
        out = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            out[chosen] = permute(
                offsets[chosen], num_items=self.num_samples, seed=self.seed, epoch=int(epoch)
            )
        return out


def permute(
    items: npt.NDArray[np.int64], *, num_items: int, seed: int, epoch: int
) -> npt.NDArray[np.int64]:
    """Map items [N] of [0, num_items) by the permutation of this seed and epoch."""
    # The network works on a rows x columns grid that has fewer than one row more than needed;
    # what lands outside is sent through again until it lands inside (cycle walking).
    columns = math.isqrt(num_items - 1) + 1
    rows = -(-num_items // columns)
    keys = _round_keys(seed, epoch)
    out = _network(items.astype(np.uint64), rows, columns, keys)
    while (outside := out >= num_items).any():
        out[outside] = _network(out[outside], rows, columns, keys)
    return out.astype(np.int64)


def _network(
    values: npt.NDArray[np.uint64], rows: int, columns: int, keys: tuple[int, ...]
) -> npt.NDArray[np.uint64]:
    row, column = np.divmod(values, np.uint64(columns))
    for number, key in enumerate(keys):
        if number % 2 == 0:
            row = (row + _mix(column, key) % np.uint64(rows)) % np.uint64(rows)
        else:
            column = (column + _mix(row, key) % np.uint64(columns)) % np.uint64(columns)
    return row * np.uint64(columns) + column


def _mix(values: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64, wrapping at 2**64."""
    out = values + np.uint64(key)
    out = (out ^ (out >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    out = (out ^ (out >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return out ^ (out >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(
        xxhash.xxh3_64_intdigest(struct.pack("<QQQ", seed & MASK_64, epoch & MASK_64, number))
        for number in range(NUM_ROUNDS)
    )
