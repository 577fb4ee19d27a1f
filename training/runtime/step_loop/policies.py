"""The job's save and retention fields as policy objects."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from storage import policy
from training.specs.recovery import CheckpointSpec


class _Epochs(Protocol):
    @property
    def epoch(self) -> int: ...


@dataclass(slots=True)
class EveryEpochs:
    """Save with the step that takes the last sample of every Nth epoch."""

    count: int
    loader: _Epochs
    _saved_epoch: int

    def saved(self) -> None:
        """A save was made: of this epoch, too, if it was due."""
        self._saved_epoch = self.loader.epoch

    def should_save(self, step: int, *, context: policy.SaveContext) -> bool:  # noqa: ARG002 protocol
        """Whether the loader has entered an epoch that is due."""
        return self.loader.epoch // self.count > self._saved_epoch // self.count


@dataclass(slots=True)
class YoungDaly:
    """Save after sqrt(2 x cost of a save x mean time between failures).

    Source: J. W. Young, CACM 17(9), 1974; J. T. Daly, FGCS 22(3), 2006 (first order). The cost
    is measured; until there is a first save, one is due at once.
    """

    mtbf_s: float
    cost_s: float | None = None

    def should_save(self, step: int, *, context: policy.SaveContext) -> bool:  # noqa: ARG002 protocol
        """Whether the interval that the last save's cost gives has passed."""
        if self.cost_s is None:
            return True
        interval_s = math.sqrt(2.0 * self.cost_s * self.mtbf_s)
        return context.now_s - context.last_save_s >= interval_s

    def measured(self, cost_s: float) -> None:
        """Take in what a save has cost."""
        self.cost_s = cost_s


class SaveClock:
    """When the last save was, and whether the next one is due. Seconds of one monotonic clock."""

    def __init__(
        self,
        spec: CheckpointSpec,
        loader: _Epochs,
        step: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.step = step
        self._young_daly = YoungDaly(spec.mtbf_s) if spec.mtbf_s is not None else None
        self._epochs = (
            EveryEpochs(spec.every_epochs, loader, loader.epoch)
            if spec.every_epochs is not None
            else None
        )
        chosen = [self._epochs, save_policy(spec), self._young_daly]
        self._policy = policy.AnyOf(tuple(one for one in chosen if one is not None))
        self._clock = clock
        self._saved_s = clock()

    def is_due(self, step: int) -> bool:
        """Whether the policy wants `step` saved; asked again when a step is done again."""
        context = policy.SaveContext(
            now_s=self._clock(), last_save_s=self._saved_s, last_save_step=self.step
        )
        return self._policy.should_save(step, context=context)

    def saved(self, step: int, *, started_s: float) -> None:
        """Note a save that began at `started_s` of the same clock."""
        self.step, self._saved_s = step, self._clock()
        if self._epochs is not None:
            self._epochs.saved()
        if self._young_daly is not None:
            self._young_daly.measured(self._saved_s - started_s)

    def now_s(self) -> float:
        """The clock."""
        return self._clock()


def save_policy(spec: CheckpointSpec) -> policy.SavePolicy:
    """The part of a job's save policy that steps and time decide."""
    policies: list[policy.SavePolicy] = []
    if spec.every_steps is not None:
        policies.append(policy.EveryNSteps(spec.every_steps))
    if spec.every_s is not None:
        policies.append(policy.EverySeconds(spec.every_s))
    return policy.AnyOf(tuple(policies))


def retention_policy(
    spec: CheckpointSpec, losses: Mapping[int, float] | None = None
) -> policy.RetentionPolicy:
    """The retention policy of a job.

    Args:
        spec: the job's.
        losses: training loss by step. With keep_best, a step that is not among them is kept, so
            a caller who knows no losses gives nothing up.
    """
    keep: list[policy.RetentionPolicy] = [policy.KeepLast(spec.keep_last)]
    if spec.keep_every_steps is not None:
        keep.append(policy.KeepEvery(spec.keep_every_steps))
    if spec.keep_best is not None:
        keep.append(policy.KeepBest(spec.keep_best, losses or {}))
    return policy.KeepAnyOf(tuple(keep))
