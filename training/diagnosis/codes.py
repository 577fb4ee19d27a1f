"""Numeric codes in error messages, and the tables of their meanings (`codes.toml`).

A code explains a line whose words add nothing. It is a symptom unless its table marks it as a
cause.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from perdure.training.diagnosis.rules import Classification, Role
from perdure.training.recovery.chips import ChipLevel, CodeKind, chip_fact
from perdure.training.recovery.faults import FaultClass, RecoverableBy

_NUMBER = r"\b[eE]rror ?[cC]ode(?: is)? ?[:=]? ?\(?(?P<{0}>{1})\b"
_AFTER = r"[ =:]{1,3}(?P<acl2>[1235]\d{5})\b"
# npu-smi prints all that a chip reports: "Error Code : A4025021 8C03A000".
_EIGHT = r"(?:0x)?[0-9a-fA-F]{8}\b"
_CHIP = rf"\s*[:=]\s*\[?\"?(?P<chip>{_EIGHT}(?:,? {_EIGHT})*)"
_LOOK_UPS: Mapping[str, tuple[str, ...]] = {
    # torch_npu puts HcclResult behind the name of the call, two digits at most.
    "hccl": (
        r"(?i:hccl).{0,400}?[eE]rror ?[cC]ode(?: is|:|=) ?(?P<hccl>\d{1,2})\b",
        # HCCL's own logs: errNo[0x0000000005010009], module, place and result in two digits each
        r"errNo\[0x0{8}05\w{2}00(?P<errno>[0-9a-f]{2})\]",
    ),
    "acl": (
        _NUMBER.format("acl", r"\d{6}"),
        r"\b(?:[eE]rr(?:or)?_?[cC]ode|[rR]et_?[cC]ode|errno|result|ret|failed|code|status)"
        + _AFTER,
    ),
    "chip": (r"\b(?:[eE]vent[ _]id|[fF]ault ?[cC]ode|Error Code|errorCode|fault_code)" + _CHIP,),
    "family": (r"(?:^|[\s(\[])(?P<family>E[A-Z]\d{4}|E[1-9]\d{4})(?=[:)\]]|\[PID|: )",),
}

# "EZ9999: Inner Error!" announces the line that describes what happened.
_HEADER = re.compile(r"\bE\w\d{4}: Inner Error!\s*$")

# One pattern per table, so that a scanner can look for lines worth reading.
PATTERNS: Mapping[str, str] = {name: "|".join(rows) for name, rows in _LOOK_UPS.items()}
_COMPILED = {name: re.compile(pattern) for name, pattern in PATTERNS.items()}


class CodeSpec(Classification):
    """A row of `codes.toml`: codes, or the first characters of codes, with the same meaning.

    Attributes:
        beside: searched in the lines around the code: a number that a stack returns for several
            causes is decided by what stands beside it.
    """

    codes: tuple[str, ...]
    means: str
    beside: str | None = None


@dataclass(frozen=True, slots=True)
class CodeFact:
    """A code in a line, with its row of the table."""

    code: str
    table: str
    spec: CodeSpec

    @property
    def role(self) -> Role:
        """Distance of the code from the cause."""
        return self.spec.role


@cache
def load_codes() -> Mapping[str, Mapping[str, Sequence[CodeSpec]]]:
    """Load the tables: code (or its first characters) to its meanings, by table name.

    The meanings that need other lines beside the code come first.
    """
    text = resources.files("perdure.training.diagnosis").joinpath("codes.toml").read_text("utf-8")
    tables: dict[str, dict[str, list[CodeSpec]]] = {}
    for table, rows in tomllib.loads(text).items():
        specs = sorted(map(CodeSpec.model_validate, rows), key=lambda spec: spec.beside is None)
        meanings = tables.setdefault(table, {})
        for spec in specs:
            for code in spec.codes:
                meanings.setdefault(code, []).append(spec)
    return tables


# Our answer to each level that MindCluster gives a chip fault code.
ANSWERS: Mapping[ChipLevel, RecoverableBy] = {
    ChipLevel.NOT_HANDLED: RecoverableBy.RETRY,
    ChipLevel.SUB_HEALTHY: RecoverableBy.RETRY,
    ChipLevel.RESTART_REQUEST: RecoverableBy.RETRY,
    ChipLevel.RESTART_JOB: RecoverableBy.RETRY,
    ChipLevel.RESET_WHEN_IDLE: RecoverableBy.RESCHEDULE,
    ChipLevel.RESET_NOW: RecoverableBy.RESCHEDULE,
    ChipLevel.NO_NEW_JOBS: RecoverableBy.RESCHEDULE,
    ChipLevel.SEPARATE: RecoverableBy.ISOLATE,
    ChipLevel.SEPARATE_BY_HAND: RecoverableBy.ISOLATE,
}


def _add_chip_fact(code: str, spec: CodeSpec) -> CodeSpec:
    """Add to a chip's code its facts from the table of chip fault codes."""
    fact = chip_fact(code)
    if fact is None:
        return spec
    updates: dict[str, object] = {}
    if fact.level is not None:
        updates["recoverable_by"] = ANSWERS[fact.level]
    if fact.level is ChipLevel.NOT_HANDLED:
        updates["role"] = Role.SYMPTOM
    if fact.cause:
        updates["means"] = f"{spec.means} ({fact.cause})"
    if fact.kind is CodeKind.USER:
        # The chip cannot know that the input is the user's: the ladder counts (ModelArts).
        updates |= {"user_fault": True, "hardware_fault": False}
    elif fact.kind is CodeKind.HARDWARE:
        updates["hardware_fault"] = True
    return spec.model_copy(update=updates)


def look_up_code(line: str, around: str = "") -> CodeFact | None:
    """Look up the most precise code of a line; None when it has no known code.

    Args:
        line: one line of output.
        around: the lines before and after it, with itself.
    """
    if _HEADER.search(line):
        return None
    for table, pattern in _COMPILED.items():
        for match in pattern.finditer(line):
            code = next(group for group in match.groups() if group is not None).upper()
            if table == "chip":
                code = _worst_code(code)
            if match.groupdict().get("errno"):
                code = str(int(code, 16))
            spec = _find_spec(table, code, around)
            if spec is not None and table == "chip":
                spec = _add_chip_fact(code, spec) if chip_fact(code) is not None else None
            if spec is not None:
                return CodeFact(code, table, spec)
    return None


# npu-smi's words for its codes stand below them, all but the first without a name.
_WORDS = re.compile(r"^\s*(?:Error Information)?\s*:\s*\S")
_ANSWERED = re.compile(r"^\s*Error Code\s*:(.*)$", re.MULTILINE)


def find_chip_code(line: str, context: str, fault_class: FaultClass) -> CodeFact | None:
    """Find the chip's code for a line of npu-smi that describes a code in words.

    A chip may report several codes at once, and npu-smi does not pair them with words: codes of
    the same class come first, then the code whose level asks for most.

    Args:
        line: a line with the words.
        context: text shortly before it.
        fault_class: class that the rules give the words.
    """
    answers = _ANSWERED.findall(context) if _WORDS.match(line) else []
    each = re.findall(rf"\b{_EIGHT}", answers[-1]) if answers else []
    facts = [fact for code in each if (fact := look_up_code(f"Error Code : {code}")) is not None]
    fitting = [fact for fact in facts if fact.spec.fault_class is fault_class] or facts
    if not fitting:
        return None
    worst = _worst_code(" ".join(fact.code for fact in fitting))
    return next(fact for fact in fitting if fact.code == worst)


def _worst_code(codes: str) -> str:
    """Return the code, of those that a chip reports together, whose level asks for most."""
    each = [code[-8:] for code in re.split(r",? ", codes)]
    facts = [fact for code in each if (fact := chip_fact(code)) is not None]
    order = list(ChipLevel)
    rated = [(order.index(fact.level), fact.code) for fact in facts if fact.level is not None]
    return max(rated, key=lambda pair: pair[0], default=(0, each[0]))[1]


def _find_spec(table: str, code: str, around: str) -> CodeSpec | None:
    meanings = load_codes()[table]
    shortest = len(code) if table in {"acl", "hccl"} else 0
    prefixes = (code[:length] for length in range(len(code), shortest - 1, -1))
    specs = next((meanings[key] for key in prefixes if key in meanings), ())
    return next((s for s in specs if s.beside is None or re.search(s.beside, around)), None)
