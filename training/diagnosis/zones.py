"""Time zones of logs: containers of one attempt may print the wall clocks of different zones.

A zone is known where the lines of a log print it. Else it is inferred: logs of one attempt end
together, so ends that lie a multiple of half an hour apart, and no events in common, are of
different zones. Pure; times are seconds since the epoch, of a wall clock read as UTC.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from perdure.training.diagnosis.lines import time_of

_ZONE = re.compile(
    r"\d:[0-5]\d:[0-5]\d(?:[.,]\d+)?\s?(?:(?P<utc>Z\b|UTC\b)|(?P<sign>[+-])(?P<hours>0\d|1[0-4])"
    r":?(?P<minutes>[0-5]\d)\b)"
)
_STEP_S = 1800.0  # zones differ by multiples of it, but for a few of a quarter of an hour
_MAX_ZONES_S = 26 * 3600.0
_TOLERANCE_S = 120.0
_MAX_LINES = 2000


@dataclass(frozen=True, slots=True)
class LogClock:
    """The wall clock of a log.

    Attributes:
        first_s: time of its first line that has one.
        last_s: of its last one.
        zone_s: what its zone is ahead of UTC; None: it prints no zone, or several.
    """

    first_s: float
    last_s: float
    zone_s: float | None = None


def read_clock(text: str, *, year: int) -> LogClock | None:
    """Read the clock of a log from its end; None where no line has a time."""
    lines = text.splitlines()[-_MAX_LINES:]
    first = next((t for line in lines if (t := time_of(line, year=year)) is not None), None)
    last = next((t for line in lines[::-1] if (t := time_of(line, year=year)) is not None), None)
    if first is None or last is None:
        return None
    zones = {_zone_of(match) for line in lines if (match := _ZONE.search(line))}
    return LogClock(first, last, next(iter(zones)) if len(zones) == 1 else None)


def _zone_of(match: re.Match[str]) -> float:
    if match["utc"]:
        return 0.0
    ahead_s = int(match["hours"]) * 3600.0 + int(match["minutes"]) * 60.0
    return ahead_s if match["sign"] == "+" else -ahead_s


def zone_shifts(clocks: Sequence[LogClock | None]) -> list[float]:
    """Compute the seconds that turn the times of each log into those of the first."""
    reference = next((clock for clock in clocks if clock is not None), None)
    return [
        _shift(reference, clock) if reference is not None and clock is not None else 0.0
        for clock in clocks
    ]


def _shift(reference: LogClock, clock: LogClock) -> float:
    if reference.zone_s is not None and clock.zone_s is not None:
        return reference.zone_s - clock.zone_s
    have_common = clock.first_s <= reference.last_s and reference.first_s <= clock.last_s
    apart_s = reference.last_s - clock.last_s
    shift = round(apart_s / _STEP_S) * _STEP_S
    is_zone = 0.0 < abs(shift) <= _MAX_ZONES_S and abs(apart_s - shift) <= _TOLERANCE_S
    return shift if is_zone and not have_common else 0.0
