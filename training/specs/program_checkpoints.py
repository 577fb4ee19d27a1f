"""Where a command keeps checkpoints of its own, and how it is started again from them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from perdure.storage.frozen_model import FrozenModel


class CheckpointKind(StrEnum):
    """Checkpoint layouts of known programs; MindSpeed-LLM has that of Megatron-LM."""

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
    """Checkpoints that a command saves itself."""

    kind: CheckpointKind = Field(
        description="layout of the checkpoints; glob: files or folders that match a pattern"
    )
    path: str = Field(
        min_length=1,
        description="folder that the program saves to (--save, output_dir, dirpath, out_dir, "
        "dump_folder/checkpoint); kind=glob: a pattern such as /out/step-*.pt, the last number of "
        "a name being the step; variables are filled in as in the command",
    )
    settle_s: float = Field(
        30.0, ge=0, description="kind=glob, whose layout does not mark the end of a save: seconds "
        "without a change, while the program runs on, before a checkpoint counts as complete"
    )  # fmt: skip

    upload: bool = Field(
        False, description="for a path on the nodes' own disks: upload each complete checkpoint "
        "to the run's store, from every node that saved it, and copy the newest to nodes that "
        "lack it"
    )  # fmt: skip
    keep: int | None = Field(
        None, ge=2, description="number of complete checkpoints of the run to keep, the newest; "
        "older ones are deleted; default: delete nothing, since programs usually delete their own"
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
    """Additions to a command that starts again when this run has a checkpoint."""

    args: tuple[str, ...] = Field((), description="arguments to append to the command")
    env: dict[str, str] = Field({}, description="environment variables to add")

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
