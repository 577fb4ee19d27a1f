"""Settings of a command: its output format, its own checkpoints, and how it starts from them again.

The groups that match in one line of output belong together. Steps are completed optimizer steps.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from perdure.storage.frozen_model import SettingsModel

# Names of the groups that a pattern may have, with the meaning of each.
GROUPS = {
    "step": "number of the step",
    "target": "number of the last step",
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
    "epochs": "of the whole training, where no target is printed",
}
RESERVED_PREFIXES = ("MA_", "VC_", "PERDURE_")
_OF_EPOCH = {"epoch", "batch", "batches"}


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_VARIABLE_BYTES = (128 << 10) - 1  # Linux: of a text that a process is started with


def check_variables(variables: Iterable[str] | Mapping[str, str]) -> None:
    """Check that a process can be started with variables; no message shows a name or value.

    Raises:
        ValueError: it cannot.
    """
    if not all(_VARIABLE.fullmatch(name) for name in variables):
        raise ValueError(
            "a name is that of no variable: letters, digits and _ are allowed, no digit first"
        )
    if not isinstance(variables, Mapping):
        return
    for name, value in variables.items():
        if len(f"{name}={value}".encode()) > MAX_VARIABLE_BYTES:
            raise ValueError(
                f"{name} has more than {MAX_VARIABLE_BYTES} bytes, which no process gets"
            )


class ProgressKind(StrEnum):
    """Programs with a known output format; MindSpeed-LLM prints as Megatron-LM does."""

    MEGATRON = "megatron"
    TRANSFORMERS = "transformers"
    LIGHTNING = "lightning"
    NANOGPT = "nanogpt"
    TORCHTITAN = "torchtitan"
    MINDFORMERS = "mindformers"
    MINDSPORE = "mindspore"


class ProgressSpec(SettingsModel):
    """Format in which a command prints its step, loss and so on."""

    kind: ProgressKind | None = Field(None, description="program whose output format is known")
    patterns: tuple[str, ...] = Field(
        (), description="regular expressions of your own in place of `kind`, each searched in "
        f"every line; named groups: {', '.join(GROUPS)}"
    )  # fmt: skip
    counts_from: Literal[0, 1] | None = Field(
        None, description="number that `patterns` find for the first completed step; default: 1"
    )  # fmt: skip
    steps_per_epoch: int | None = Field(
        None, ge=1, description="kind=mindspore, which prints the step within the epoch: steps of "
        "an epoch; default: the last step of the first epoch that ends in the output"
    )  # fmt: skip

    @field_validator("patterns")
    @classmethod
    def _check_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names: set[str] = set()
        for pattern in value:
            names |= groups_of(pattern)
        if value and "step" not in names and not names >= _OF_EPOCH:
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
        if self.steps_per_epoch is not None and self.kind is not ProgressKind.MINDSPORE:
            raise ValueError("steps_per_epoch is for kind=mindspore: other lines have it")
        return self


def groups_of(pattern: str) -> set[str]:
    """Read the named groups of a pattern.

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
    """Checkpoint layouts of known programs; MindSpeed-LLM has that of Megatron-LM."""

    MEGATRON = "megatron"
    TRANSFORMERS = "transformers"
    LIGHTNING = "lightning"
    NANOGPT = "nanogpt"
    TORCHTITAN = "torchtitan"
    MINDFORMERS = "mindformers"
    MINDSPORE = "mindspore"
    GLOB = "glob"

    @property
    def is_in_parts(self) -> bool:
        """Whether nodes with disks of their own each have a part, and not all the same."""
        return self is CheckpointKind.MEGATRON

    @property
    def is_of_mindspore(self) -> bool:
        """Whether names have epoch and step, and a checkpoint may be a file of every rank."""
        return self in (CheckpointKind.MINDFORMERS, CheckpointKind.MINDSPORE)


class ProgramCheckpointsSpec(SettingsModel):
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
    ranks: int | None = Field(
        None, ge=1, description="kind=mindformers: ranks that each save a file of a checkpoint; "
        "default: engine.nodes times engine.slots_per_node"
    )  # fmt: skip
    end_of_life: bool | None = Field(
        None, description="kind=mindformers: files of some ranks alone count, where no meta.json "
        "names them or a later step: the survivors saved them before they ended; default: whether "
        "env.MS_ENABLE_TFT has TTP:1"
    )  # fmt: skip
    steps_per_epoch: int | None = Field(
        None, ge=1, description="kind=mindformers or mindspore, whose names have epoch and step "
        "within the epoch: steps of an epoch; default: as the files say, or else the largest step "
        "of their names"
    )  # fmt: skip

    @model_validator(mode="after")
    def _check_pattern(self) -> Self:
        if self.kind is CheckpointKind.GLOB and "*" not in self.path:
            raise ValueError(f"path={self.path} has no *, which kind=glob needs for the step")
        if self.kind is CheckpointKind.GLOB and self.upload and "*" in str(Path(self.path).parent):
            raise ValueError(
                f"path={self.path}: upload needs one folder, a * in its last part alone"
            )
        for name in ("ranks", "end_of_life"):
            if getattr(self, name) is not None and self.kind is not CheckpointKind.MINDFORMERS:
                raise ValueError(f"{name} is for kind=mindformers, not {self.kind}")
        if not self.kind.is_of_mindspore:
            if self.steps_per_epoch is not None:
                raise ValueError("steps_per_epoch is for kind=mindformers or mindspore")
        elif self.upload:
            raise ValueError(
                f"upload is not for kind={self.kind}, whose checkpoints are files in the folders "
                "of all ranks: save to storage that all nodes have"
            )
        return self

    def check_upload(self, *, nodes: int, on_this_machine: bool) -> None:
        """Check that each node of the job can upload the checkpoints that it sees.

        Raises:
            ValueError: the nodes would overwrite or miss each other's files.
        """
        if not self.upload or nodes == 1:
            return
        if self.kind is CheckpointKind.TORCHTITAN:
            raise ValueError(
                f"worker.checkpoints.upload with kind={self.kind} is for one node, engine.nodes="
                f"{nodes}: every rank reads the files of all; save to storage that all have"
            )
        names = string.Template(self.path).get_identifiers()
        if self.kind.is_in_parts and on_this_machine and "PERDURE_NODE" not in names:
            raise ValueError(
                f"worker.checkpoints.path={self.path} is one folder, engine.nodes={nodes}: "
                "with upload each node has a part of its own; put ${PERDURE_NODE} into the path, "
                "or leave out upload"
            )


class ResumeSpec(SettingsModel):
    """Additions to a command that starts again when this run has a checkpoint."""

    args: tuple[str, ...] = Field((), description="arguments to append to the command")
    env: dict[str, str] = Field({}, description="environment variables to add")

    @field_validator("env")
    @classmethod
    def _check_env(cls, value: dict[str, str]) -> dict[str, str]:
        check_variables(value)
        for name in value:
            if name.startswith(RESERVED_PREFIXES):
                raise ValueError(f"{name} is set by the node agent, choose another name")
        return value

    @model_validator(mode="after")
    def _check_any(self) -> Self:
        if not (self.args or self.env):
            raise ValueError("give args or env, which are added when the command is started again")
        return self
