"""Batches of token samples from a global position, and the processes that fetch them.

One step takes the next `global_batch_size` positions of the sample order; rank r takes the r-th of
`world_size` equal runs of them, cut into micro-batches. The position counts samples of all ranks
and only steps handed out, so a resumed run continues with the very next batch on any number of
ranks and workers. Shapes: B micro-batch, S sequence.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import math
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch.utils.data import DataLoader, Dataset

from perdure.training.trainer.data.manifest import CorpusManifest

Pair = tuple[torch.Tensor, torch.Tensor]

START_METHOD = "forkserver"
STOP_TIMEOUT_S = 5.0
NUM_ROUNDS = 12  # small corpora mix slowly; for large ones 6 would do
MASK_64 = (1 << 64) - 1


class TokenDataset(Dataset[Pair]):
    """Samples over the concatenation of all shards; files are mapped, never read whole.

    Args:
        paths: one file per shard, in manifest order.
        manifest: what they hold.
        seq_len: S; sample i covers tokens i*S .. i*S + S inclusive, so targets are shifted by one.

    Raises:
        ValueError: a file is not there or has another size, or not even one sample fits.
    """

    def __init__(self, paths: Sequence[Path], manifest: CorpusManifest, seq_len: int) -> None:
        if len(paths) != len(manifest.shards):
            raise ValueError(f"{len(paths)} paths for {len(manifest.shards)} shards")
        for path, shard in zip(paths, manifest.shards, strict=True):
            size_bytes = path.stat().st_size if path.is_file() else None
            if size_bytes != shard.size_bytes:
                raise ValueError(f"{path}: size_bytes={size_bytes}, must be {shard.size_bytes}")
        if seq_len < 1 or manifest.num_tokens < seq_len + 1:
            raise ValueError(
                f"seq_len={seq_len} needs at least {seq_len + 1} tokens, "
                f"the corpus has {manifest.num_tokens}: more text or a shorter sequence"
            )
        self.seq_len = seq_len
        self.num_samples = (manifest.num_tokens - 1) // seq_len
        self.content_fingerprint = manifest.content_fingerprint
        self._paths = tuple(str(path) for path in paths)
        self._dtype = manifest.numpy_dtype
        counts = [shard.num_tokens for shard in manifest.shards]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self._maps: dict[int, npt.NDArray[Any]] = {}

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Pair:
        """Inputs and targets of one sample, int64 [S] each."""
        start = int(index) * self.seq_len
        tokens = torch.from_numpy(self._tokens(start, start + self.seq_len + 1))
        return tokens[:-1], tokens[1:]

    def __getstate__(self) -> dict[str, Any]:
        # A pickled memmap is a copy of the whole file: worker processes map it themselves.
        return {**self.__dict__, "_maps": {}}

    def _tokens(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        out = np.empty(stop - start, dtype=np.int64)
        filled = 0
        shard = int(np.searchsorted(self._ends, start, side="right"))
        while filled < out.size:
            tokens = self._shard(shard)
            offset = start + filled - (int(self._ends[shard]) - tokens.size)
            count = min(out.size - filled, tokens.size - offset)
            out[filled : filled + count] = tokens[offset : offset + count]
            filled += count
            shard += 1
        return out

    def _shard(self, number: int) -> npt.NDArray[Any]:
        if number not in self._maps:
            self._maps[number] = np.memmap(self._paths[number], dtype=self._dtype, mode="r")
        return self._maps[number]


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """Which sample is at a position: a function of the seed and nothing else.

    Positions count samples from 0 across epochs. Every epoch visits every sample once, in a
    pseudo-random order of its own: a keyed Feistel network over [0, num_samples), so no list of
    samples exists anywhere and any position is reached at once.

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
        """Return the sample indices [count] at positions start .. start + count - 1."""
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
    """Apply the finalizer of splitmix64, wrapping at 2**64."""
    out = values + np.uint64(key)
    out = (out ^ (out >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    out = (out ^ (out >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return out ^ (out >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(
        xxhash.xxh3_64_intdigest(struct.pack("<QQQ", seed & MASK_64, epoch & MASK_64, number))
        for number in range(NUM_ROUNDS)
    )


@dataclass(frozen=True, slots=True)
class _Cut:
    """One rank's part of a global batch.

    Raises:
        ValueError: the sizes do not divide, or the rank is outside the world.
    """

    global_batch_size: int
    micro_batch_size: int
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank} is not in a world of {self.world_size}")
        unit = self.micro_batch_size * self.world_size
        if unit < 1 or self.global_batch_size < 1 or self.global_batch_size % unit:
            raise ValueError(
                f"global_batch_size={self.global_batch_size} must be a multiple of "
                f"micro_batch_size={self.micro_batch_size} x world_size={self.world_size}"
            )

    @property
    def per_rank(self) -> int:
        return self.global_batch_size // self.world_size

    def micro_batches(self, order: SampleOrder, position: int) -> Iterator[list[int]]:
        indices = order.indices(position + self.rank * self.per_rank, self.per_rank).tolist()
        for start in range(0, self.per_rank, self.micro_batch_size):
            yield indices[start : start + self.micro_batch_size]


@dataclass(frozen=True, slots=True)
class _MicroBatches:
    """Sample indices of one rank's micro-batches from a position on, without end."""

    order: SampleOrder
    position: int
    cut: _Cut

    def __iter__(self) -> Iterator[list[int]]:
        for start in itertools.count(self.position, self.cut.global_batch_size):
            yield from self.cut.micro_batches(self.order, start)


class ResumableLoader:
    """Hands out one rank's micro-batches step by step, from any position.

    Worker processes start at the first step, so that a restored position is theirs; they die with
    this process and ignore SIGTERM and SIGINT, which are for the trainer to act on.

    Args:
        dataset: the samples.
        global_batch_size: samples per step over all ranks.
        micro_batch_size: B; global_batch_size is a multiple of B x world_size.
        rank: this process among those that share the global batch.
        world_size: number of them.
        seed: fixes the order of samples.
        shuffle: a new order each epoch, or always the order of the corpus.
        num_workers: worker processes; 0 fetches in line.
        prefetch_factor: micro-batches each worker keeps ready.
        persistent_workers: keep the workers when an epoch ends; else the next has new workers.
        pin_memory: hand out page-locked tensors; only with an accelerator.

    Raises:
        ValueError: the batch sizes and the world do not fit.
    """

    def __init__(  # noqa: PLR0913 the loader's settings, all by name
        self,
        dataset: TokenDataset,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool = True,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        persistent_workers: bool = True,
        pin_memory: bool = False,
    ) -> None:
        self._dataset = dataset
        self._cut = _Cut(global_batch_size, micro_batch_size, rank, world_size)
        self._order = SampleOrder(dataset.num_samples, seed, shuffle)
        self._num_workers = num_workers
        self._prefetch_factor = prefetch_factor
        self._persistent_workers = persistent_workers
        self._pin_memory = pin_memory
        self._position = 0
        self._batches: Iterator[Pair] | None = None
        self._begun_in = 0  # epoch in which the workers were started
        self._end_workers: Callable[[], None] | None = None
        if num_workers:
            _warm_fork_server()

    @property
    def position(self) -> int:
        """Samples that all ranks together were handed so far."""
        return self._position

    @property
    def epoch(self) -> int:
        """Epoch of the next sample, from 0."""
        return self._position // self._order.num_samples

    def next_step(self) -> list[Pair]:
        """Load this rank's micro-batches of the next step: (inputs, targets), int64 [B, S] each.

        Raises:
            RuntimeError: a worker process died, or failed to read.
        """
        if not self._persistent_workers and self._begun_in != self.epoch:
            self.close()
        if self._batches is None:
            self._batches, self._begun_in = self._start(), self.epoch
        count = self._cut.per_rank // self._cut.micro_batch_size
        step = [next(self._batches) for _ in range(count)]
        self._position += self._cut.global_batch_size
        return step

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`, as JSON values; the same on every rank."""
        return {"position": self._position, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position, before or after the first step.

        Raises:
            ValueError: the order of samples or the corpus is not the state's.
        """
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ValueError(
                    f"cannot resume the data position: {name} was {state.get(name)!r} when it "
                    f"was saved, and is {value!r} now"
                )
        position = state.get("position")
        if not isinstance(position, int) or position < 0:
            raise ValueError(f"cannot resume the data position: position={position!r}")
        self.close()
        self._position = position

    def close(self) -> None:
        """End the worker processes; a later step starts new ones."""
        # torch's shutdown waits without limit for locks that a stopped or killed worker holds.
        holder = [self._batches]
        self._batches = None
        if self._end_workers is not None:
            ending = threading.Thread(target=holder.clear, daemon=True)
            ending.start()
            ending.join(STOP_TIMEOUT_S)
            self._end_workers()
            atexit.unregister(self._end_workers)
            self._end_workers = None

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self._order.seed,
            "shuffle": self._order.shuffle,
            "num_samples": self._order.num_samples,
            "seq_len": self._dataset.seq_len,
            "corpus": self._dataset.content_fingerprint,
        }

    def _start(self) -> Iterator[Pair]:
        batches = _MicroBatches(self._order, self._position, self._cut)
        loader = DataLoader(
            self._dataset,
            batch_sampler=batches,
            num_workers=self._num_workers,
            collate_fn=_stack,
            pin_memory=self._pin_memory,
            worker_init_fn=_settle_worker,
            multiprocessing_context=START_METHOD if self._num_workers else None,
            prefetch_factor=self._prefetch_factor if self._num_workers else None,
            # Without its own generator the iterator would draw from the trainer's random state.
            generator=torch.Generator(),
        )
        previous = set(multiprocessing.active_children())
        iterator: Iterator[Pair] = iter(loader)
        if self._num_workers:
            workers = set(multiprocessing.active_children()) - previous
            self._end_workers = functools.partial(_kill, workers)
            # At exit multiprocessing sends SIGTERM, which ours ignore, and waits for them; what is
            # registered last runs first.
            atexit.register(self._end_workers)
        return iterator


def _stack(samples: list[Pair]) -> Pair:
    return (
        torch.stack([inputs for inputs, _ in samples]),
        torch.stack([targets for _, targets in samples]),
    )


def _kill(workers: set[BaseProcess]) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(STOP_TIMEOUT_S)


def _warm_fork_server() -> None:
    """Have torch imported by the fork server while the trainer still builds its model.

    Plain fork is no option: by the first step the trainer has device contexts, communication
    threads and registered memory, none of which survives a fork.
    """
    multiprocessing.set_forkserver_preload(["torch", "perdure.training.trainer.data.loader"])
    multiprocessing.forkserver.ensure_running()


def _settle_worker(worker_id: int) -> None:
    del worker_id
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, name="die-with-parent", daemon=True).start()


def _die_with_parent() -> None:
    # PDEATHSIG would watch the fork server, which outlives the trainer as long as we live.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)  # sys.exit would end this thread only
