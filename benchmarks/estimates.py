"""Estimates from a sample of measurements."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median

RESAMPLES = 2000


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """In which the median of all such values is, with 95 % confidence (bootstrap percentiles)."""
    chance = random.Random(0)  # noqa: S311 nothing secret
    medians = sorted(median(chance.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return medians[RESAMPLES // 40], medians[-RESAMPLES // 40]
