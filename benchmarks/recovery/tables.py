"""The tables, as text. Times are seconds, sizes bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.recovery.contenders import Target
from benchmarks.recovery.measuring import Recovery

_HEAD = (
    f"{'':32s} {'step s':>7s} {'noticed s':>9s} {'resume s':>19s} {'ratio':>6s} "
    f"{'step times':>19s} {'full s':>7s} {'lost':>5s}  loss curve"
)


def recovery_table(
    title: str, found: Mapping[str, list[Recovery]], missing: Mapping[str, str], *, reference: str
) -> str:
    """A row per contender: least, median and most of its runs.

    Args:
        title: of the table.
        found: runs by contender.
        missing: why runs of a contender are not there.
        reference: the row whose median the others' are divided by.
    """
    lines = ["", title, _HEAD]
    own = found.get(reference)
    unit_s = median(one.resume_s for one in own) if own else math.nan
    for name, runs in found.items():
        if runs:
            lines.append(_row(name, runs, unit_s))
        if name in missing:
            lines.append(f"{name:32s} {missing[name]}")
    return "\n".join(lines)


def _row(name: str, runs: Sequence[Recovery], unit_s: float) -> str:
    full = [one.full_s for one in runs if one.full_s is not None]
    full_text = f"{median(full):7.2f}" if len(full) == len(runs) else "  never"
    lost = max(one.steps_lost for one in runs)
    noticed = [one.noticed_s for one in runs if one.noticed_s is not None]
    noticed_text = f"{median(noticed):9.2f}" if noticed else f"{'-':>9s}"
    ratio = median(one.resume_s for one in runs) / unit_s
    return (
        f"{name:32s} {median(one.step_s for one in runs):7.3f} {noticed_text} "
        f"{spread([one.resume_s for one in runs], 2):>19s} {ratio:6.2f} "
        f"{spread([one.resume_steps for one in runs], 1):>19s} {full_text} "
        f"{lost:5d}  {_curve(max(one.difference for one in runs))}"
    )


def _curve(difference: float) -> str:
    if math.isinf(difference):
        return "other steps"
    return f"differs by {difference:.0e}" if difference else "equal"


def verdicts(targets: Sequence[Target]) -> str:
    """A line per target."""
    return "\n".join(f"target {one.text}: {'met' if one.is_met else 'MISSED'}" for one in targets)


def spread(values: Sequence[float], digits: int) -> str:
    """Least, median and most."""
    return "/".join(f"{one:.{digits}f}" for one in (min(values), median(values), max(values)))
