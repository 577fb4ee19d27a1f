"""What a run begins from, other than from nothing: the checkpoint of another run."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from pydantic import Field

from perdure.storage.frozen_model import FrozenModel
from perdure.training.specs.run_name import NAME

NAMED_STEPS = 5


class OptimizerStart(StrEnum):
    """Initial state of the optimizer."""

    KEEP = "keep"
    RESET = "reset"


class InitFromSpec(FrozenModel):
    """A checkpoint of another run in the same store; step, schedule and data start over."""

    run: str = Field(description="run_id of the other run, in the same store", pattern=NAME)
    step: int | None = Field(
        None, ge=1, description="committed step to load; default: the newest when this run starts"
    )
    optimizer: OptimizerStart = Field(
        OptimizerStart.KEEP,
        description="keep: continue with the saved moments, under this run's hyperparameters; "
        "reset: start from zero moments",
    )

    def missing(self, steps: Sequence[int]) -> tuple[str, str]:
        """The field at fault where there is no such checkpoint, and what is wrong with it.

        Args:
            steps: committed ones of the other run, ascending.
        """
        if not steps:
            return "init_from.run", f"{self.run!r}: the job's storage has no checkpoint of it"
        there = ", ".join(str(step) for step in steps[-NAMED_STEPS:])
        text = f"{self.step}: run {self.run} has no such checkpoint; it has {there}"
        return "init_from.step", text
