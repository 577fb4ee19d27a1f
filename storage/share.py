"""The share of a rank in a checkpoint, and the merge of all shares into the manifest.

A share lies in host memory, on a node's disk or, until the manifest is committed, beside its
shard in the store: one share of every rank is enough to restore, and to publish.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from pydantic import (
    Field,
    JsonValue,
    NonNegativeInt,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import from_json

from perdure.storage.checkpoint import CheckpointStore, shard_name
from perdure.storage.errors import Corrupt
from perdure.storage.manifest import (
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


class SaveId(ManifestPart):
    """Identity of a save of one attempt, common to all its shares.

    Attributes:
        world_size: ranks whose shares make up the whole.
        first_file: number in the name of the first rank's file. A save by a few ranks has
            numbers beyond the world's: all ranks may have begun to save the same step.
    """

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


class Share(ManifestPart):
    """The part of a checkpoint that one rank adds.

    Its JSON has the fields of `save_id` beside its own fields.

    Attributes:
        size_bytes: size of the rank's file.
        tensors: records by name, with the chunks that this rank saves.
        extra: JSON of the rank; the first rank's is the checkpoint's.
        attachments: objects that the store gets with the share, by key.
    """

    run_id: RunId
    save_id: SaveId
    rank: NonNegativeInt
    size_bytes: NonNegativeInt
    tensors: dict[str, TensorRecord]
    extra: dict[str, JsonValue] = Field(default_factory=dict)
    attachments: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _nest_save_id(cls, document: Any) -> Any:
        if not isinstance(document, dict) or "save_id" in document:
            return document
        save_id = {name: document[name] for name in SaveId.model_fields if name in document}
        fields = {name: value for name, value in document.items() if name not in save_id}
        return {**fields, "save_id": save_id}

    @model_serializer(mode="wrap")
    def _flatten_save_id(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = handler(self)
        return {**document.pop("save_id"), **document}

    @property
    def step(self) -> int:
        """Completed optimizer steps of the saved state."""
        return self.save_id.step

    @property
    def shard(self) -> str:
        """Name of the rank's file."""
        return self.save_id.shard(self.rank)


class WrittenShare(ManifestPart):
    """A share whose file has been written and hashed."""

    share: Share
    record: ShardRecord


def merge(
    written: Sequence[WrittenShare], *, owner: tuple[int, int], written_at_s: float
) -> Manifest:
    """The manifest of a save from the shares of all its ranks, in any order.

    Args:
        written: a share of every rank.
        owner: (placement, attempt) that publishes; after a restore not the one that saved.
        written_at_s: wall time, for records.

    Raises:
        Corrupt: a share is missing or of another save, or the chunks do not cover a tensor.
    """
    by_rank = sorted(written, key=lambda each: each.share.rank)
    shares = [each.share for each in by_rank]
    first, save_id = shares[0], shares[0].save_id
    is_complete = [share.rank for share in shares] == list(range(save_id.world_size))
    if not is_complete or {(share.run_id, share.save_id) for share in shares} != {
        (first.run_id, save_id)
    }:
        raise Corrupt(f"step {first.step}: not one share of each of {save_id.world_size} ranks")
    tensors: dict[str, TensorRecord] = {}
    for share in shares:
        for name, part in share.tensors.items():
            tensors[name] = _joined(name, tensors.get(name), part)
    try:
        return Manifest(
            run_id=first.run_id,
            placement=owner[0],
            attempt=owner[1],
            step=first.step,
            world_size=save_id.world_size,
            written_at_s=written_at_s,
            tensors=tensors,
            shards={each.share.shard: each.record for each in by_rank},
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
        checkpoints: checkpoints that hold the file.
        written: record of the share.
        out: memory as large as the file.

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
    names = (info.key.removeprefix(prefix) for info in checkpoints.store.list(prefix))
    numbers = (text.removesuffix(RECORD_SUFFIX) for text in names if text.endswith(RECORD_SUFFIX))
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
        return WrittenShare.model_validate(from_json(verified_document(data, url=url)))
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


def _joined(name: str, joined: TensorRecord | None, part: TensorRecord) -> TensorRecord:
    if joined is None:
        return part
    if (joined.dtype, joined.shape) != (part.dtype, part.shape):
        raise Corrupt(f"{name}: ranks saved it with different types or shapes")
    return joined.model_copy(update={"chunks": (*joined.chunks, *part.chunks)})
