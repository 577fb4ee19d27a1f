"""Samples of the token shards, by index, through memory maps.

Shapes: S = seq_len, B = samples of a micro-batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from training.errors import InputError
from training.trainer.data.manifest import Manifest

# Each map holds a file descriptor, of which a process usually may have 1024.
MAX_OPEN_MAPS = 256


class MicroBatch(NamedTuple):
    """Samples of one forward pass."""

    inputs: Tensor  # int64 [B, S]
    targets: Tensor  # int64 [B, S], the inputs moved by one token


class TokenDataset(Dataset[tuple[Tensor, Tensor]]):
    """The concatenation of all shards, cut into samples of `seq_len` tokens.

    Sample i is tokens i * seq_len to (i + 1) * seq_len, both included: inputs are all but the
    last, targets all but the first. What is left over at the end is not used.

    Args:
        paths: the shards' files, in the manifest's order.
        manifest: what they hold.
        seq_len: tokens in one sample.

    Raises:
        InputError: the corpus is shorter than one sample.
        ValueError: the files are not those of the manifest.
    """

    def __init__(self, paths: Sequence[Path], manifest: Manifest, seq_len: int) -> None:
        if len(paths) != len(manifest.shards):
            raise ValueError(f"{len(paths)} files for {len(manifest.shards)} shards")
        for path, shard in zip(paths, manifest.shards, strict=True):
            size_bytes = path.stat().st_size
            if size_bytes != shard.size_bytes:
                raise ValueError(f"{path} has {size_bytes} bytes, the manifest {shard.size_bytes}")
        if manifest.num_tokens < seq_len + 1:
            raise InputError(
                "data.sources",
                f"the corpus has {manifest.num_tokens} tokens, less than one sample of "
                f"model.seq_len + 1 = {seq_len + 1}",
            )
        self.seq_len = seq_len
        self.num_samples = (manifest.num_tokens - 1) // seq_len
        self.fingerprint = manifest.content_fingerprint
        self._paths = tuple(paths)
        self._dtype = manifest.token_dtype
        sizes = [shard.num_tokens for shard in manifest.shards]
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._maps: OrderedDict[int, NDArray[np.unsignedinteger]] = OrderedDict()

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.gather([index])
        return inputs[0], targets[0]

    def gather(self, indices: Sequence[int] | NDArray[np.int64]) -> MicroBatch:
        """The samples of these indices.

        Raises:
            IndexError: an index is not in [0, num_samples).
        """
        tokens = np.empty((len(indices), self.seq_len + 1), dtype=np.int64)
        for row, index in zip(tokens, indices, strict=True):
            if not 0 <= index < self.num_samples:
                raise IndexError(f"sample {index} of {self.num_samples}")
            self._read(int(index) * self.seq_len, row)
        return MicroBatch(
            inputs=torch.from_numpy(np.ascontiguousarray(tokens[:, :-1])),
            targets=torch.from_numpy(np.ascontiguousarray(tokens[:, 1:])),
        )

    def __getstate__(self) -> dict[str, Any]:
        # A pickled memory map would carry the shard's whole content.
        return {**self.__dict__, "_maps": OrderedDict()}

    def _read(self, start: int, out: NDArray[np.int64]) -> None:
        """Fill `out` with the tokens from `start` on, across as many shards as it takes."""
        filled = 0
        shard = int(np.searchsorted(self._ends, start, side="right"))
        while filled < len(out):
            tokens = self._open(shard)
            offset = start + filled - (int(self._ends[shard]) - len(tokens))
            piece = tokens[offset : offset + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            shard += 1

    def _open(self, shard: int) -> NDArray[np.unsignedinteger]:
        tokens = self._maps.get(shard)
        if tokens is None:
            tokens = np.memmap(self._paths[shard], dtype=self._dtype, mode="r")
            self._maps[shard] = tokens
            if len(self._maps) > MAX_OPEN_MAPS:
                self._maps.popitem(last=False)
        else:
            self._maps.move_to_end(shard)
        return tokens
