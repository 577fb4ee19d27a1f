"""The job's save and retention fields as policy objects."""

from __future__ import annotations

import time
from collections.abc import Callable
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

    def should_save(self, step: int, *, context: policy.SaveContext) -> bool:  # noqa: ARG002 protocol
        """Whether the loader has entered an epoch that is due."""
        epoch = self.loader.epoch
        if epoch // self.count <= self._saved_epoch // self.count:
            return False
        self._saved_epoch = epoch
        return True


class SaveClock:
    """When the last save was, and whether the next one is due. Seconds of one monotonic clock."""

    def __init__(
        self,
        policy: policy.SavePolicy,
        step: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.step = step
        self._policy = policy
        self._clock = clock
        self._saved_s = clock()

    def is_due(self, step: int) -> bool:
        """Whether the policy wants `step` saved."""
        context = policy.SaveContext(
            now_s=self._clock(), last_save_s=self._saved_s, last_save_step=self.step
        )
        return self._policy.should_save(step, context=context)

    def saved(self, step: int) -> None:
        """Note a save."""
        self.step, self._saved_s = step, self._clock()


def save_policy(spec: CheckpointSpec, loader: _Epochs) -> policy.SavePolicy:
    """The save policy of a job whose interval has been resolved."""
    policies: list[policy.SavePolicy] = []
    # First, because AnyOf asks no further once one says yes, and this one must see every step.
    if spec.every_epochs is not None:
        policies.append(EveryEpochs(spec.every_epochs, loader, loader.epoch))
    if spec.every_steps is not None:
        policies.append(policy.EveryNSteps(spec.every_steps))
    if spec.every_s is not None:
        policies.append(policy.EverySeconds(spec.every_s))
    return policy.AnyOf(tuple(policies))


def retention_policy(spec: CheckpointSpec) -> policy.RetentionPolicy:
    """The retention policy of a job."""
    keep: list[policy.RetentionPolicy] = [policy.KeepLast(spec.keep_last)]
    if spec.keep_every_steps is not None:
        keep.append(policy.KeepEvery(spec.keep_every_steps))
    return policy.KeepAnyOf(tuple(keep))
