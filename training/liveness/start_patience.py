"""How long new processes may take to their first step, by the starts before them. Pure.

A start that skips data, compiles, builds an index or downloads needs the same time again. It gets
twice the time after each hang before a first step, and the third in a row is not ended while it
computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perdure.training.recovery.faults import LATE_STARTS
from perdure.training.recovery.rungs import Recovery

MAX_DOUBLINGS = 2
ENDED_IN_A_ROW = 2


@dataclass(frozen=True, slots=True)
class StartPatience:
    """Limits of the next start.

    Attributes:
        factor: times the limits before the first step.
        ends_slow_start: whether a start that exceeds them is ended although it computes.
    """

    factor: float = 1.0
    ends_slow_start: bool = True


def patience_of(history: Sequence[Recovery]) -> StartPatience:
    """Decide about the limits of the next start.

    Args:
        history: every past recovery of the run, oldest first.
    """
    # The run has not become faster by the progress since.
    is_late = [past.fault.code in LATE_STARTS and not past.failed for past in history]
    in_a_row = 0
    for past, counts in zip(history, is_late, strict=True):
        in_a_row = 0 if past.progressed else in_a_row + counts
    factor = 2.0 ** min(sum(is_late), MAX_DOUBLINGS)
    return StartPatience(factor, ends_slow_start=in_a_row < ENDED_IN_A_ROW)
