"""Fault codes of Ascend chips: what each means, how bad its platforms take it, how it escalates.

The tables are in chips.toml (from MindCluster, see there); the functions apply them and know
nothing but their arguments. Two scales exist and should not be mixed up:

- the **level** is MindCluster's: what is to be done about a code, from nothing to taking the
  chip away. It is known for the codes of its tables.
- the **severity** is the driver's: hint, minor, major, critical, reported with an event. Which
  code has which severity is not public; only what the platforms conclude from it is.

The only relations found between the two: MindCluster takes an unknown code of severity hint or
minor as not handled and any other as separate (its guide on fault levels); ModelArts says that
minor and major codes heal themselves in place, that a hint needs nothing and that critical never
heals (its guide on fault tolerance). The ladder follows ModelArts where a severity is known, and
never heals in place what the level of a known code wants separated.

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
    """How bad the driver says an event is; the values are the driver's."""

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


@dataclass(frozen=True, slots=True)
class LevelFacts:
    """A level's name at its source, and what is done about it there."""

    source_name: str
    action: str


LEVELS: Mapping[ChipLevel, LevelFacts] = {
    ChipLevel.NOT_HANDLED: LevelFacts("NotHandleFault", "nothing"),
    ChipLevel.SUB_HEALTHY: LevelFacts("SubHealthFault", "as the job's strategy has it"),
    ChipLevel.RESTART_REQUEST: LevelFacts("RestartRequest", "run the training again"),
    ChipLevel.RESTART_JOB: LevelFacts("RestartBusiness", "run the job again"),
    ChipLevel.RESET_WHEN_IDLE: LevelFacts("FreeRestartNPU", "reset the chip when it is idle"),
    ChipLevel.RESET_NOW: LevelFacts("RestartNPU", "stop the job, reset the chip, run again"),
    ChipLevel.NO_NEW_JOBS: LevelFacts("PreSeparateNPU", "leave the job, start no other there"),
    ChipLevel.SEPARATE: LevelFacts("SeparateNPU", "take the chip away"),
    ChipLevel.SEPARATE_BY_HAND: LevelFacts(
        "ManuallySeparateNPU", "take the chip away until a person releases it"
    ),
}

SEPARATED = frozenset({ChipLevel.SEPARATE, ChipLevel.SEPARATE_BY_HAND})
_ORDER = {level: index for index, level in enumerate(ChipLevel)}


class Reporter(StrEnum):
    """Who reports a code."""

    CHIP = "chip"
    NODE = "node"
    SWITCH = "switch"
    PUBLIC = "public"
    DPU = "dpu"


class Kind(StrEnum):
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
        reporter: who reports it.
        kind: what is behind it.
        cause: a few words, empty when nobody describes it.
    """

    code: str
    level: ChipLevel | None
    reporter: Reporter
    kind: Kind
    cause: str


@dataclass(frozen=True, slots=True)
class FrequencyRule:
    """A code that comes `times` times within `window_s` asks for `level`.

    Attributes:
        codes: the codes it is about; empty: every code but `excepted`.
        excepted: codes that it is not about.
        release_s: it is over this long after the last time; None: a person releases it.
    """

    times: int
    window_s: float
    level: ChipLevel
    codes: frozenset[str] = frozenset()
    excepted: frozenset[str] = frozenset()
    release_s: float | None = None

    def is_about(self, code: str) -> bool:
        """Whether the rule counts this code."""
        return code not in self.excepted and (not self.codes or code in self.codes)


@dataclass(frozen=True, slots=True)
class DurationRule:
    """A code that lasts longer than `after_s` asks for `level`.

    Attributes:
        recovered_after_s: it is over once the fault has been gone for so long.
    """

    codes: frozenset[str]
    after_s: float
    recovered_after_s: float
    level: ChipLevel


@dataclass(frozen=True, slots=True)
class RelationRule:
    """A `trigger` within `within_s` of the code `other`, before or after, asks for `level`."""

    trigger: str
    other: str
    within_s: float
    level: ChipLevel


@dataclass(frozen=True, slots=True)
class _Tables:
    facts: Mapping[str, ChipFact]
    frequency: Mapping[str, Sequence[FrequencyRule]]  # by source
    duration: Sequence[DurationRule]
    relation: Sequence[RelationRule]


def chip_fact(code: str) -> ChipFact | None:
    """What the tables say about a code; None for one they do not have."""
    return _tables().facts.get(code)


def chip_facts() -> Sequence[ChipFact]:
    """Every code of the tables."""
    return tuple(_tables().facts.values())


def level_of(code: str, *, severity: Severity) -> ChipLevel:
    """What a code asks for; a code without a level is judged by the driver's severity."""
    fact = chip_fact(code)
    if fact is not None and fact.level is not None:
        return fact.level
    return ChipLevel.NOT_HANDLED if severity <= Severity.MINOR else ChipLevel.SEPARATE


def heals_in_place(code: str | None, *, severity: Severity | None = None) -> bool:
    """Whether new processes on the same chip can mend it, as far as code and severity tell."""
    fact = chip_fact(code) if code is not None else None
    separated = fact is not None and fact.level in SEPARATED
    return severity is not Severity.CRITICAL and not separated


def needs_recovery(code: str | None, *, severity: Severity | None = None) -> bool:
    """Whether an event asks for a recovery by itself, while everything goes on.

    A hint does not, nor does a code that is not handled unless it is critical. What such an
    event ended all the same is answered like any other end.
    """
    if severity is Severity.HINT:
        return False
    fact = chip_fact(code) if code is not None else None
    ignored = fact is not None and fact.level is ChipLevel.NOT_HANDLED
    return not ignored or severity is Severity.CRITICAL


def mindcluster_frequency() -> Sequence[FrequencyRule]:
    """MindCluster's rules per group of codes; a chip stays separated until it is released."""
    return _tables().frequency["mindcluster"]


def modelarts_frequency() -> FrequencyRule:
    """ModelArts' rule for every code, counted in a row per code, node and chip."""
    (rule,) = _tables().frequency["modelarts"]
    return rule


def escalated(
    code: str,
    occurrences_s: Iterable[float],
    *,
    now_s: float,
    rules: Sequence[FrequencyRule] | None = None,
) -> ChipLevel | None:
    """The level that the occurrences of a code on one chip have reached, None for none.

    Args:
        code: the code.
        occurrences_s: when it came, since the last release by hand, in any order.
        now_s: occurrences after it are not looked at.
        rules: those to apply; default MindCluster's.
    """
    past = sorted(at_s for at_s in occurrences_s if at_s <= now_s)
    reached = [
        rule.level
        for rule in (mindcluster_frequency() if rules is None else rules)
        if rule.is_about(code) and _is_reached(rule, past) and not _is_over(rule, past, now_s)
    ]
    return max(reached, key=_ORDER.__getitem__, default=None)


def prolonged(
    code: str, *, began_s: float, ended_s: float | None, now_s: float
) -> ChipLevel | None:
    """The level of a fault that lasts, or has lasted, too long; None when it does not matter.

    Args:
        code: the code.
        began_s: when it came.
        ended_s: when it went, None while it is there.
        now_s: the moment asked about.
    """
    for rule in _tables().duration:
        if code not in rule.codes:
            continue
        lasted = (now_s if ended_s is None else ended_s) - began_s > rule.after_s
        if lasted and (ended_s is None or now_s - ended_s < rule.recovered_after_s):
            return rule.level
    return None


def related(events: Iterable[tuple[str, float]]) -> ChipLevel | None:
    """The worst level that codes close to each other in time ask for, None for none.

    Args:
        events: code and time of what one chip and its network reported.
    """
    known = tuple(events)
    reached = [
        rule.level
        for rule in _tables().relation
        for trigger, trigger_s in known
        for other, other_s in known
        if (trigger, other) == (rule.trigger, rule.other)
        and abs(trigger_s - other_s) <= rule.within_s
    ]
    return max(reached, key=_ORDER.__getitem__, default=None)


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
def _tables() -> _Tables:
    text = files("training.recovery").joinpath("chips.toml").read_text("utf-8")
    return _parse(tomllib.loads(text))


def _parse(tables: Mapping[str, Any]) -> _Tables:
    frequency: dict[str, list[FrequencyRule]] = {}
    for row in tables["frequency"]:
        frequency.setdefault(row["source"], []).append(_frequency_of(row))
    return _Tables(
        facts=_facts_of(tables["group"], tables["causes"]),
        frequency=frequency,
        duration=[
            DurationRule(
                frozenset(row["codes"]),
                float(row["after_s"]),
                float(row["recovered_after_s"]),
                ChipLevel(row["level"]),
            )
            for row in tables["duration"]
        ],
        relation=[
            RelationRule(
                row["trigger"], row["with"], float(row["within_s"]), ChipLevel(row["level"])
            )
            for row in tables["relation"]
        ],
    )


def _frequency_of(row: Mapping[str, Any]) -> FrequencyRule:
    release_s = row.get("release_s")
    return FrequencyRule(
        times=row["times"],
        window_s=float(row["window_s"]),
        level=ChipLevel(row["level"]),
        codes=frozenset(row.get("codes", ())),
        excepted=frozenset(row.get("except", ())),
        release_s=float(release_s) if release_s is not None else None,
    )


def _facts_of(
    groups: Iterable[Mapping[str, Any]], causes: Mapping[str, tuple[str, str]]
) -> dict[str, ChipFact]:
    facts: dict[str, ChipFact] = {}
    for group in groups:
        level = ChipLevel(group["level"]) if group["level"] else None
        for code in group["codes"]:
            kind, cause = causes.get(code, (Kind.UNKNOWN, ""))
            facts[code] = ChipFact(code, level, Reporter(group["reporter"]), Kind(kind), cause)
    return facts
