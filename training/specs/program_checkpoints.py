"""Where a command keeps checkpoints of its own, and how it is started again from them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from perdure.storage.frozen_model import FrozenModel


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
