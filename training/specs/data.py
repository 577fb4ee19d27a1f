"""What the corpus is and how it is tokenized: the `data` and `tokenizer` sections of a job.

Sizes are bytes.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from perdure.storage.frozen_model import FrozenModel

KIB = 1024
MIB = 1024 * KIB


class DataSpec(FrozenModel):
    """The corpus, its shards, and the loader's processes."""

    sources: tuple[str, ...] = Field(
        min_length=1,
        description="files, folders (searched recursively) or globs: .txt .md .rst .py .jsonl, "
        "each plain, .gz or .zst, and .parquet",
    )
    text_field: str = Field(
        "text", min_length=1, description="field of a jsonl row, or parquet column, with the text"
    )
    shard_size_bytes: int = Field(
        64 * MIB, ge=4 * KIB, description="source text per token shard, bytes"
    )
    num_workers: int = Field(1, ge=0, le=64, description="loader processes per rank; 0: in line")
    persistent_workers: bool | None = Field(
        None, description="keep the loader processes when an epoch ends, as is the default; "
        "false: new ones for each epoch, which read no batch ahead across its end"
    )  # fmt: skip
    prefetch_factor: int = Field(
        2, ge=1, le=1024, description="micro-batches that each loader process keeps ready"
    )
    shuffle: bool = Field(
        default=True, description="a new pseudo-random order of samples each epoch"
    )

    @model_validator(mode="after")
    def _check_workers(self) -> Self:
        if self.persistent_workers is not None and not self.num_workers:
            given = str(self.persistent_workers).lower()
            raise ValueError(
                f"persistent_workers={given} with num_workers=0: there are no loader processes, "
                "leave it out"
            )
        return self


class TokenizerSpec(FrozenModel):
    """Which tokenizer turns the corpus into ids."""

    kind: Literal["byte", "file"] = Field(
        "byte", description="byte: ids are UTF-8 bytes; file: a `tokenizers` JSON file"
    )
    path: str | None = Field(
        None, min_length=1, description="tokenizer.json, for kind=file and only for it"
    )

    @model_validator(mode="after")
    def _check_path(self) -> Self:
        if (self.kind == "file") != (self.path is not None):
            raise ValueError(
                f"path={self.path} with kind={self.kind}: kind=file needs path, "
                "kind=byte must not have it"
            )
        return self
