"""How a command's steps are read from what it prints: a known format, or patterns of the job.

What is found in one line belongs together. Steps are completed optimizer steps.
"""

from __future__ import annotations

import re
from enum import StrEnum
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
    """Programs with a known output format; MindSpeed-LLM prints as Megatron-LM does."""

    MEGATRON = "megatron"
    TRANSFORMERS = "transformers"
    LIGHTNING = "lightning"
    NANOGPT = "nanogpt"
    TORCHTITAN = "torchtitan"


class ProgressSpec(FrozenModel):
    """Format in which a command prints its step, loss and so on."""

    kind: ProgressKind | None = Field(None, description="program whose output format is known")
    patterns: tuple[str, ...] = Field(
        (), description="regular expressions of your own in place of `kind`, each searched in "
        f"every line; named groups: {', '.join(GROUPS)}"
    )  # fmt: skip
    counts_from: Literal[0, 1] | None = Field(
        None, description="number that `patterns` find for the first completed step; default: 1"
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
