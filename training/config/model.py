"""What is trained and how: the sections of a job file that the reference trainer reads.

Sizes are counts of elements, steps are completed optimizer steps.

What the corpus is and how it is tokenized: the `data` and `tokenizer` sections of a job.

Sizes are bytes.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Literal, Self

from pydantic import Field, model_validator

from perdure.storage.frozen_model import FrozenModel
from perdure.training.recovery.replicas import ParallelLayout, RankOrder


class ModelSpec(FrozenModel):
    """Sizes of the reference decoder (RoPE, RMSNorm, SwiGLU, tied embeddings)."""

    num_layers: int = Field(4, ge=1, le=1024, description="decoder blocks")
    hidden_size: int = Field(128, ge=8, description="width of the residual stream")
    num_heads: int = Field(4, ge=1, description="attention heads; divides hidden_size")
    num_kv_heads: int | None = Field(
        None, ge=1, description="key/value heads (grouped-query attention); default: num_heads"
    )
    ffn_size: int | None = Field(
        None, ge=8, description="width inside the SwiGLU block; default: 8/3 of hidden_size"
    )
    seq_len: int = Field(256, ge=2, description="tokens in one sample")
    rope_theta: float = Field(10_000.0, gt=0, description="base of the rotary frequencies")
    norm_eps: float = Field(1e-5, gt=0, description="epsilon of RMSNorm")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout after attention and SwiGLU")

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be divisible by num_heads={self.num_heads}"
            )
        if (self.hidden_size // self.num_heads) % 2:
            raise ValueError(
                f"hidden_size/num_heads={self.hidden_size // self.num_heads} must be even, "
                "rotary embeddings turn pairs"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be divisible by num_kv_heads={self.kv_heads}"
            )
        return self

    @property
    def kv_heads(self) -> int:
        """Key/value heads in effect."""
        return self.num_kv_heads or self.num_heads

    @property
    def ffn(self) -> int:
        """SwiGLU width in effect: 8/3 of hidden_size, up to a multiple of 32.

        8/3 keeps the parameter count of a 4x GELU block (Shazeer, arXiv 2002.05202).
        """
        return self.ffn_size or -(-self.hidden_size * 8 // 3 // 32) * 32

    def num_parameters(self, vocab_size: int) -> int:
        """Trainable parameters with `vocab_size` tied embedding rows."""
        d = self.hidden_size
        kv = d // self.num_heads * self.kv_heads
        block = 2 * d * d + 2 * d * kv + 3 * d * self.ffn + 2 * d
        return vocab_size * d + self.num_layers * block + d


class BatchSpec(FrozenModel):
    """Samples per optimizer step; the global batch does not depend on the world size."""

    global_batch_size: int = Field(8, ge=1, description="samples in one optimizer step, all ranks")
    micro_batch_size: int = Field(
        2, ge=1, description="samples in one forward pass of one rank; the rest is accumulated"
    )


class Precision(StrEnum):
    """Arithmetic of forward and backward; weights and optimizer state stay fp32."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class ParallelKind(StrEnum):
    """How the model is spread over the ranks."""

    DDP = "ddp"
    FSDP2 = "fsdp2"
    HSDP = "hsdp"
    DATA_PARALLEL = "data_parallel"


class ParallelSpec(FrozenModel):
    """Wrapping of the model, and how a program of your own lays it out over the ranks."""

    kind: ParallelKind = Field(
        ParallelKind.DDP,
        description="ddp, fsdp2 (fully_shard), hsdp (sharded inside, replicated across), or "
        "data_parallel (one process, several cards; ddp is better)",
    )
    replicas: int | None = Field(
        None, ge=2, description="hsdp: number of replica groups; divides the world size"
    )
    bucket_cap_mb: int | None = Field(
        None, ge=1, le=4096, description="ddp: gradients that are summed at once, MB; default: "
        "torch's, 25"
    )  # fmt: skip
    tensor: int = Field(1, ge=1, description="tensor-parallel size of your program")
    pipeline: int = Field(1, ge=1, description="pipeline-parallel size of your program")
    context: int = Field(1, ge=1, description="context-parallel size of your program")
    expert: int = Field(1, ge=1, description="expert-parallel size of your program")
    expert_tensor: int | None = Field(
        None, ge=1, description="tensor-parallel size of the experts; default: tensor"
    )
    optimizer_weight_shard_size: int = Field(
        1, ge=1, description="ranks of data and context parallelism that share an optimizer state"
    )
    order: RankOrder = Field(
        RankOrder.PP_LAST, description="how your program numbers ranks, fastest axis first"
    )

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if (self.kind is ParallelKind.HSDP) != (self.replicas is not None):
            raise ValueError(
                f"replicas={self.replicas} with kind={self.kind}: hsdp needs replicas, "
                "the other kinds must not have it"
            )
        if self.bucket_cap_mb is not None and self.kind is not ParallelKind.DDP:
            raise ValueError(
                f"bucket_cap_mb={self.bucket_cap_mb} with kind={self.kind}: only kind=ddp has "
                "buckets, leave it out"
            )
        if self.optimizer_weight_shard_size > 1 and self.kind is not ParallelKind.DDP:
            raise ValueError(
                f"optimizer_weight_shard_size={self.optimizer_weight_shard_size} with "
                f"kind={self.kind}: it is for kind=ddp, the other kinds have shards of their own"
            )
        if self.order is not RankOrder.PP_LAST and self.pipeline == 1:
            raise ValueError(f"order={self.order} changes nothing with pipeline=1, leave it out")
        return self

    @property
    def is_default(self) -> bool:
        """Whether nothing but the wrapping is given."""
        model = (self.tensor, self.pipeline, self.context, self.expert, self.expert_tensor or 1)
        return max(*model, self.optimizer_weight_shard_size) == 1

    def layout(self, world_size: int) -> ParallelLayout:
        """The layout on a number of ranks.

        Raises:
            ValueError: the sizes do not fit together, or not the number of ranks.
        """
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "context": self.context}
        model = math.prod(sizes.values())
        if world_size % model:
            text = " x ".join(f"{name}={size}" for name, size in sizes.items())
            raise ValueError(f"{text} = {model} must divide the number of ranks {world_size}")
        dp = world_size // model
        if dp * self.context % (self.replicas or 1):
            raise ValueError(
                f"replicas={self.replicas} must divide data x context parallelism = {dp} x "
                f"{self.context} of world size {world_size}"
            )
        match self.kind:
            case ParallelKind.FSDP2:
                shards = dp * self.context
            case ParallelKind.HSDP:
                shards = dp * self.context // (self.replicas or 1)
            case ParallelKind.DDP | ParallelKind.DATA_PARALLEL:  # whatever a process drives
                shards = self.optimizer_weight_shard_size
        return ParallelLayout(
            dp=dp,
            tp=self.tensor,
            pp=self.pipeline,
            cp=self.context,
            ep=self.expert,
            etp=self.expert_tensor,
            optimizer_shards=shards,
            order=self.order,
        )


class OptimizerSpec(FrozenModel):
    """AdamW with a cosine schedule after a linear warm-up."""

    lr: float = Field(3e-4, gt=0, description="peak learning rate")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW betas, each in [0, 1)")
    eps: float = Field(1e-8, gt=0, description="AdamW epsilon")
    weight_decay: float = Field(0.1, ge=0, description="on matrices only, not on norms")
    grad_clip_norm: float = Field(1.0, gt=0, description="largest global gradient norm")
    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="last learning rate / lr")

    @model_validator(mode="after")
    def _check_betas(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas}: each must be in [0, 1)")
        return self


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
