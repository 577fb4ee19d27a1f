"""Figures as text: least, median and most of every run, and ratios of medians."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.storage.measuring import Measured
from benchmarks.storage.sections import OURS, Section

GIGABYTE = 1_000_000_000
MEBIBYTE = 2**20
ALLOWANCE_BYTES = 256 * MEBIBYTE


@dataclass(frozen=True, slots=True)
class Column:
    """All runs of one contender.

    Attributes:
        missing: why there are none.
    """

    walls_s: Sequence[float] = ()
    cpus_s: Sequence[float] = ()
    extra_bytes: Sequence[int] = ()
    missing: str | None = None

    @classmethod
    def of(cls, rounds: Sequence[Measured]) -> Column:
        """Join what the processes of all rounds found."""
        missing = next((one.missing for one in rounds if one.missing), None)
        samples = [sample for one in rounds for sample in one.samples]
        return cls(
            [sample.wall_s for sample in samples],
            [sample.cpu_s for sample in samples],
            [one.extra_bytes for one in rounds if one.samples],
            missing,
        )


def table(section: Section, columns: Mapping[str, Column], state_bytes: int) -> str:
    """A section as text."""
    best = _best_s(section, columns)
    head = f"{'':28s} {'wall s':>20s} {'GB/s':>6s} {'CPU s':>17s} {'extra MiB':>19s} {'ratio':>6s}"
    lines = ["", section.title, head]
    for name, column in columns.items():
        if not column.walls_s:
            lines.append(f"{name:28s} {column.missing}")
            continue
        wall_s = median(column.walls_s)
        extra_mib = [size / MEBIBYTE for size in column.extra_bytes]
        lines.append(
            f"{name:28s} {_spread(column.walls_s, 3):>20s} {state_bytes / wall_s / GIGABYTE:6.2f} "
            f"{_spread(column.cpus_s, 2):>17s} {_spread(extra_mib, 0):>19s} {wall_s / best:6.2f}"
        )
    return "\n".join([*lines, *_verdicts(section, columns, state_bytes)])


def is_met(section: Section, columns: Mapping[str, Column], state_bytes: int) -> bool:
    """Whether ours keeps every target of a section."""
    return all(kept for _, kept in _targets(section, columns, state_bytes))


def _verdicts(section: Section, columns: Mapping[str, Column], state_bytes: int) -> list[str]:
    return [
        f"target {text}: {'met' if kept else 'MISSED'}"
        for text, kept in _targets(section, columns, state_bytes)
    ]


def _targets(
    section: Section, columns: Mapping[str, Column], state_bytes: int
) -> list[tuple[str, bool]]:
    ours = columns[OURS]
    if not ours.walls_s:
        return [(f"{OURS} did not run", False)]
    ratio = median(ours.walls_s) / _best_s(section, columns)
    found = [(f"{section.limit:.2f} x the fastest copy, {ratio:.2f}", ratio <= section.limit)]
    if section.extra_limit_states is not None:
        limit_bytes = section.extra_limit_states * state_bytes + ALLOWANCE_BYTES
        extra_bytes = max(ours.extra_bytes)
        text = f"{limit_bytes / MEBIBYTE:.0f} MiB of extra memory, {extra_bytes / MEBIBYTE:.0f}"
        found.append((text, extra_bytes <= limit_bytes))
    return found


def _best_s(section: Section, columns: Mapping[str, Column]) -> float:
    """Median of the fastest baseline."""
    medians = [median(columns[one].walls_s) for one in section.baselines if columns[one].walls_s]
    return min(medians, default=float("nan"))


def _spread(values: Sequence[float], digits: int) -> str:
    """Least, median and most."""
    return "/".join(f"{one:.{digits}f}" for one in (min(values), median(values), max(values)))
