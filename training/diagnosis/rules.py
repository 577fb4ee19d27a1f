"""The table of rules, which name the class and the role of a line of output.

`root` is a cause in itself; `symptom` shows the failure but not its cause; `cascade` is an echo of
another rank's or process's end. A better role wins over a worse role at any place, so an echo that
was printed first hides nothing.

The files are read in the order of `FILES` and the first rule that matches a line names it, so
special messages come before general ones.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from importlib import resources
from typing import Literal

from pydantic import Field

from perdure.storage.frozen_model import FrozenModel
from perdure.training.diagnosis.lines import frames_of
from perdure.training.recovery.faults import FaultClass, RecoverableBy

# Special before general: our own messages, platforms, their common parts, then the language.
FILES = (
    "perdure.toml",
    "prefect.toml",
    "mindspore.toml",
    "ascend.toml",
    "cuda.toml",
    "accelerators.toml",
    "leftovers.toml",
    "collectives.toml",
    "storage.toml",
    "data.toml",
    "host.toml",
    "cluster.toml",
    "python.toml",
)


class Role(IntEnum):
    """The distance of a line from the cause; the smallest wins."""

    ROOT = 1
    SYMPTOM = 2
    CASCADE = 3
    HINT = 4  # an error that nothing explains


class Classification(FrozenModel):
    """The columns of every table: class, role, and departures from the class's traits."""

    fault_class: FaultClass = Field(alias="class")
    role_name: Literal["root", "symptom", "cascade", "hint"] = Field(alias="role")
    recoverable_by: RecoverableBy | None = None
    user_fault: bool | None = None
    hardware_fault: bool | None = None

    @property
    def role(self) -> Role:
        """Distance from the cause."""
        return Role[self.role_name.upper()]


class RuleSpec(Classification):
    """A rule as its file has it.

    Attributes:
        pattern: searched in one line; groups named code, rank, device and node are taken over.
        prefilter: matches every line that `pattern` matches, and others too: the automaton searches
            for it where `pattern` begins with words of every healthy line.
        yields_to_code: whether a known code in the line is more precise than the rule.
        context: must match the text shortly before the line, too; `after` in the file.
        context_example: such text, for a rule that has a context.
        unless_raised_in: files for whose exceptions the rule does not hold.
        any_level: whether the line counts even as information or a warning.
        repeated: whether the program tries again after the line, so that the last such line counts.
        why: the meaning of the line, where the sentence of its class is too vague.
    """

    id: str
    pattern: str
    platform: str
    source: str
    example: str
    prefilter: str | None = None
    code: str | None = None
    any_level: bool = False
    repeated: bool = False
    yields_to_code: bool = False
    context: str | None = Field(None, alias="after")
    context_example: str = Field("", alias="after_example")
    unless_raised_in: str | None = None
    why: str = ""
    action: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule with its patterns compiled; see `RuleSpec` for the fields."""

    spec: RuleSpec
    pattern: re.Pattern[str]
    context: re.Pattern[str] | None

    @property
    def id(self) -> str:
        """Name of the rule."""
        return self.spec.id

    @property
    def role(self) -> Role:
        """Distance of the line from the cause."""
        return self.spec.role

    @property
    def fault_class(self) -> FaultClass:
        """Class of the fault that the line shows."""
        return self.spec.fault_class


@cache
def load_rules() -> tuple[Rule, ...]:
    """Load every rule, in order of precedence."""
    folder = resources.files("perdure.training.diagnosis").joinpath("rules")
    tables = [tomllib.loads(folder.joinpath(name).read_text("utf-8")) for name in FILES]
    return tuple(_compile_rule(row) for table in tables for row in table.get("rule", []))


def _compile_rule(row: dict[str, object]) -> Rule:
    spec = RuleSpec.model_validate(row)
    context = re.compile(spec.context) if spec.context else None
    return Rule(spec, re.compile(spec.pattern), context)


def match_line(
    line: str, context: str = "", candidates: Iterable[Rule] | None = None
) -> tuple[Rule, re.Match[str]] | None:
    """Find the first rule that recognises a line, with its match.

    Args:
        line: one line of output.
        context: text shortly before the line, for rules that search it.
        candidates: rules to try, in order; None: all.
    """
    for rule in load_rules() if candidates is None else candidates:
        match = rule.pattern.search(line)
        if match and (rule.context is None or rule.context.search(context)):
            return None if _is_raised_elsewhere(rule.spec, context) else (rule, match)
    return None


def _is_raised_elsewhere(spec: RuleSpec, context: str) -> bool:
    """Whether the line is of an exception from a file for which the rule does not hold."""
    frames = frames_of(context) if spec.unless_raised_in is not None else []
    return bool(frames and re.search(spec.unless_raised_in or "", frames[-1]))
