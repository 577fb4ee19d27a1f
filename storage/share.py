"""One rank's share of a checkpoint, and how the shares of all ranks become its manifest.

A share lies in host memory, on a node's disk or, until the manifest is committed, beside its
shard in the store: one share of every rank is enough to restore, and to publish.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from pydantic import Field, JsonValue, NonNegativeInt, ValidationError

from perdure.storage.checkpoint import CheckpointStore, shard_name
from perdure.storage.errors import Corrupt
from perdure.storage.manifest import (
    Chunk,
    Manifest,
    ManifestPart,
    RunId,
    ShardRecord,
    TensorRecord,
    checksummed,
    digest,
    verified_document,
)

RECORD_SUFFIX = ".json"


class PartOfTensor(ManifestPart):
    """What one rank saves of a tensor; the shape is that of the whole."""

    dtype: str
    shape: tuple[NonNegativeInt, ...]
    chunks: tuple[Chunk, ...]


class Share(ManifestPart):
    """What one rank adds to a checkpoint.

    Attributes:
        world_size: ranks whose shares make up the whole.
        size_bytes: of that file.
        extra: JSON of the rank; the first rank's is the checkpoint's.
        attachments: objects that the store gets with the share, by key.
        first_file: number in the name of the first rank's file. A save by a few ranks has
            numbers beyond the world's: all ranks may have begun to save the same step.
    """

    run_id: RunId
    placement: NonNegativeInt
    attempt: NonNegativeInt
    step: NonNegativeInt
    rank: NonNegativeInt
    world_size: int = Field(ge=1)
    size_bytes: NonNegativeInt
    tensors: dict[str, PartOfTensor]
    extra: dict[str, JsonValue] = Field(default_factory=dict)
    attachments: dict[str, str] = Field(default_factory=dict)
    first_file: NonNegativeInt = 0

    @property
    def shard(self) -> str:
        """Name of the rank's file."""
        return self.save_id.shard(self.rank)

    @property
    def save_id(self) -> SaveId:
        """Which save this is a share of."""
        return SaveId(
            step=self.step,
            placement=self.placement,
            attempt=self.attempt,
            world_size=self.world_size,
            first_file=self.first_file,
        )


class SaveId(ManifestPart):
    """One save of one attempt: what all its shares have in common."""

    step: NonNegativeInt
    placement: NonNegativeInt
    attempt: NonNegativeInt
    world_size: int = Field(ge=1)
    first_file: NonNegativeInt = 0

    def shard(self, rank: int) -> str:
        """Name of a rank's file."""
        return shard_name(self.placement, self.attempt, self.first_file + rank)

    @property
    def owner(self) -> tuple[int, int]:
        """(placement, attempt)."""
        return self.placement, self.attempt


class WrittenShare(ManifestPart):
    """A share whose file has been written and hashed."""

    share: Share
    record: ShardRecord


def merge(
    written: Sequence[WrittenShare], *, owner: tuple[int, int], written_at_s: float
) -> Manifest:
    """The manifest of a save from the shares of all its ranks, in any order.

    Args:
        written: one share per rank.
        owner: (placement, attempt) that publishes; after a restore not the one that saved.
        written_at_s: wall time, for records.

    Raises:
        Corrupt: a share is missing or of another save, or the chunks do not cover a tensor.
    """
    ordered = sorted(written, key=lambda one: one.share.rank)
    first = ordered[0].share
    if [one.share.rank for one in ordered] != list(range(first.world_size)) or any(
        (one.share.run_id, one.share.save_id) != (first.run_id, first.save_id) for one in ordered
    ):
        raise Corrupt(f"step {first.step}: not one share of each of {first.world_size} ranks")
    tensors: dict[str, PartOfTensor] = {}
    for one in ordered:
        for name, part in one.share.tensors.items():
            tensors[name] = _joined(name, tensors.get(name), part)
    try:
        return Manifest(
            run_id=first.run_id,
            placement=owner[0],
            attempt=owner[1],
            step=first.step,
            world_size=first.world_size,
            written_at_s=written_at_s,
            tensors={name: TensorRecord(**dict(part)) for name, part in tensors.items()},
            shards={one.share.shard: one.record for one in ordered},
            extra=first.extra,
        )
    except ValidationError as exc:
        problem = exc.errors(include_url=False, include_input=False)[0]["msg"]
        raise Corrupt(f"step {first.step}: the shares do not make a whole: {problem}") from exc


def put_share(
    checkpoints: CheckpointStore, written: WrittenShare, data: bytes | memoryview
) -> None:
    """Write a share's file, and before it what goes with it."""
    put_attachments(checkpoints, written.share)
    checkpoints.store.put(checkpoints.key(written.share.step, written.share.shard), data)


def put_attachments(checkpoints: CheckpointStore, share: Share) -> None:
    """Write the objects that go with a share."""
    for key, text in share.attachments.items():
        checkpoints.store.put(key, text.encode())


def read_share(checkpoints: CheckpointStore, written: WrittenShare, out: memoryview) -> None:
    """Read a share's file.

    Args:
        checkpoints: where it is.
        written: the share.
        out: memory of its size.

    Raises:
        Corrupt: the file is not as it was written.
    """
    share = written.share
    checkpoints.store.get_into(checkpoints.key(share.step, share.shard), out)
    if digest(out) != written.record.xxh3_128:
        raise Corrupt(f"{checkpoints.url(share.step)}: {share.shard} is damaged")


def put_record(checkpoints: CheckpointStore, written: WrittenShare) -> None:
    """Write the record of a share beside its shard."""
    key = _record_key(checkpoints, written.share.save_id, written.share.rank)
    checkpoints.store.put(key, checksummed(written.model_dump_json()))


def recorded_ranks(checkpoints: CheckpointStore, save: SaveId) -> set[int]:
    """Ranks whose shard of a save has been written."""
    first = _record_key(checkpoints, save, 0)
    prefix = first.removesuffix(f"{save.first_file:05d}{RECORD_SUFFIX}")
    found = (info.key.removeprefix(prefix) for info in checkpoints.store.list(prefix))
    numbers = (text.removesuffix(RECORD_SUFFIX) for text in found if text.endswith(RECORD_SUFFIX))
    ranks = {int(text) - save.first_file for text in numbers if text.isdecimal()}
    return ranks & set(range(save.world_size))


def read_record(checkpoints: CheckpointStore, save: SaveId, rank: int) -> WrittenShare:
    """The record of a share.

    Raises:
        NotFound: there is none.
        Corrupt: the object is not the record of this share.
    """
    key = _record_key(checkpoints, save, rank)
    url = checkpoints.store.url(key)
    written = parse_record(checkpoints.store.get(key), url=url)
    share = written.share
    if (share.run_id, share.save_id, share.rank) != (checkpoints.run_id, save, rank):
        raise Corrupt(f"{url}: is of another share")
    return written


def parse_record(data: bytes, *, url: str) -> WrittenShare:
    """Read back what `put_record` writes.

    Raises:
        Corrupt: the object is not as it was written.
    """
    try:
        return WrittenShare.model_validate(json.loads(verified_document(data, url=url)))
    except ValueError as exc:
        raise Corrupt(f"{url}: not the record of a share") from exc


def delete_records(checkpoints: CheckpointStore, save: SaveId, ranks: Collection[int]) -> None:
    """Remove the records of a save; the manifest has what they held."""
    for rank in ranks:
        checkpoints.store.delete(_record_key(checkpoints, save, rank))


def named_ranks(ranks: Sequence[int]) -> str:
    """The first few of many ranks, for people."""
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown


def _record_key(checkpoints: CheckpointStore, save: SaveId, rank: int) -> str:
    return checkpoints.key(save.step, save.shard(rank).removesuffix(".safetensors") + RECORD_SUFFIX)


def _joined(name: str, one: PartOfTensor | None, other: PartOfTensor) -> PartOfTensor:
    if one is None:
        return other
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        raise Corrupt(f"{name}: ranks saved it with different types or shapes")
    return one.model_copy(update={"chunks": (*one.chunks, *other.chunks)})
