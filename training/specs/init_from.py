"""What a run begins from, other than from nothing: the checkpoint of another run."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from pydantic import Field

from perdure.storage.frozen_model import FrozenModel
from perdure.training.specs.run_name import NAME

NAMED_STEPS = 5


class OptimizerStart(StrEnum):
    """What becomes of the optimizer's state."""

    KEEP = "keep"
    RESET = "reset"


class InitFromSpec(FrozenModel):
    """A checkpoint of another run in the same storage; step, schedule and data begin anew."""

    run: str = Field(description="run_id of the other run", pattern=NAME)
    step: int | None = Field(
        None, ge=1, description="its committed step; default: the newest when this run starts"
    )
    optimizer: OptimizerStart = Field(
        OptimizerStart.KEEP,
        description="keep: the moments go on, with this run's own hyperparameters; reset: they "
        "begin at nothing",
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
