"""The manifest of a checkpoint: what was saved, where its bytes are, and their hashes.

Readers trust it alone. dtypes are the codes of the safetensors format ("BF16"); offsets, lengths
and shapes count elements, sizes bytes; `written_at_s` is wall time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Literal, Self

import xxhash
from pydantic import ConfigDict, Field, JsonValue, NonNegativeInt, ValidationError, model_validator
from pydantic_core import from_json

from perdure.storage.errors import Corrupt
from perdure.storage.frozen_model import FrozenModel

FORMAT_VERSION: Literal[1] = 1
LOSS = "loss"  # in the extra state: mean of the step, of a program whose losses are known

RunId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
ShardName = Annotated[str, Field(pattern=r"^p\d{4,}-a\d{4,}-rank\d{5,}\.safetensors$")]


class ManifestPart(FrozenModel):
    """Frozen, and an unknown field is an error."""

    # Constants, or pydantic would write a NaN of the extra state as null.
    model_config = ConfigDict(ser_json_inf_nan="constants")


class Chunk(ManifestPart):
    """A box of a tensor: `lengths` elements from `offsets`, stored as `key` in file `shard`."""

    offsets: tuple[NonNegativeInt, ...]
    lengths: tuple[NonNegativeInt, ...]
    shard: ShardName
    key: str


class TensorRecord(ManifestPart):
    """A tensor of the state, of which a manifest has all chunks and a share those of its rank.

    Attributes:
        shape: lengths of the whole tensor.
    """

    dtype: str
    shape: tuple[NonNegativeInt, ...]
    chunks: tuple[Chunk, ...]

    def check_covered(self) -> None:
        """Check that the chunks cover the tensor, each element once.

        Raises:
            ValueError: they leave a gap, overlap, or reach beyond the shape.
        """
        for chunk in self.chunks:
            if not len(chunk.offsets) == len(chunk.lengths) == len(self.shape):
                raise ValueError(f"chunk {chunk.key!r} and shape {self.shape} differ in dims")
            ends = zip(chunk.offsets, chunk.lengths, self.shape, strict=True)
            if any(offset + length > size for offset, length, size in ends):
                raise ValueError(f"chunk {chunk.key!r} reaches beyond shape {self.shape}")
        covered = sum(math.prod(chunk.lengths) for chunk in self.chunks)
        if covered != math.prod(self.shape):
            raise ValueError(f"chunks hold {covered} elements of {math.prod(self.shape)}")
        _refuse_overlaps(self.chunks)


def _refuse_overlaps(chunks: Sequence[Chunk]) -> None:
    """Raise where two boxes have an element in common: as many are then in none.

    Raises:
        ValueError: two chunks overlap; the text names both.
    """
    if len(chunks) < 2:
        return
    # Along the dimension that is cut most, few boxes lie beside each other: not all pairs.
    dims = range(len(chunks[0].offsets))
    along = max(dims, key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}))
    beside: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda box: box.offsets[along]):
        start = chunk.offsets[along]
        beside = [box for box in beside if box.offsets[along] + box.lengths[along] > start]
        for neighbour in beside:
            if _overlap(neighbour, chunk):
                raise ValueError(f"chunks {neighbour.key!r} and {chunk.key!r} overlap")
        beside.append(chunk)


def _overlap(first: Chunk, second: Chunk) -> bool:
    ends = zip(first.offsets, first.lengths, second.offsets, second.lengths, strict=True)
    return all(max(a, b) < min(a + m, b + n) for a, m, b, n in ends)


class ShardRecord(ManifestPart):
    """Size and hash of one file."""

    size_bytes: NonNegativeInt
    xxh3_128: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]

    @classmethod
    def of(cls, data: bytes | memoryview) -> Self:
        """Measure a file's bytes."""
        return cls(size_bytes=memoryview(data).nbytes, xxh3_128=digest(data))


class Manifest(ManifestPart):
    """The commit marker of one checkpoint."""

    format_version: Literal[1] = FORMAT_VERSION
    run_id: RunId
    placement: NonNegativeInt
    attempt: NonNegativeInt
    step: NonNegativeInt
    world_size: int = Field(ge=1)
    written_at_s: float
    tensors: dict[str, TensorRecord]
    shards: dict[ShardName, ShardRecord]
    extra: dict[str, JsonValue] = Field(default={})

    @model_validator(mode="after")
    def _tensors_are_whole(self) -> Self:
        for name, tensor in self.tensors.items():
            try:
                tensor.check_covered()
            except ValueError as exc:
                raise ValueError(f"tensor {name!r}: {exc}") from exc
            for chunk in tensor.chunks:
                if chunk.shard not in self.shards:
                    raise ValueError(f"tensor {name!r} lies in unknown shard {chunk.shard!r}")
        return self

    @property
    def loss(self) -> float | None:
        """Training loss of the step, None where it is not on record."""
        loss = self.extra.get(LOSS)
        return float(loss) if isinstance(loss, (int, float)) else None

    @property
    def size_bytes(self) -> int:
        """Sum of the sizes of all shards."""
        return sum(shard.size_bytes for shard in self.shards.values())

    def to_bytes(self) -> bytes:
        """JSON, UTF-8, with its own hash: readers trust it alone."""
        return checksummed(self.model_dump_json())


def parse_manifest(data: bytes, *, url: str) -> Manifest:
    """Read back `Manifest.to_bytes`.

    Raises:
        Corrupt: not a manifest as it was written, or of a format that is unknown here.
    """
    try:
        document = from_json(verified_document(data, url=url))
        return Manifest.model_validate(document)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise Corrupt(f"{url}: not a manifest: {place}: {first['msg']}") from exc
    except ValueError as exc:
        raise Corrupt(f"{url}: not JSON: {exc}") from exc


_HASH_FIELD = re.compile(rb',"xxh3_128":"([0-9a-f]{32})"\}\Z')


def digest(data: bytes | memoryview) -> str:
    """xxh3_128 as manifests hold it: 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def checksummed(document: str) -> bytes:
    """A JSON object with fields, UTF-8, with its hash."""
    body = document.encode()
    return body[:-1] + b',"xxh3_128":"' + digest(body).encode() + b'"}'


def verified_document(data: bytes, *, url: str) -> bytes:
    """The document of `checksummed`.

    Raises:
        Corrupt: it is not as it was checksummed.
    """
    field = _HASH_FIELD.search(data)
    if field is None:
        raise Corrupt(f"{url}: not a document with its hash at the end")
    body = data[: field.start()] + b"}"
    actual_hash = digest(body)
    if actual_hash != field[1].decode():
        raise Corrupt(f"{url}: xxh3_128 {actual_hash} instead of {field[1].decode()}")
    return body
