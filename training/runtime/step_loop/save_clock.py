"""The clock of a job's saves.

Times are seconds of a monotonic clock, steps completed optimizer steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from perdure.training.config.recovery import CheckpointSpec
from perdure.training.runtime.step_loop.step_records import DataPosition


class SaveClock:
    """When the last save was, and whether the next is due.

    With `mtbf_s` a save is due after sqrt(2 x cost of a save x mean time between failures), as
    soon as the first save has a measured cost (J. W. Young, CACM 17(9), 1974; J. T. Daly, FGCS
    22(3), 2006, first order).

    Args:
        spec: the job's section, with an interval.
        loader: counts the epochs.
        step: the restored step.
        clock: monotonic; `now_s` is this clock.
    """

    def __init__(
        self,
        spec: CheckpointSpec,
        loader: DataPosition,
        step: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._loader = loader
        self.now_s = clock
        self._step, self._saved_s, self._saved_epoch = step, clock(), loader.epoch
        self._cost_s: float | None = None

    def is_due(self, step: int) -> bool:
        """Whether `step` is to be saved; asked again when a step is executed again."""
        spec, since_save_s = self._spec, self.now_s() - self._saved_s
        if step != self._step and (
            (spec.every_steps is not None and step % spec.every_steps == 0)
            or (spec.every_s is not None and since_save_s >= spec.every_s)
        ):
            return True
        if spec.every_epochs is not None:
            every = spec.every_epochs
            if self._loader.epoch // every > self._saved_epoch // every:
                return True
        if spec.mtbf_s is None:
            return False
        cost_s = self._cost_s
        return cost_s is None or since_save_s >= math.sqrt(2.0 * cost_s * spec.mtbf_s)

    def saved(self, step: int, *, started_s: float) -> None:
        """Note a save that began at `started_s` of the same clock."""
        self._step, self._saved_s, self._saved_epoch = step, self.now_s(), self._loader.epoch
        self._cost_s = self._saved_s - started_s
