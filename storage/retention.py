"""Which checkpoints to keep, and the deletion of the others."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from storage.checkpoint import CheckpointStore, StepState
from storage.leases import read_steps


@dataclass(frozen=True, slots=True)
class Retention:
    """Rules that choose among the committed steps; a step is kept when one of them wants it.

    Attributes:
        keep_last: how many of the newest.
        keep_every_steps: those that this interval divides.
        keep_best: how many of the lowest loss. A step whose loss is not known is kept too: it
            cannot be compared. Among equals the newer is the better; a NaN is the worst.
        losses: loss by step.
    """

    keep_last: int | None = None
    keep_every_steps: int | None = None
    keep_best: int | None = None
    losses: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every_steps", "keep_best"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value} must be above 0")

    def keep(self, steps: Sequence[int]) -> set[int]:
        """The subset of `steps` (ascending) to keep."""
        kept = set(steps[-self.keep_last :]) if self.keep_last else set()
        if self.keep_every_steps:
            kept |= {step for step in steps if step % self.keep_every_steps == 0}
        if self.keep_best:
            ranked = sorted((s for s in steps if s in self.losses), key=self._rank)
            kept |= set(ranked[: self.keep_best]) | {s for s in steps if s not in self.losses}
        return kept

    def _rank(self, step: int) -> tuple[bool, float, int]:
        loss = self.losses[step]
        return (True, 0.0, -step) if math.isnan(loss) else (False, loss, -step)


def apply_retention(
    checkpoints: CheckpointStore, retention: Retention, *, protect: Collection[int]
) -> list[int]:
    """Delete the committed steps that the rules give up, oldest first.

    Args:
        checkpoints: of the run.
        retention: chooses what to keep.
        protect: steps that are being read or are needed otherwise.

    Returns:
        The deleted steps. The newest is never among them, nor are steps set aside, nor those
        with a reader; a later retention deletes these.
    """
    listed = checkpoints.list_steps()
    steps = [one.step for one in listed if one.state is StepState.COMMITTED]
    kept = retention.keep(steps) | set(protect) | read_steps(checkpoints, listed) | set(steps[-1:])
    given_up = [step for step in steps if step not in kept]
    for step in given_up:
        checkpoints.delete(step)
    return given_up
