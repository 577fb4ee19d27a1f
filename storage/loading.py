"""Loading the parts of a checkpoint that a rank needs, each straight to where it belongs.

torch's load planner does the resharding. Nothing read from storage is unpickled. `load` is
collective: with a process group every rank of it must call it.

What a plan wants of a shard becomes segments, ranges of bytes of its file. Neighbouring small ones
are fetched together, many at a time; a large one goes into the tensor's own memory. A shard may
instead be in memory as a whole, shared by a checkpoint server. Sizes and offsets are bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from perdure.storage import safetensors_file
from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.errors import Corrupt, describe, error_of
from perdure.storage.manifest import Chunk, Manifest, TensorRecord
from perdure.storage.objects import each_in_parallel, in_parallel
from perdure.storage.staging import DTYPES, raw

SPAN_BYTES = 64 * 2**20
GAP_BYTES = 256 * 2**10  # cheaper to read than a second request
NUM_THREADS = 4


def load(
    state: Mapping[str, Tensor],
    manifest: Manifest,
    *,
    checkpoints: CheckpointStore,
    held: Mapping[str, Tensor] | None = None,
    verify: frozenset[str] = frozenset(),
    process_group: dist.ProcessGroup | None = None,
) -> int:
    """Fill the tensors of `state` in place; collective. Another world size is resharded.

    Args:
        state: tensors by name.
        manifest: manifest of the checkpoint to load.
        checkpoints: checkpoints of the run, in the store.
        held: whole shards that this rank holds in memory, uint8, by name.
        verify: shards whose hash this rank compares; it reads them whole.
        process_group: default: all ranks.

    Returns:
        How many shards this rank read in the store, as a whole or in part.

    Raises:
        StorageError: on every rank, when one of them failed; `state` is then undefined.
        ValueError: a tensor is missing from the checkpoint or has another shape.
    """
    reads = ShardReads(checkpoints, manifest, held or {}, verify)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        torch_load(
            dict(state),
            storage_reader=ManifestReader(reads),
            planner=planner,
            process_group=process_group,
            no_dist=not dist.is_initialized(),
        )
    except CheckpointException as error:
        _raise_cause(error)
    return reads.num_fetched


def _raise_cause(error: CheckpointException) -> NoReturn:
    """Raise the failure of the lowest rank: torch's wrapper hides what is wrong."""
    rank = min(error.failures)
    cause = error.failures[rank][0]
    # torch's own is a BaseException and would pass by every `except Exception`.
    kind, text = describe(cause)
    raise error_of(kind, f"rank {rank}: {text}") from error


class ManifestReader(StorageReader):
    """Reads what a manifest lists."""

    def __init__(self, reads: ShardReads) -> None:
        self._reads = reads

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002 torch's signature
        """The manifest in torch's terms."""
        return Metadata(
            {name: _storage_metadata(name, t) for name, t in self._reads.manifest.tensors.items()}
        )

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: FBT001 torch's signature
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """The manifest is all that is needed."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item into the tensor that the planner gives for it."""
        self._reads.read(plan.items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """Never chosen by an id."""
        return False


@dataclass(slots=True)
class Segment:
    """A range of a file, and where it goes.

    Attributes:
        begin: first byte of the range in the file.
        out: the memory it is read into.
        values: `out` as a tensor of the wanted shape; None where only the hash wants it.
        target: gets `values` afterwards; None when `out` is its own memory.
    """

    begin: int
    out: memoryview
    values: Tensor | None = None
    target: Tensor | None = None

    @property
    def end(self) -> int:
        """End of the range in the file."""
        return self.begin + self.out.nbytes

    def finish(self) -> None:
        """Bring the values to their tensor."""
        if self.target is not None and self.values is not None:
            self.target.copy_(self.values)


@dataclass(frozen=True, slots=True)
class _Place:
    """Position of an item's values in a file.

    Attributes:
        at: first byte of the range that holds them.
        size_bytes: length of that range.
        shape: shape of the values in it, whole rows of a chunk.
        inner: offsets of the wanted box within them.
    """

    at: int
    size_bytes: int
    dtype: str
    shape: tuple[int, ...]
    inner: tuple[int, ...]


@dataclass(slots=True)
class ShardReads:
    """Reads of one rank from a checkpoint, by shard.

    Attributes:
        held: whole files in memory, uint8, by name of the shard.
        verify: shards whose hash this rank compares; they are read whole.
        num_fetched: shards that were read in the store.
    """

    checkpoints: CheckpointStore
    manifest: Manifest
    held: Mapping[str, Tensor] = field(default_factory=dict)
    verify: frozenset[str] = frozenset()
    num_fetched: int = 0

    def read(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """Fill every tensor of a plan.

        Raises:
            Corrupt: a shard is not as the manifest says.
            StorageError: the store failed.
        """
        wanted = self.by_shard(items)
        for shard in sorted({*wanted, *self.verify}):
            self.read_shard(shard, wanted.get(shard, ()), planner, held=self.held.get(shard))

    def by_shard(self, items: Iterable[ReadItem]) -> dict[str, list[tuple[ReadItem, Chunk]]]:
        """The items with their chunks, by the shard that holds them."""
        reads: dict[str, list[tuple[ReadItem, Chunk]]] = {}
        for item in items:
            chunk = self._chunk_of(item)
            reads.setdefault(chunk.shard, []).append((item, chunk))
        return reads

    def read_shard(
        self,
        shard: str,
        wanted: Sequence[tuple[ReadItem, Chunk]],
        planner: LoadPlanner,
        *,
        held: Tensor | None,
    ) -> None:
        """Fill the tensors that one shard holds; from `held` when the file is in memory."""
        self.num_fetched += held is None
        header, entries = self._header(shard, held)
        segments = [
            s
            for item, chunk in wanted
            if (s := self._segment(item, chunk, entries, planner)) is not None
        ]
        if held is not None:
            _copy_held(raw(held), segments)
        else:
            checked = shard in self.verify
            size_bytes = self.manifest.shards[shard].size_bytes
            # Twice the same range, for two targets, leaves nothing to hash in one pass.
            plain = sorted(segments, key=lambda segment: segment.begin)
            if checked:
                whole = _with_gaps(plain, len(header), size_bytes)
                self._compare(shard, header, self._fetched(shard, whole))
            else:
                list(self._fetched(shard, plain))
        for segment in segments:
            segment.finish()
        for item, _ in wanted:
            planner.commit_tensor(item, planner.resolve_tensor(item).detach())

    def ranges(
        self, shard: str, wanted: Sequence[tuple[ReadItem, Chunk]], header: bytes
    ) -> list[tuple[int, int]]:
        """Ranges of the wanted values in a shard's file, each as its begin and end.

        Args:
            shard: name of the file.
            wanted: items to read, each with its chunk.
            header: bytes of the file before its tensors.

        Raises:
            Corrupt: it does not hold what the manifest says.
        """
        size_bytes = self.manifest.shards[shard].size_bytes
        entries = safetensors_file.parse_header(header, size_bytes=size_bytes, url=self._url(shard))
        places = (self._place(item, chunk, entries) for item, chunk in wanted)
        return [(place.at, place.at + place.size_bytes) for place in places if place.size_bytes]

    def _place(
        self, item: ReadItem, chunk: Chunk, entries: Mapping[str, safetensors_file.Entry]
    ) -> _Place:
        dtype = self.manifest.tensors[item.storage_index.fqn].dtype
        entry = entries.get(chunk.key)
        if entry is None or (entry.dtype, entry.shape) != (dtype, chunk.lengths):
            raise Corrupt(f"{self._url(chunk.shard)}: {chunk.key} is not as the manifest says")
        begin, shape, inner = _contiguous_range(
            tuple(item.storage_offsets), tuple(item.lengths), chunk.lengths
        )
        item_bytes = safetensors_file.ITEM_SIZE_BYTES[dtype]
        at = entry.begin + begin * item_bytes
        return _Place(at, math.prod(shape) * item_bytes, dtype, shape, inner)

    def _segment(
        self,
        item: ReadItem,
        chunk: Chunk,
        entries: Mapping[str, safetensors_file.Entry],
        planner: LoadPlanner,
    ) -> Segment | None:
        place = self._place(item, chunk, entries)
        target = planner.resolve_tensor(item).detach()
        at, size_bytes, dtype = place.at, place.size_bytes, place.dtype
        shape, inner, lengths = place.shape, place.inner, tuple(item.lengths)
        if size_bytes == 0:
            return None
        direct = target.device.type == "cpu" and target.is_contiguous()
        if direct and shape == lengths and target.dtype == DTYPES[dtype]:
            return Segment(at, raw(target))
        buffer = torch.empty(size_bytes, dtype=torch.uint8)
        values = buffer.view(DTYPES[dtype]).reshape(shape)
        for dim, (start, length) in enumerate(zip(inner, lengths, strict=True)):
            values = values.narrow(dim, start, length)
        return Segment(at, raw(buffer), values, target)

    def _fetched(self, shard: str, segments: Sequence[Segment]) -> Iterator[Sequence[Segment]]:
        """Fetch segments; gives what is there already, span by span."""
        key, store = self.checkpoints.key(self.manifest.step, shard), self.checkpoints.store

        def fetch(span: Sequence[Segment]) -> None:
            store.get_scattered(key, _with_scratch(span), start=span[0].begin)

        spans = _spans(segments)
        fetched = each_in_parallel(fetch, spans, num_threads=NUM_THREADS)
        return (span for span, _ in zip(spans, fetched, strict=True))

    def _compare(self, shard: str, header: bytes, fetched: Iterator[Sequence[Segment]]) -> None:
        """Hash what comes while the rest is on its way."""
        hasher = xxhash.xxh3_128(header)
        at = len(header)
        for segment in (segment for span in fetched for segment in span):
            if segment.end <= at:
                continue  # the same range for another tensor
            hasher.update(segment.out[at - segment.begin :])
            at = segment.end
        wanted = self.manifest.shards[shard].xxh3_128
        if hasher.hexdigest() != wanted:
            raise Corrupt(f"{self._url(shard)}: xxh3_128 {hasher.hexdigest()} instead of {wanted}")

    def _header(
        self, shard: str, held: Tensor | None
    ) -> tuple[bytes, dict[str, safetensors_file.Entry]]:
        url = self._url(shard)
        size_bytes = self.manifest.shards[shard].size_bytes
        if held is not None:
            prefix = bytes(raw(held[: safetensors_file.LENGTH.size]))
            length = safetensors_file.header_size_bytes(prefix, url=url)
            header = bytes(raw(held[:length]))
        else:
            header = self._header_of_object(shard, url)
        return header, safetensors_file.parse_header(header, size_bytes=size_bytes, url=url)

    def _header_of_object(self, shard: str, url: str) -> bytes:
        key, store = self.checkpoints.key(self.manifest.step, shard), self.checkpoints.store
        # Most headers are small: one request instead of two.
        start = store.get(key, length=GAP_BYTES)
        length = safetensors_file.header_size_bytes(start, url=url)
        return start[:length] if len(start) >= length else store.get(key, length=length)

    def _chunk_of(self, item: ReadItem) -> Chunk:
        record = self.manifest.tensors[item.storage_index.fqn]
        offsets = tuple(item.storage_index.offset or (0,) * len(record.shape))
        chunk = next((c for c in record.chunks if c.offsets == offsets), None)
        if chunk is None:
            raise Corrupt(f"{item.storage_index.fqn}: no chunk at {offsets}")
        return chunk

    def _url(self, shard: str) -> str:
        return self.checkpoints.store.url(self.checkpoints.key(self.manifest.step, shard))


def _storage_metadata(name: str, record: TensorRecord) -> TensorStorageMetadata:
    if record.dtype not in DTYPES:
        raise Corrupt(f"{name}: dtype {record.dtype} is unknown here")
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=DTYPES[record.dtype]),
        size=torch.Size(record.shape),
        chunks=[
            ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.lengths))
            for c in record.chunks
        ],
    )


def _copy_held(file: memoryview, segments: Sequence[Segment]) -> None:
    spans = _spans(sorted(segments, key=lambda segment: segment.begin))
    everything = np.asarray(file)

    def copy(span: Sequence[Segment]) -> None:
        for segment in span:
            # Unlike an assignment to the memoryview, it lets other threads run.
            np.copyto(np.asarray(segment.out), everything[segment.begin : segment.end])

    in_parallel(copy, spans, num_threads=os.cpu_count() or 1)


def _contiguous_range(
    offsets: tuple[int, ...], lengths: tuple[int, ...], chunk: tuple[int, ...]
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """The smallest range of whole rows of a chunk that holds a box.

    Returns:
        First element of the range, its shape, and the box's offsets within it.
    """
    if not chunk:
        return 0, (), ()
    row = math.prod(chunk[1:])
    shape = (lengths[0], *chunk[1:])
    return offsets[0] * row, shape, (0, *offsets[1:])


def _with_gaps(segments: Sequence[Segment], begin: int, end: int) -> list[Segment]:
    """The segments, in order, with unwanted bytes in between: the hash needs them all."""
    filled: list[Segment] = []
    at = begin
    for segment in segments:
        if segment.begin > at:
            filled.append(Segment(at, memoryview(bytearray(segment.begin - at))))
        filled.append(segment)
        at = max(at, segment.end)
    if at < end:
        filled.append(Segment(at, memoryview(bytearray(end - at))))
    return filled


def _spans(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments, in order, to be fetched with one request each: small neighbours together."""
    spans: list[list[Segment]] = []
    for segment in (piece for whole in segments for piece in _pieces(whole)):
        last = spans[-1] if spans else None
        if (
            last is not None
            and last[-1].end <= segment.begin <= last[-1].end + GAP_BYTES
            and segment.end - last[0].begin <= SPAN_BYTES
        ):
            last.append(segment)
        else:
            spans.append([segment])
    return spans


def _with_scratch(span: Sequence[Segment]) -> list[memoryview]:
    """The memory of neighbours, and some for what lies between them."""
    outs, at = [], span[0].begin
    for segment in span:
        if segment.begin > at:
            outs.append(memoryview(bytearray(segment.begin - at)))
        outs.append(segment.out)
        at = segment.end
    return outs


def _pieces(segment: Segment) -> Iterable[Segment]:
    for start in range(0, segment.out.nbytes, SPAN_BYTES):
        yield Segment(segment.begin + start, segment.out[start : start + SPAN_BYTES])
