"""Which checkpoints to keep: small frozen policies, combined by `KeepAnyOf`.

Steps are completed optimizer steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from storage.checkpoint import CheckpointStore, StepState
from storage.leases import read_steps


class RetentionPolicy(Protocol):
    """Chooses among the committed steps."""

    def keep(self, steps: Sequence[int]) -> set[int]:
        """The subset of `steps` (ascending) to keep."""
        ...


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Keep the newest `num_steps` checkpoints."""

    num_steps: int

    def __post_init__(self) -> None:
        _require_positive("num_steps", self.num_steps)

    def keep(self, steps: Sequence[int]) -> set[int]:
        """See `RetentionPolicy`."""
        return set(sorted(steps)[-self.num_steps :])


@dataclass(frozen=True, slots=True)
class KeepEvery:
    """Keep the steps that `interval_steps` divides."""

    interval_steps: int

    def __post_init__(self) -> None:
        _require_positive("interval_steps", self.interval_steps)

    def keep(self, steps: Sequence[int]) -> set[int]:
        """See `RetentionPolicy`."""
        return {step for step in steps if step % self.interval_steps == 0}


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Keep the `num_steps` checkpoints of the lowest loss.

    A step whose loss is not known is kept too: what cannot be compared is not given up. Among
    equals the newer counts as the better, and a loss that is no number as the worst.

    Attributes:
        losses: loss by step.
    """

    num_steps: int
    losses: Mapping[int, float]

    def __post_init__(self) -> None:
        _require_positive("num_steps", self.num_steps)

    def keep(self, steps: Sequence[int]) -> set[int]:
        """See `RetentionPolicy`."""
        ranked = sorted((s for s in steps if s in self.losses), key=self._rank)
        return set(ranked[: self.num_steps]) | {s for s in steps if s not in self.losses}

    def _rank(self, step: int) -> tuple[bool, float, int]:
        loss = self.losses[step]
        return (True, 0.0, -step) if math.isnan(loss) else (False, loss, -step)


@dataclass(frozen=True, slots=True)
class KeepAnyOf:
    """Keep what one of the policies keeps."""

    policies: tuple[RetentionPolicy, ...]

    def keep(self, steps: Sequence[int]) -> set[int]:
        """See `RetentionPolicy`."""
        return set().union(*(policy.keep(steps) for policy in self.policies))


def apply_retention(
    checkpoints: CheckpointStore, policy: RetentionPolicy, *, protect: Collection[int]
) -> list[int]:
    """Delete the committed steps that the policy gives up, oldest first.

    Args:
        checkpoints: of the run.
        policy: chooses what to keep.
        protect: steps that are being read or are needed otherwise.

    Returns:
        The deleted steps. The newest is never among them, nor are steps set aside, nor what
        somebody reads; a later retention deletes that.
    """
    listed = checkpoints.list_steps()
    steps = [one.step for one in listed if one.state is StepState.COMMITTED]
    kept = policy.keep(steps) | set(protect) | read_steps(checkpoints, listed) | set(steps[-1:])
    given_up = [step for step in steps if step not in kept]
    for step in given_up:
        checkpoints.delete(step)
    return given_up


def _require_positive(name: str, value: float) -> None:
    if value <= 0:
        raise ValueError(f"{name}={value} must be above 0")
