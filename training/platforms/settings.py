"""Settings of our policy that the entries of a platform make, and their combination.

An entry is a name and a text (annotation, label or environment variable). A setting of it is a
field of `Policy`, or a fact that matters only for the settings that it allows. Two settings of
one field must agree; a table holds the pairs that exclude each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from perdure.training.errors import InputError
from perdure.training.recovery.rungs import Policy

Value = bool | int | float | str

POLICY_FIELDS = frozenset(Policy.model_fields)
# Fields of the job's restart section that the ladder does not read.
JOB_FIELDS = frozenset({"unmount_after_s", "abnormal_grad_norm", "max_skipped_in_a_row"})
MAX_GRACE_S = 86_400

# A count that a platform only switches on has no limit of its own there: the largest one here,
# so that max_restarts is the limit that counts.
_SWITCHED_COUNTS: Mapping[str, tuple[int, int]] = MappingProxyType({"pod_retries": (0, 128)})


class Fact(StrEnum):
    """A property that entries and job set besides the policy, for the table of pairs."""

    CHIP = "chip"
    MC2 = "mc2"
    WATCHDOG = "watchdog"
    RESTART_POLICY = "restart_policy"
    SERVICE_RETRY = "service_retry"
    PROCESS_RECOVERY = "process_recovery"
    FAULT_SCHEDULING = "fault_scheduling"
    SUB_HEALTHY = "sub_healthy"


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of a field or of a fact, with its source.

    Attributes:
        name: field of `Policy` or of the restart section, or a `Fact`.
        source: name and value as the user wrote them.
        is_implied: follows only from an omission in a list; gives way to a written value.
    """

    name: str
    value: Value
    source: str
    is_implied: bool = False


Finding = Setting | str  # a setting, or a warning
Reader = Callable[[str, str], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Pair:
    """`name` set to `value` allows only these values of `other`.

    Attributes:
        name: field of `Policy` or `Fact`.
        value: the value of it that restricts `other`.
        other: field of `Policy` or `Fact`, too.
        allowed: values of `other` that go with it.
        needs: the same in words that a user knows.
    """

    name: str
    value: Value
    other: str
    allowed: tuple[Value, ...]
    needs: str


# Sources: HCCL and ModelArts documentation of operator retry (Atlas A3 only, neither MC2 nor the
# watchdog); MindFormers "Training High Availability" (data skipping); MindCluster "Job YAML
# Configuration" (restartPolicy, fault-scheduling, fault-retry-times, subHealthyStrategy).
PAIRS: tuple[Pair, ...] = (
    Pair("operator_retry", True, Fact.CHIP, ("a3",), "chip=a3"),
    Pair("operator_retry", True, Fact.MC2, (False,), "mc2=false"),
    Pair("operator_retry", True, Fact.WATCHDOG, (False,), "watchdog=false"),
    Pair("numeric_retry", True, "data_skipping", (False,), "data_skipping=false"),
    Pair(Fact.SERVICE_RETRY, True, Fact.RESTART_POLICY, ("Never",), "restartPolicy=Never"),
    Pair(Fact.PROCESS_RECOVERY, True, Fact.SERVICE_RETRY, (True,), "fault-retry-times of 1 to 100"),
    Pair(
        Fact.PROCESS_RECOVERY, True, Fact.FAULT_SCHEDULING, ("grace", "force"),
        "fault-scheduling=grace",
    ),
    Pair(
        Fact.SUB_HEALTHY, "graceExit", "end_of_life_checkpoint", (True,),
        "end_of_life_checkpoint=true (TTP, dump)",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ImportedSettings:
    """The settings of all entries together.

    Attributes:
        fields: values of the fields of `Policy` and of the restart section that entries name.
        sources: the entry of each field, as the user wrote it.
        warnings: a line for each setting that the policy cannot express.
    """

    fields: Mapping[str, Value] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def policy(self, base: Policy | None = None) -> Policy:
        """Replace the named fields of `base`, by default those of our default policy."""
        named = {n: v for n, v in self.fields.items() if n in POLICY_FIELDS}
        return Policy.model_validate({**(base or Policy()).model_dump(), **named})


def combine_settings(settings: Sequence[Setting], warnings: Sequence[str]) -> ImportedSettings:
    """Combine settings into one for each field.

    Raises:
        InputError: two settings contradict or exclude each other; names both.
    """
    by_name: dict[str, Setting] = {}
    for setting in settings:
        past = by_name.get(setting.name)
        by_name[setting.name] = setting if past is None else _agree(past, setting)
    for pair in PAIRS:
        _check(pair, by_name)
    named = {n: s for n, s in by_name.items() if n in POLICY_FIELDS | JOB_FIELDS}
    return ImportedSettings(
        {name: _resolved(setting) for name, setting in named.items()},
        {name: setting.source for name, setting in named.items()},
        tuple(dict.fromkeys(warnings)),
    )


def _agree(past: Setting, new: Setting) -> Setting:
    """Return the more exact of two settings of a field."""
    if past.is_implied or new.is_implied:
        return new if past.is_implied else past
    if type(past.value) is type(new.value) and past.value == new.value:
        return past
    exact = [s for s in (past, new) if not isinstance(s.value, bool)]
    if len(exact) == 1 and bool(past.value) == bool(new.value):
        return exact[0]
    raise InputError(
        "",
        f"{past.source} and {new.source} contradict each other: {past.name} is "
        f"{format_value(past.value)} or {format_value(new.value)}, keep one of them",
    )


def _check(pair: Pair, by_name: Mapping[str, Setting]) -> None:
    setting, other = by_name.get(pair.name), by_name.get(pair.other)
    if (
        setting is None
        or other is None
        or setting.value != pair.value
        or other.value in pair.allowed
    ):
        return
    raise InputError(
        "",
        f"{setting.source} and {other.source} exclude each other: "
        f"{setting.source} needs {pair.needs}",
    )


def _resolved(setting: Setting) -> Value:
    value = setting.value
    if isinstance(value, bool) and setting.name in _SWITCHED_COUNTS:
        return _SWITCHED_COUNTS[setting.name][value]
    return value


def format_value(value: Value | None) -> str:
    """Format a value as a job file has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def quote_entry(name: str, text: str) -> str:
    """Quote an entry for a message."""
    return f"{name}={text!r}"


def refusal_of(name: str, text: str, allowed: str) -> InputError:
    """Build the error for a value that is not allowed."""
    return InputError(name, f"{text!r} must be {allowed}")


def read_number(name: str, text: str, *, low: int, high: int) -> int:
    """Read a decimal number within limits."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or not low <= int(text) <= high:
        raise refusal_of(name, text, f"a number from {low} to {high}")
    return int(text)
