"""Model, batch, layout and corpus: the sections of a job file that the reference trainer reads.

Sizes are counts of elements, in the `data` section bytes; steps are completed optimizer steps.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Literal, Self

from pydantic import Field, model_validator

from perdure.storage.frozen_model import SettingsModel
from perdure.training.recovery.replicas import ParallelLayout, RankOrder


class ModelSpec(SettingsModel):
    """Sizes of the built-in decoder (RoPE, RMSNorm, SwiGLU, tied embeddings)."""

    num_layers: int = Field(4, ge=1, le=1024, description="decoder blocks")
    hidden_size: int = Field(128, ge=8, description="width of the residual stream")
    num_heads: int = Field(4, ge=1, description="attention heads; must divide hidden_size")
    num_kv_heads: int | None = Field(
        None, ge=1, description="key/value heads (grouped-query attention); default: num_heads"
    )
    ffn_size: int | None = Field(
        None,
        ge=8,
        description="inner width of the SwiGLU block; default: 8/3 of hidden_size, "
        "rounded up to a multiple of 32",
    )
    seq_len: int = Field(256, ge=2, description="tokens per sample")
    rope_theta: float = Field(10_000.0, gt=0, description="base of the rotary frequencies")
    norm_eps: float = Field(1e-5, gt=0, description="epsilon of RMSNorm")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout rate after attention and SwiGLU")

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


class BatchSpec(SettingsModel):
    """Samples per optimizer step; the global batch does not depend on the world size."""

    global_batch_size: int = Field(
        8, ge=1, description="samples per optimizer step, over all ranks"
    )
    micro_batch_size: int = Field(
        2,
        ge=1,
        description="samples per forward pass of one rank; gradients accumulate over the "
        "passes of a step",
    )

    def check_ranks(self, layout: ParallelLayout) -> None:
        """Check that every data-parallel rank has the same number of whole micro-batches.

        Raises:
            ValueError: the global batch does not divide that way.
        """
        if self.global_batch_size % (layout.dp * self.micro_batch_size):
            ranks = "world size" if layout.dp == layout.world_size else "data-parallel size"
            raise ValueError(
                f"batch.global_batch_size={self.global_batch_size} must be divisible by {ranks} "
                f"x micro_batch_size = {layout.dp} x {self.micro_batch_size}"
            )


class Precision(StrEnum):
    """Arithmetic of forward and backward; weights and optimizer state stay fp32."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class ParallelKind(StrEnum):
    """Ways to spread the model over the ranks."""

    DDP = "ddp"
    FSDP2 = "fsdp2"
    HSDP = "hsdp"
    DATA_PARALLEL = "data_parallel"


class ParallelSpec(SettingsModel):
    """Wrapper of the model, and the layout of your own program over the ranks."""

    kind: ParallelKind = Field(
        ParallelKind.DDP,
        description="ddp, fsdp2 (fully_shard), hsdp (sharded within replica groups, replicated "
        "across them), or data_parallel (one process drives several devices; ddp is faster)",
    )
    replicas: int | None = Field(
        None, ge=2, description="hsdp: number of replica groups; must divide the world size"
    )
    bucket_cap_mb: int | None = Field(
        None, ge=1, le=4096, description="ddp: size in MB of the gradient buckets that are "
        "reduced together; default: torch's, 25"
    )  # fmt: skip
    tensor: int = Field(1, ge=1, description="tensor-parallel size of your program")
    pipeline: int = Field(1, ge=1, description="pipeline-parallel size of your program")
    context: int = Field(1, ge=1, description="context-parallel size of your program")
    expert: int = Field(1, ge=1, description="expert-parallel size of your program")
    expert_tensor: int | None = Field(
        None, ge=1, description="tensor-parallel size of the experts; default: tensor"
    )
    optimizer_weight_shard_size: int = Field(
        1, ge=1, description="ranks of data and context parallelism that share one optimizer state"
    )
    order: RankOrder = Field(
        RankOrder.PP_LAST,
        description="order in which your program numbers ranks, fastest axis first",
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

    def check_session(self, world_size: int, precision: Precision) -> None:
        """Check that a session of this many ranks can wrap its model so.

        Raises:
            ValueError: it cannot.
        """
        if self.kind is ParallelKind.DATA_PARALLEL and world_size != 1:
            raise ValueError(
                f"parallelism.kind=data_parallel is one process: engine.nodes x slots_per_node = "
                f"{world_size} must be 1"
            )
        is_sharded = self.kind in (ParallelKind.FSDP2, ParallelKind.HSDP)
        if is_sharded and precision is Precision.FP16:
            raise ValueError(f"precision=fp16 with parallelism.kind={self.kind}: use bf16 or fp32")

    @property
    def is_default(self) -> bool:
        """Whether nothing but the wrapping is given."""
        model = (self.tensor, self.pipeline, self.context, self.expert, self.expert_tensor or 1)
        return max(*model, self.optimizer_weight_shard_size) == 1

    def layout(self, world_size: int) -> ParallelLayout:
        """Lay out a number of ranks.

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


class OptimizerSpec(SettingsModel):
    """AdamW with a cosine schedule after a linear warm-up."""

    lr: float = Field(3e-4, gt=0, description="peak learning rate")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW betas, each in [0, 1)")
    eps: float = Field(1e-8, gt=0, description="AdamW epsilon")
    weight_decay: float = Field(0.1, ge=0, description="weight decay of matrices; norms have none")
    grad_clip_norm: float = Field(
        1.0, gt=0, description="global gradient norm above which gradients are clipped"
    )
    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up")
    min_lr_ratio: float = Field(
        0.1, ge=0, le=1, description="final learning rate as a fraction of lr"
    )

    @model_validator(mode="after")
    def _check_betas(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas}: each must be in [0, 1)")
        return self

    def check_steps(self, steps: int) -> None:
        """Check that the warm-up ends before the run.

        Raises:
            ValueError: it does not.
        """
        if self.warmup_steps > steps:
            raise ValueError(
                f"optimizer.warmup_steps={self.warmup_steps} must not exceed steps={steps}"
            )


KIB = 1024
MIB = 1024 * KIB


class DataSpec(SettingsModel):
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
            value = str(self.persistent_workers).lower()
            raise ValueError(
                f"persistent_workers={value} with num_workers=0: there are no loader processes, "
                "leave it out"
            )
        return self


class TokenizerSpec(SettingsModel):
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
