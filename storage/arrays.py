"""Saves and restores of states that are numpy arrays, for ranks without torch.

Ranks that are replicas hold the same arrays: each array is saved by one of them, and read back by
all. A rank reads the files that it needs as a whole, and checks their hashes. Sizes are bytes.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from perdure.storage import safetensors_file
from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.errors import Corrupt, StorageError, describe, error_of
from perdure.storage.manifest import Chunk, Manifest, TensorRecord, digest
from perdure.storage.node_saves import NodeSaves, NodeShares, share_id
from perdure.storage.ranks import Ranks
from perdure.storage.restorable import RestorableSave

Array = NDArray[np.generic]

DTYPES: Mapping[str, np.dtype[np.generic]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "F32": np.dtype(np.float32),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
    "F64": np.dtype(np.float64),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class ArrayStaging:
    """A rank's share, laid out; see `Staging`."""

    arrays: Mapping[str, Array]
    layout: safetensors_file.Layout
    shard: str

    @property
    def size_bytes(self) -> int:
        """See `Staging.size_bytes`."""
        return self.layout.size_bytes

    def copy_into(self, memory: mmap.mmap | bytearray) -> None:
        """See `Staging.copy_into`."""
        out = np.frombuffer(memory, dtype=np.uint8)
        header = self.layout.header
        out[: len(header)] = np.frombuffer(header, dtype=np.uint8)
        for name, array in self.arrays.items():
            entry = self.layout.entries[name]
            place = out[entry.begin : entry.end].view(array.dtype).reshape(array.shape)
            np.copyto(place, array)

    def parts(self) -> dict[str, TensorRecord]:
        """See `Staging.parts`."""
        return {name: self._record(name, array) for name, array in self.arrays.items()}

    def _record(self, name: str, array: Array) -> TensorRecord:
        offsets = (0,) * array.ndim
        chunk = Chunk(offsets=offsets, lengths=array.shape, shard=self.shard, key=name)
        return TensorRecord(dtype=_CODES[array.dtype], shape=array.shape, chunks=(chunk,))


@dataclass(slots=True)
class ArrayPlans:
    """Splits a state of arrays over the ranks; see `Plans`.

    Attributes:
        ranks: the ranks that save together.
        replicas: groups of ranks that hold the same arrays; a rank in none is alone.
        own_prefix: beginning of the names that every rank has for itself.
    """

    ranks: Ranks
    replicas: Sequence[Sequence[int]]
    own_prefix: str

    def stage(self, state: Mapping[str, Array], shard: str) -> ArrayStaging:
        """Stage this rank's share.

        Raises:
            ValueError: on every rank, when something cannot be saved, or replicas differ.
        """
        rank = self.ranks.rank
        group = next((ranks for ranks in self.replicas if rank in ranks), (rank,))
        shared = {
            name: array for name, array in state.items() if not name.startswith(self.own_prefix)
        }
        problem = next(
            (f"{n}: {a.dtype} cannot be saved" for n, a in state.items() if a.dtype not in _CODES),
            None,
        )
        answers = self.ranks.gather([_fingerprint(shared), problem])
        problems = [answer[1] for answer in answers if answer[1] is not None]
        if problems:
            raise ValueError(problems[0])
        if len({answers[other][0] for other in group}) > 1:
            raise ValueError(
                f"ranks {', '.join(map(str, group))} are replicas by parallelism, but their "
                "parameters have other names, types or shapes"
            )
        mine = {name: state[name] for name in _spread(shared, len(group))[group.index(rank)]}
        mine |= {name: array for name, array in state.items() if name.startswith(self.own_prefix)}
        layout = safetensors_file.plan_layout(
            [(name, _CODES[array.dtype], array.shape) for name, array in mine.items()]
        )
        return ArrayStaging(mine, layout, shard)

    def gather_json(self, document: object) -> list[object]:
        """See `Plans.gather_json`."""
        return self.ranks.gather(document)

    def gather_to_first(self, document: object) -> list[object] | None:
        """See `Plans.gather_to_first`."""
        gathered = self.ranks.gather(document)
        return gathered if self.ranks.rank == 0 else None


def _fingerprint(state: Mapping[str, Array]) -> str:
    lines = sorted(f"{name} {array.dtype} {array.shape}" for name, array in state.items())
    return digest("\n".join(lines).encode())


def _spread(state: Mapping[str, Array], count: int) -> list[list[str]]:
    """Spread names over so many ranks, the same on each: the largest first, to who has least."""
    loads, names = [0] * count, [list[str]() for _ in range(count)]
    for name in sorted(state, key=lambda name: (-state[name].nbytes, name)):
        least = loads.index(min(loads))
        loads[least] += state[name].nbytes
        names[least].append(name)
    return names


@dataclass(frozen=True, slots=True)
class ArrayReader:
    """Reads states of arrays; see `training.runtime.state.restore.StateReader`.

    Attributes:
        ranks: the ranks that restore together.
        on_wait: called now and then while something takes long.
    """

    ranks: Ranks
    on_wait: Callable[[], None] = lambda: None

    def nodes(
        self,
        shares: NodeShares,
        checkpoints: CheckpointStore,
        owner: tuple[int, int],
        name: str | None,
        announce: str,
    ) -> NodeSaves:
        """Make what restores arrays from the nodes."""
        return ArrayNodes(
            shares, checkpoints, owner, self.ranks, name, announce, on_wait=self.on_wait
        )

    def load(
        self,
        state: Mapping[str, Array],
        manifest: Manifest,
        *,
        checkpoints: CheckpointStore,
        held: Mapping[str, memoryview],
        verify: frozenset[str],
    ) -> int:
        """Fill arrays from a committed checkpoint. Returns how many shards this rank fetched.

        Raises:
            StorageError: on every rank, when one of them failed; `state` is then undefined.
        """
        shards = sorted({*_shards_of(state, manifest), *verify})
        _together(self.ranks, lambda: _fill_all(state, manifest, checkpoints, held, shards))
        return sum(shard not in held for shard in shards)


@dataclass(slots=True)
class ArrayNodes(NodeSaves):
    """Restores arrays from what the nodes hold.

    A file that a rank's node lacks comes from the store, into which the nodes put the save first.
    """

    on_wait: Callable[[], None] = lambda: None
    _is_published: bool = field(default=False, init=False)

    def load(
        self, chosen: RestorableSave, state_of: Callable[[Manifest], Mapping[str, Array]]
    ) -> Manifest | None:
        """See `NodeSaves.load`."""
        manifest = self.manifest_of(chosen)
        state = state_of(manifest)
        needed = _shards_of(state, manifest)
        by_shard = {chosen.save.shard(rank): rank for rank in chosen.holders}
        local = chosen.local.get(self.ranks.rank, {})
        at_hand = [rank for shard, rank in by_shard.items() if shard in needed and rank in local]
        files = self.open(chosen, at_hand)
        if files is None:
            return None
        held = {chosen.save.shard(rank): file for rank, file in files.items()}
        if any(self.ranks.gather(bool(needed - held.keys()))):
            self.publish(chosen)
            self._await_publication()
        try:
            _together(
                self.ranks,
                lambda: _fill_all(state, manifest, self.checkpoints, held, sorted(needed)),
            )
        except StorageError as error:
            raise Corrupt(str(error)) from error
        self.num_fetched += len(needed - held.keys())
        return manifest

    def held_of(self, manifest: Manifest, state: Mapping[str, Array]) -> Mapping[str, memoryview]:
        """See `NodeSaves.held_of`."""
        needed, files = _shards_of(state, manifest), {}
        for shard, held in self.node.named(manifest).items():
            if shard in needed:
                try:
                    files[shard] = self.node.read(*share_id(held), held.tier)
                except StorageError:
                    continue  # it is read in the store
        return files

    def publish(self, chosen: RestorableSave) -> None:
        """See `NodeSaves.publish`; once."""
        if not self._is_published:
            NodeSaves.publish(self, chosen)
        self._is_published = True

    def _await_publication(self) -> None:
        while any(self.ranks.gather(self.node.client.is_busy())):
            self.on_wait()


def _shards_of(state: Iterable[str], manifest: Manifest) -> set[str]:
    """Name the files that hold the arrays of a state."""
    return {chunk.shard for name in state for chunk in manifest.tensors[name].chunks}


def _together(ranks: Ranks, read: Callable[[], None]) -> None:
    """Read on every rank; all raise where one fails."""
    problem: list[str] | None = None
    try:
        read()
    except StorageError as error:
        problem = list(describe(error))
    failures = [(rank, *failure) for rank, failure in enumerate(ranks.gather(problem)) if failure]
    if failures:
        rank, kind, text = failures[0]
        raise error_of(kind, f"rank {rank}: {text}")


def _fill_all(
    state: Mapping[str, Array],
    manifest: Manifest,
    checkpoints: CheckpointStore,
    held: Mapping[str, memoryview],
    shards: Sequence[str],
) -> None:
    """Fill arrays from files, once each array is known to fit its record.

    Raises:
        StorageError: a file cannot be read, or an array is not as the manifest says.
    """
    for name, array in state.items():
        record = manifest.tensors[name]
        if (record.dtype, record.shape) != (_CODES[array.dtype], array.shape):
            raise Corrupt(f"{name}: {record.dtype} {record.shape} does not fit {array.shape}")
    for shard in shards:
        file = held.get(shard)
        if file is None:
            file = _fetched(checkpoints, manifest, shard)
        _fill(state, manifest, shard, file)


def _fetched(checkpoints: CheckpointStore, manifest: Manifest, shard: str) -> memoryview:
    """Read a file in the store, and check its hash."""
    record, key = manifest.shards[shard], checkpoints.key(manifest.step, shard)
    file = memoryview(bytearray(record.size_bytes))
    checkpoints.store.get_into(key, file)
    if digest(file) != record.xxh3_128:
        raise Corrupt(f"{checkpoints.store.url(key)}: xxh3_128 is not {record.xxh3_128}")
    return file


def _fill(state: Mapping[str, Array], manifest: Manifest, shard: str, file: memoryview) -> None:
    """Fill what one file holds.

    Raises:
        Corrupt: the file does not hold what the manifest says.
    """
    prefix = bytes(file[: safetensors_file.LENGTH.size])
    length = safetensors_file.header_size_bytes(prefix, url=shard)
    entries = safetensors_file.parse_header(bytes(file[:length]), size_bytes=len(file), url=shard)
    for name, array in state.items():
        record = manifest.tensors[name]
        for chunk in _chunks_in(record, shard):
            entry = entries.get(chunk.key)
            if entry is None or (entry.dtype, entry.shape) != (record.dtype, chunk.lengths):
                raise Corrupt(f"{shard}: {chunk.key} is not as the manifest says")
            values = np.frombuffer(
                file, dtype=array.dtype, count=math.prod(chunk.lengths), offset=entry.begin
            )
            ends = zip(chunk.offsets, chunk.lengths, strict=True)
            box = tuple(slice(at, at + size) for at, size in ends)
            array[box] = values.reshape(chunk.lengths)


def _chunks_in(record: TensorRecord, shard: str) -> Iterator[Chunk]:
    return (chunk for chunk in record.chunks if chunk.shard == shard)
