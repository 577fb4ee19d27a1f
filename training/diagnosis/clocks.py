"""The clocks of several nodes, merged by what all ranks do at the same time.

Ranks of a synchronous training finish a step together, so lines about the same step should have
the same time; where they do not, a clock is off. Times and offsets are seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import median

from training.diagnosis.lines import time_of

MIN_COMMON_STEPS = 2
MAX_ANCHORS = 500
MAX_LINES = 2000
# Ranks of one node print the same step this far apart without any clock being wrong.
TOLERATED_S = 1.0
_STEP = re.compile(r"\b(?:iteration|[sS]tep|global_step)['\"]?[\s=:\[]{1,4}(\d{1,15})\b")


def anchors(text: str, *, year: int) -> dict[int, float]:
    """Step to the first time it is mentioned, for the newest steps of a text."""
    found: dict[int, float] = {}
    for line in text.splitlines()[-MAX_LINES:]:
        step = _STEP.search(line)
        stamp = time_of(line, year=year) if step is not None else None
        if step is not None and stamp is not None:
            found.setdefault(int(step[1]), stamp)
    newest = sorted(found)[-MAX_ANCHORS:]
    return {step: found[step] for step in newest}


def offsets(sources: Sequence[Mapping[int, float]]) -> list[float]:
    """For each source, what must be added to its times to get those of the reference.

    The reference is the first source with the most steps. A source that shares too few steps
    with it, or differs from it no more than ranks do by themselves, keeps its own time.
    """
    if not sources:
        return []
    reference = max(sources, key=len)
    return [_offset(reference, steps) for steps in sources]


def _offset(reference: Mapping[int, float], steps: Mapping[int, float]) -> float:
    common = reference.keys() & steps.keys()
    if len(common) < MIN_COMMON_STEPS:
        return 0.0
    difference = median(reference[step] - steps[step] for step in common)
    return difference if abs(difference) > TOLERATED_S else 0.0
