"""How a command's steps are read from what it prints: a known format, or patterns of the job.

What is found in one line belongs together. Steps are completed optimizer steps.

Where a command keeps checkpoints of its own, and how it is started again from them.
"""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from perdure.storage.frozen_model import FrozenModel

# What a named group of a pattern may be called, and what it holds.
GROUPS = {
    "step": "number of the step",
    "target": "number of the last one",
    "loss": "of the step",
    "grad_norm": "before clipping",
    "lr": "learning rate",
    "step_ms": "milliseconds that a step takes",
    "step_s": "seconds that a step takes",
    "tokens_per_s": "of all ranks together",
    "device_tokens_per_s": "of one device",
    "mfu_percent": "model FLOP/s over peak FLOP/s",
    "samples": "consumed so far",
    "epoch": "number of the epoch",
    "batch": "number in the epoch, where no step is printed",
    "batches": "of an epoch",
}
_OF_EPOCH = {"epoch", "batch", "batches"}


class ProgressKind(StrEnum):
    """Programs whose lines are known; MindSpeed-LLM prints as Megatron-LM does."""

    MEGATRON = "megatron"
    TRANSFORMERS = "transformers"
    LIGHTNING = "lightning"
    NANOGPT = "nanogpt"
    TORCHTITAN = "torchtitan"


class ProgressSpec(FrozenModel):
    """Where in its output a command shows step, loss and the like."""

    kind: ProgressKind | None = Field(None, description="a format that is known")
    patterns: tuple[str, ...] = Field(
        (), description="or regular expressions of your own, each searched in every line; named "
        f"groups are {', '.join(GROUPS)}"
    )  # fmt: skip
    counts_from: Literal[0, 1] | None = Field(
        None, description="what `patterns` find as the number of the first completed step; "
        "default: 1"
    )  # fmt: skip

    @field_validator("patterns")
    @classmethod
    def _check_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        found: set[str] = set()
        for pattern in value:
            found |= groups_of(pattern)
        if value and "step" not in found and not found >= _OF_EPOCH:
            raise ValueError(
                f"{', '.join(map(repr, value))}: none has a group (?P<step>...), nor have they "
                "(?P<epoch>...), (?P<batch>...) and (?P<batches>...)"
            )
        return value

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.kind is None) == (not self.patterns):
            kinds = ", ".join(ProgressKind)
            raise ValueError(f"give either kind, one of {kinds}, or patterns of your own")
        if self.kind is not None and self.counts_from is not None:
            raise ValueError(f"counts_from is for patterns, kind={self.kind} has its own")
        return self


def groups_of(pattern: str) -> set[str]:
    """The named groups of a pattern.

    Raises:
        ValueError: it is no regular expression, or has a group that is not known.
    """
    try:
        names = set(re.compile(pattern).groupindex)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    unknown = sorted(names - GROUPS.keys())
    if unknown:
        raise ValueError(
            f"{pattern!r} has the group {unknown[0]!r}, which must be one of {', '.join(GROUPS)}"
        )
    if not names:
        raise ValueError(f"{pattern!r} has no named group, such as (?P<step>\\d+)")
    return names


class CheckpointKind(StrEnum):
    """How a program lays out its checkpoints; MindSpeed-LLM does as Megatron-LM does."""

    MEGATRON = "megatron"
    TRANSFORMERS = "transformers"
    LIGHTNING = "lightning"
    NANOGPT = "nanogpt"
    TORCHTITAN = "torchtitan"
    GLOB = "glob"

    @property
    def is_in_parts(self) -> bool:
        """Whether nodes with disks of their own each have a part, and not all the same."""
        return self is CheckpointKind.MEGATRON


class ProgramCheckpointsSpec(FrozenModel):
    """Where a command saves."""

    kind: CheckpointKind = Field(description="layout; glob: files or folders of a pattern")
    path: str = Field(
        min_length=1,
        description="the folder that the program is told to save to (--save, output_dir, dirpath, "
        "out_dir, dump_folder/checkpoint); of kind glob a pattern, whose last number is the step, "
        "such as /out/step-*.pt; variables are filled in as in the command",
    )
    settle_s: float = Field(
        30.0, ge=0, description="of kind glob, which leaves no last sign of a save: complete when "
        "nothing has changed for so long while the program ran on"
    )  # fmt: skip

    upload: bool = Field(
        False, description="put each complete one into the run's store, from every node that has "
        "saved one, and bring the newest to nodes that lack it; for a path on the nodes' own disks"
    )  # fmt: skip
    keep: int | None = Field(
        None, ge=2, description="complete checkpoints of the run that are kept, the newest; older "
        "ones are deleted; default: all, for the program itself deletes what it does not need"
    )  # fmt: skip

    @model_validator(mode="after")
    def _check_pattern(self) -> Self:
        if self.kind is CheckpointKind.GLOB and "*" not in self.path:
            raise ValueError(f"path={self.path} has no *, which kind=glob needs for the step")
        if self.kind is CheckpointKind.GLOB and self.upload and "*" in str(Path(self.path).parent):
            raise ValueError(
                f"path={self.path}: upload needs one folder, a * in its last part alone"
            )
        return self


class ResumeSpec(FrozenModel):
    """What is added when a command is started again and has a checkpoint of this run."""

    args: tuple[str, ...] = Field((), description="arguments, behind those of the command")
    env: dict[str, str] = Field({}, description="environment variables")

    @field_validator("env")
    @classmethod
    def _check_env(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if name.startswith(("MA_", "VC_", "PERDURE_")):
                raise ValueError(f"{name} is set by the node agent, choose another name")
        return value

    @model_validator(mode="after")
    def _check_any(self) -> Self:
        if not (self.args or self.env):
            raise ValueError("give args or env, which are added when the command is started again")
        return self
