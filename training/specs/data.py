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
    """The corpus, its token shards, and the loader processes."""

    sources: tuple[str, ...] = Field(
        min_length=1,
        description="files, folders (searched recursively) or globs: .txt .md .rst .py .jsonl, "
        "plain or compressed (.gz, .zst), and .parquet",
    )
    text_field: str = Field(
        "text",
        min_length=1,
        description="name of the JSONL field or Parquet column that holds the text",
    )
    shard_size_bytes: int = Field(
        64 * MIB, ge=4 * KIB, description="bytes of source text per token shard"
    )
    num_workers: int = Field(
        1, ge=0, le=64, description="loader processes per rank; 0: the rank loads its own batches"
    )
    persistent_workers: bool | None = Field(
        None, description="keep the loader processes across epochs; false: start new ones for "
        "each epoch, without reading ahead into the next; default: true"
    )  # fmt: skip
    prefetch_factor: int = Field(
        2, ge=1, le=1024, description="micro-batches that each loader process keeps ready"
    )
    shuffle: bool = Field(
        default=True, description="draw a new pseudo-random order of the samples for each epoch"
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
    """The tokenizer that turns the corpus into token ids."""

    kind: Literal["byte", "file"] = Field(
        "byte",
        description="byte: token ids are UTF-8 bytes; file: a JSON file of the "
        "`tokenizers` library",
    )
    path: str | None = Field(
        None,
        min_length=1,
        description="path of tokenizer.json; required with kind=file, refused otherwise",
    )

    @model_validator(mode="after")
    def _check_path(self) -> Self:
        if (self.kind == "file") != (self.path is not None):
            raise ValueError(
                f"path={self.path} with kind={self.kind}: kind=file needs path, "
                "kind=byte must not have it"
            )
        return self
