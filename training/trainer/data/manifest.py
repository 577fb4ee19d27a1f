"""The record of a prepared corpus: token shards, their hashes, and what they were made of.

A corpus is prepared when its manifest is there; shards without one mean nothing. Shards hold
little-endian ids of one dtype and nothing else, in manifest order. Hashes are XXH3-128 as 32 hex
digits: they detect damage, not malice. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

import numpy as np
import xxhash
from pydantic import Field, ValidationError, model_validator

from perdure.storage.errors import Corrupt
from perdure.storage.frozen_model import FrozenModel
from perdure.storage.objects import ObjectStore
from perdure.storage.regular_file import open_regular

FORMAT_VERSION = 1  # also part of every fingerprint
MAX_UINT16_VOCAB = 65536

DtypeName = Literal["uint16", "uint32"]
DTYPES: Mapping[DtypeName, np.dtype[np.unsignedinteger]] = {
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
}


CHUNK_BYTES = 8 * 1024 * 1024


class Source(FrozenModel):
    """A file as it was when its text went into a shard."""

    path: str
    size_bytes: int = Field(ge=0)
    mtime_ns: int
    xxh3_128: str | None = None


class Shard(FrozenModel):
    """One object of token ids."""

    key: str
    num_tokens: int = Field(gt=0)
    size_bytes: int = Field(gt=0)
    xxh3_128: str
    num_documents: int = Field(gt=0)
    sources: tuple[Source, ...]  # of the whole group; a large source has several shards


class CorpusManifest(FrozenModel):
    """Everything a reader needs to know about a prepared corpus."""

    format_version: Literal[1] = 1
    fingerprint: str  # of the inputs: sources, tokenizer, settings
    tokenizer_fingerprint: str
    vocab_size: int = Field(gt=0)
    dtype: DtypeName
    num_tokens: int = Field(gt=0)
    num_documents: int = Field(gt=0)
    shards: tuple[Shard, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_totals(self) -> Self:
        for name in ("num_tokens", "num_documents"):
            total = sum(getattr(shard, name) for shard in self.shards)
            if getattr(self, name) != total:
                raise ValueError(f"{name}={getattr(self, name)}, but the shards' sum is {total}")
        for shard in self.shards:
            if shard.size_bytes != shard.num_tokens * self.numpy_dtype.itemsize:
                raise ValueError(
                    f"shard {shard.key}: size_bytes={shard.size_bytes} does not fit "
                    f"num_tokens={shard.num_tokens} of {self.dtype}"
                )
        return self

    @property
    def numpy_dtype(self) -> np.dtype[np.unsignedinteger]:
        """How ids lie in a shard."""
        return DTYPES[self.dtype]

    @property
    def content_fingerprint(self) -> str:
        """Same for the same token sequence, whatever the shards are called and made of."""
        return hash_bytes("\n".join((self.dtype, *(s.xxh3_128 for s in self.shards))).encode())


def dtype_name(vocab_size: int) -> DtypeName:
    """Choose the smallest dtype that holds every id of a vocabulary."""
    return "uint16" if vocab_size <= MAX_UINT16_VOCAB else "uint32"


def load_manifest(store: ObjectStore, key: str) -> CorpusManifest:
    """Read and check a manifest.

    Raises:
        NotFound: none of that key.
        Corrupt: not a manifest of this format version, or it contradicts itself.
        StorageError: the store failed.
    """
    try:
        return CorpusManifest.model_validate_json(store.get(key))
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "manifest"
        raise Corrupt(f"{store.url(key)}: {place}: {first['msg']}") from exc


def hash_bytes(data: bytes | memoryview) -> str:
    """Hash of bytes in memory."""
    return xxhash.xxh3_128_hexdigest(data)


def hash_file(path: Path) -> str:
    """Hash of a file's content.

    Raises:
        OSError: it cannot be read.
    """
    digest = xxhash.xxh3_128()
    with open_regular(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def hash_object(store: ObjectStore, key: str, size_bytes: int) -> str:
    """Hash of the first `size_bytes` of an object.

    Raises:
        StorageError: as `ObjectStore.get_into` does; Corrupt where the object ends before.
    """
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(CHUNK_BYTES, size_bytes)))
    for start in range(0, size_bytes, CHUNK_BYTES):
        chunk = buffer[: min(CHUNK_BYTES, size_bytes - start)]
        store.get_into(key, chunk, start=start)
        digest.update(chunk)
    return digest.hexdigest()
