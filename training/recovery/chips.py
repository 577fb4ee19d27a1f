"""Fault codes of Ascend chips: what each means, how bad its platforms take it, how it escalates.

The tables are in chips.toml (from MindCluster, see there); the functions apply them and know
nothing but their arguments. Two scales exist and should not be mixed up:

- the **level** is MindCluster's: what is to be done about a code, from nothing to taking the
  chip away. It is known for the codes of its tables.
- the **severity** is the driver's: hint, minor, major, critical, reported with an event. Which
  code has which severity is not public; only what the platforms conclude from it is.

The only relations found between the two: MindCluster takes an unknown code of severity hint or
minor as not handled and any other as separate (its guide on fault levels); for ModelArts
minor and major codes heal themselves in place, a hint needs nothing and critical never heals
(its guide on fault tolerance). `chip_answer` joins them: hint and critical decide alone, a level
that takes the chip away outdoes minor and major, and where the driver reported no severity the
level decides.

Times are seconds, points in time seconds since the epoch.
"""

from __future__ import annotations

import tomllib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cache
from importlib.resources import files
from typing import Any


class Severity(IntEnum):
    """How bad an event is; names and values are the driver's."""

    HINT = 0
    MINOR = 1
    MAJOR = 2
    CRITICAL = 3


class ChipLevel(StrEnum):
    """What a code asks for, mildest first."""

    NOT_HANDLED = "not_handled"
    SUB_HEALTHY = "sub_healthy"
    RESTART_REQUEST = "restart_request"
    RESTART_JOB = "restart_job"
    RESET_WHEN_IDLE = "reset_when_idle"
    RESET_NOW = "reset_now"
    NO_NEW_JOBS = "no_new_jobs"
    SEPARATE = "separate"
    SEPARATE_BY_HAND = "separate_by_hand"


SEPARATED = frozenset({ChipLevel.SEPARATE, ChipLevel.SEPARATE_BY_HAND})


class ChipAnswer(StrEnum):
    """What an event of a chip asks for."""

    NOTHING = "nothing"
    HEAL = "heal"  # in place; the node is isolated where that does not help
    SEPARATE = "separate"  # nothing new on the chip


# MindCluster takes no new job to a chip of level no_new_jobs; new processes are one.
BY_LEVEL: Mapping[ChipLevel, ChipAnswer] = {
    ChipLevel.NOT_HANDLED: ChipAnswer.NOTHING,
    ChipLevel.SUB_HEALTHY: ChipAnswer.HEAL,
    ChipLevel.RESTART_REQUEST: ChipAnswer.HEAL,
    ChipLevel.RESTART_JOB: ChipAnswer.HEAL,
    ChipLevel.RESET_WHEN_IDLE: ChipAnswer.HEAL,
    ChipLevel.RESET_NOW: ChipAnswer.HEAL,
    ChipLevel.NO_NEW_JOBS: ChipAnswer.SEPARATE,
    ChipLevel.SEPARATE: ChipAnswer.SEPARATE,
    ChipLevel.SEPARATE_BY_HAND: ChipAnswer.SEPARATE,
}
# Whether a report of the level ends the processes on the chip at once, before they fail over it.
# MindCluster leaves a job that runs on a chip of level no_new_jobs alone.
ACTS_AT_ONCE: Mapping[ChipLevel, bool] = {
    ChipLevel.NOT_HANDLED: False,
    ChipLevel.SUB_HEALTHY: False,
    ChipLevel.RESTART_REQUEST: True,
    ChipLevel.RESTART_JOB: True,
    ChipLevel.RESET_WHEN_IDLE: True,
    ChipLevel.RESET_NOW: True,
    ChipLevel.NO_NEW_JOBS: False,
    ChipLevel.SEPARATE: True,
    ChipLevel.SEPARATE_BY_HAND: True,
}
BY_SEVERITY: Mapping[Severity, ChipAnswer] = {
    Severity.HINT: ChipAnswer.NOTHING,
    Severity.MINOR: ChipAnswer.HEAL,
    Severity.MAJOR: ChipAnswer.HEAL,
    Severity.CRITICAL: ChipAnswer.SEPARATE,
}


class CodeKind(StrEnum):
    """What is behind a code, as its source has it."""

    HARDWARE = "hardware"
    SOFTWARE = "software"
    USER = "user"
    SOFTWARE_OR_HARDWARE = "software/hardware"
    SOFTWARE_OR_USER = "software/user"
    USER_OR_HARDWARE = "user/hardware"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ChipFact:
    """What is known about one code.

    Attributes:
        code: as it is reported, such as "80E01801".
        level: what it asks for; None: described, but in no level.
        kind: what is behind it.
        cause: a few words, empty when the source has none.
    """

    code: str
    level: ChipLevel | None
    kind: CodeKind
    cause: str


@dataclass(frozen=True, slots=True)
class FrequencyRule:
    """A code that comes `times` times within `window_s` asks for `level`.

    Attributes:
        release_s: it is over this long after the last time; None: only a release by hand ends it.
    """

    codes: frozenset[str]
    times: int
    window_s: float
    level: ChipLevel
    release_s: float | None = None


def chip_fact(code: str) -> ChipFact | None:
    """What the tables have about a code; None for one they do not have."""
    return _facts().get(code)


def chip_answer(code: str | None, severity: Severity | None) -> ChipAnswer:
    """What an event asks for, by its severity and by the level of its code.

    An event of which neither is known heals in place first, where the chip is checked.
    """
    fact = chip_fact(code) if code is not None else None
    by_level = BY_LEVEL[fact.level] if fact is not None and fact.level is not None else None
    by_severity = BY_SEVERITY[severity] if severity is not None else None
    if by_severity in {None, ChipAnswer.HEAL} and by_level is ChipAnswer.SEPARATE:
        return ChipAnswer.SEPARATE
    return by_severity or by_level or ChipAnswer.HEAL


def escalated(code: str, occurrences_s: Iterable[float], *, now_s: float) -> ChipLevel | None:
    """The level that the occurrences of a code on one chip have reached, None for none.

    Args:
        code: the code.
        occurrences_s: when it came, since the last release by hand, in any order.
        now_s: occurrences after it are not looked at.
    """
    past = sorted(at_s for at_s in occurrences_s if at_s <= now_s)
    reached = [
        rule.level
        for rule in _frequency()
        if code in rule.codes and _is_reached(rule, past) and not _is_over(rule, past, now_s)
    ]
    return max(reached, key=list(ChipLevel).index, default=None)


def times_in_a_row(
    events: Sequence[tuple[Hashable, float]], key: Hashable, *, now_s: float, window_s: float
) -> int:
    """How many of the newest events are about `key`, one after another within the window.

    Args:
        events: what each was about and when it came, oldest first.
        key: what is counted.
        now_s: the moment asked about.
        window_s: older events do not count.
    """
    count = 0
    for about, at_s in reversed(events):
        if about != key or now_s - at_s > window_s:
            break
        count += 1
    return count


def _is_reached(rule: FrequencyRule, past: Sequence[float]) -> bool:
    """Whether any `times` occurrences one after another lie within the window."""
    last = rule.times - 1
    return any(
        past[index + last] - past[index] <= rule.window_s for index in range(len(past) - last)
    )


def _is_over(rule: FrequencyRule, past: Sequence[float], now_s: float) -> bool:
    return rule.release_s is not None and now_s - past[-1] >= rule.release_s


@cache
def _tables() -> Mapping[str, Any]:
    return tomllib.loads(
        files("perdure.training.recovery").joinpath("chips.toml").read_text("utf-8")
    )


@cache
def _frequency() -> Sequence[FrequencyRule]:
    return [
        FrequencyRule(**row | {"codes": frozenset(row["codes"]), "level": ChipLevel(row["level"])})
        for row in _tables()["frequency"]
    ]


@cache
def _facts() -> Mapping[str, ChipFact]:
    causes, facts = _tables()["causes"], {}
    for group in _tables()["group"]:
        level = ChipLevel(group["level"]) if group["level"] else None
        for code in group["codes"]:
            kind, cause = causes.get(code, (CodeKind.UNKNOWN, ""))
            facts[code] = ChipFact(code, level, CodeKind(kind), cause)
    return facts
