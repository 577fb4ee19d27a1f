"""Sharded save and load through torch.distributed.checkpoint planners.

Each rank writes one safetensors file; the coordinator writes the manifest. torch's planners do
the de-duplication of replicas and the resharding. Only tensors: everything else belongs into
`extra`, which is JSON. Nothing read from storage is unpickled. Sizes are bytes.

`save` and `load` are collective: with a process group every rank of it must call them. Without
an initialised group they work in one process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from pydantic import JsonValue
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import save as torch_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from storage.checkpoint import CheckpointStore, shard_name
from storage.errors import Corrupt, StorageError
from storage.manifest import Chunk, Manifest, ShardRecord, TensorRecord
from storage.reading import ShardReads
from storage.staging import DTYPE_CODES, DTYPES, Staging, raw, refuse_objects, save_planner


@dataclass(frozen=True, slots=True)
class _Written:
    """Where one chunk went, and the file it is part of."""

    chunk: Chunk
    size_bytes: int
    xxh3_128: str


class ManifestWriter(StorageWriter):
    """Writes one save of one attempt; good for one save."""

    def __init__(
        self,
        checkpoints: CheckpointStore,
        *,
        step: int,
        placement: int,
        attempt: int,
        extra: dict[str, JsonValue],
    ) -> None:
        self._checkpoints = checkpoints
        self._step = step
        self._placement = placement
        self._attempt = attempt
        self._extra = extra
        self._rank = 0
        self._world_size = 1
        self.manifest: Manifest | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(
        self,
        is_coordinator: bool,  # noqa: FBT001, ARG002 torch's signature
        *args: Any,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        """Learn the rank, which names this rank's file."""
        self._rank = kwargs.get("rank") or 0

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what is not a tensor, and a save that could not be committed anyway."""
        refuse_objects(plan)
        self._checkpoints.check_may_commit(self._step, self._placement, self._attempt)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Only the number of ranks is of interest."""
        self._world_size = len(plans)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file."""
        results = self._write(plan.items, planner) if plan.items else []
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the manifest; runs on the coordinator, after every rank has written."""
        chunks: dict[str, list[Chunk]] = {}
        shards: dict[str, ShardRecord] = {}
        for result in (one for rank_results in results for one in rank_results):
            written: _Written = result.storage_data
            chunks.setdefault(result.index.fqn, []).append(written.chunk)
            shards[written.chunk.shard] = ShardRecord(
                size_bytes=written.size_bytes, xxh3_128=written.xxh3_128
            )
        tensors = {
            name: _tensor_record(entry, chunks[name])
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        manifest = Manifest(
            run_id=self._checkpoints.run_id,
            placement=self._placement,
            attempt=self._attempt,
            step=self._step,
            world_size=self._world_size,
            written_at_s=self._checkpoints.clock(),
            tensors=tensors,
            shards=shards,
            extra=self._extra,
        )
        self._checkpoints.commit(manifest)
        self.manifest = manifest

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """Never chosen by an id."""
        return False

    def _write(self, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        name = shard_name(self._placement, self._attempt, self._rank)
        staging = Staging.of(items, planner, name)
        file = torch.empty(staging.size_bytes, dtype=torch.uint8)
        staging.copy_into(file)
        record = self._checkpoints.put_shard(self._step, name, raw(file))
        return [
            WriteResult(
                index=staged.item.index,
                size_in_bytes=staging.layout.entries[staged.chunk.key].size_bytes,
                storage_data=_Written(staged.chunk, record.size_bytes, record.xxh3_128),
            )
            for staged in staging.items
        ]


class ManifestReader(StorageReader):
    """Reads what a manifest vouches for."""

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


def save(
    state: Mapping[str, Tensor],
    *,
    checkpoints: CheckpointStore,
    step: int,
    placement: int,
    attempt: int,
    extra: dict[str, JsonValue],
    process_group: dist.ProcessGroup | None = None,
    is_alone: bool = False,
) -> Manifest | None:
    """Save `state` and commit it; collective.

    Args:
        state: tensors by name; replicated ones are written once, spread over the ranks, and a
            name that only one rank has is written by that one.
        checkpoints: where.
        step: completed optimizer steps.
        placement: of the attempt that saves.
        attempt: that saves; a newer one's fence makes the save fail.
        extra: JSON; the first rank's counts.
        process_group: default: all ranks.
        is_alone: this rank saves everything, and no other takes part.

    Returns:
        The committed manifest on the first rank, None on the others.

    Raises:
        StorageError: on every rank, when one of them failed; nothing is committed.
        ValueError: something in `state` is not a tensor.
    """
    writer = ManifestWriter(
        checkpoints, step=step, placement=placement, attempt=attempt, extra=extra
    )
    try:
        torch_save(
            dict(state),
            storage_writer=writer,
            planner=save_planner(),
            process_group=process_group,
            no_dist=is_alone or not dist.is_initialized(),
        )
    except CheckpointException as error:
        _raise_cause(error)
    return writer.manifest


def load(
    state: Mapping[str, Tensor],
    manifest: Manifest,
    *,
    checkpoints: CheckpointStore,
    held: Mapping[str, Tensor] | None = None,
    verify: frozenset[str] = frozenset(),
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Fill the tensors of `state` in place; collective. Another world size is resharded.

    Args:
        state: tensors by name.
        manifest: of the checkpoint.
        checkpoints: where it is.
        held: whole shards that this rank has at hand, uint8, by name.
        verify: shards whose hash this rank compares; it reads them whole.
        process_group: default: all ranks.

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


def _raise_cause(error: CheckpointException) -> NoReturn:
    """Raise the failure of the lowest rank: torch's wrapper hides what is wrong."""
    rank = min(error.failures)
    cause = error.failures[rank][0]
    if isinstance(cause, StorageError):
        raise type(cause)(f"rank {rank}: {cause}") from error
    if isinstance(cause, (KeyError, RuntimeError, ValueError)):
        raise ValueError(f"rank {rank}: {cause}") from error  # noqa: TRY004 not about types
    # torch's own is a BaseException and would pass by every `except Exception`.
    raise StorageError(f"rank {rank}: {cause!r}") from error


def _tensor_record(entry: TensorStorageMetadata, chunks: list[Chunk]) -> TensorRecord:
    dtype = entry.properties.dtype
    return TensorRecord(dtype=DTYPE_CODES[dtype], shape=tuple(entry.size), chunks=tuple(chunks))


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
