"""When an attempt is started anew although nothing is wrong. Times are seconds since the epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class PeriodicRestart:
    """Due at the first committed checkpoint after so long: that loses the fewest steps.

    Attributes:
        every_s: of the restart policy; None: never.
        started_s: when the attempt was started.
    """

    every_s: float | None
    started_s: float
    is_due: bool = False

    def look(self, checkpoints: Sequence[int], *, now_s: float) -> None:
        """Take in the checkpoints that were committed since the last look."""
        if self.every_s is not None and checkpoints and now_s - self.started_s >= self.every_s:
            self.is_due = True
