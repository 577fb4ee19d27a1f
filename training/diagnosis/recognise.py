"""What one line of output says: by a rule, else by its code, else as an exception, else little.

Pure: a line and the text shortly before it in, a `Finding` or nothing out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from training.diagnosis import codes, exceptions
from training.diagnosis.lines import Origin, is_low_level
from training.diagnosis.rules import Role, Rule, match_line
from training.policy.faults import FaultClass, RecoverableBy

CODE_RULE = "code-"
EXCEPTION_RULE = "exception"
_LEVEL_RULE = "error-line"
# An error that no rule, code or exception type explains is still worth showing.
UNEXPLAINED = (
    r"\b(?:ERROR|FATAL|CRITICAL)\b|[Ff]atal [Ee]rror\b|^[Ee]rror: |^panic: |\[[EF]\d{0,4} "
)
_UNEXPLAINED = re.compile(UNEXPLAINED)
_PART_OF_TRACEBACK = re.compile(r'File "|\^\^\^|~~~|Trace[Bb]ack \(most recent')


@dataclass(frozen=True, slots=True)
class Finding:
    """A line that says something about a fault.

    Attributes:
        rule: id of the rule that recognised it; "code-" with a table's name, "exception" and
            "error-line" for the general ones.
        offset: where the line begins in its source.
        origin: what the line itself tells about time and place.
        seen_s: time of the line, or of the nearest line before it that has one.
        is_low_level: logged as information or a warning, and its rule does not count those.
        is_survived: training went on after it in the same source.
        is_after_steps: training had counted steps before it.
        frame: file that raised the exception, for exceptions.
        replaces: raised while the exception before it was being handled, so that one was not
            the end.
    """

    rule: str
    fault_class: FaultClass
    role: Role
    line: str
    offset: int
    origin: Origin
    seen_s: float | None = None
    code: str | None = None
    recoverable_by: RecoverableBy | None = None
    user_fault: bool | None = None
    hardware_fault: bool | None = None
    why: str = ""
    action: str = ""
    is_low_level: bool = False
    is_survived: bool = False
    is_after_steps: bool = False
    frame: str | None = None
    replaces: bool = False


def recognise(line: str, before: str, candidates: Iterable[Rule] | None = None) -> Finding | None:
    """What a line says: by the first rule that matches, else by a code, else as an exception.

    Args:
        line: one line of output.
        before: text shortly before it.
        candidates: rules to try, in order; None: all.
    """
    if _says_nothing(line, before):
        return None
    if matched := match_line(line, before, candidates):
        rule, found = matched
        told = _by_code(line) if rule.role is not Role.ROOT else None
        says_more = told and (told.role is Role.ROOT or rule.spec.yields_to_code)
        return told if says_more else _by_rule(rule, found, line)
    return _by_code(line) or _by_exception(line, before) or _by_level(line)


# CANN's own guesses at causes, and the box that rich draws around a traceback.
_ADVICE = re.compile(
    r"^\s*(?:Possible [Cc]ause|Solution|Suggestion|Rectify|\u2502|\u2503)|\braise [\w.]+\("
)
_FRAME_END = re.compile(r'File "[^"\n]+", line \d+(?:, in [^\n]+)?$')


def _says_nothing(line: str, before: str) -> bool:
    """Whether a line is advice, or source code quoted in a traceback."""
    if _ADVICE.search(line):
        return True
    quoted = _FRAME_END.search(before.rstrip()) is not None
    return quoted and not exceptions.names_exception(line)


def _by_rule(rule: Rule, found: re.Match[str], line: str) -> Finding:
    spec, groups = rule.spec, found.groupdict()
    rank, device = groups.get("rank"), groups.get("device")
    return Finding(
        rule=rule.id,
        fault_class=rule.fault_class,
        role=rule.role,
        line=line,
        offset=0,
        origin=Origin(
            rank=int(rank) if rank and rank.isdigit() else None,
            node=groups.get("node"),
            device=int(device) if device and device.isdigit() else None,
        ),
        code=groups.get("code") or spec.code,
        recoverable_by=spec.recoverable_by,
        user_fault=spec.user_fault,
        hardware_fault=spec.hardware_fault,
        why=spec.why,
        action=spec.action,
        is_low_level=not spec.any_level and is_low_level(line),
    )


def _by_code(line: str) -> Finding | None:
    fact = codes.look_up(line)
    if fact is None:
        return None
    spec = fact.spec
    return Finding(
        rule=f"{CODE_RULE}{fact.table}",
        fault_class=spec.fault_class,
        role=fact.role,
        line=line,
        offset=0,
        origin=Origin(),
        code=fact.code,
        recoverable_by=spec.recoverable_by,
        user_fault=spec.user_fault,
        hardware_fault=spec.hardware_fault,
        why=f"Code {fact.code}: {spec.means}.",
        is_low_level=is_low_level(line),
    )


def _by_exception(line: str, before: str) -> Finding | None:
    raised = exceptions.judge(line, before)
    if raised is None:
        return None
    spec = raised.spec
    return Finding(
        rule=EXCEPTION_RULE,
        fault_class=spec.fault_class,
        role=raised.role,
        line=line,
        offset=0,
        origin=Origin(),
        recoverable_by=raised.recoverable_by,
        user_fault=spec.user_fault,
        hardware_fault=spec.hardware_fault,
        why=f"Python raised {raised.type}"
        + (f" in {raised.frame}." if raised.frame is not None else "."),
        is_low_level=is_low_level(line),
        frame=raised.frame,
    )


def _by_level(line: str) -> Finding | None:
    if _UNEXPLAINED.search(line) is None or _PART_OF_TRACEBACK.search(line):
        return None
    return Finding(
        rule=_LEVEL_RULE,
        fault_class=FaultClass.UNKNOWN,
        role=Role.HINT,
        line=line,
        offset=0,
        origin=Origin(),
        is_low_level=is_low_level(line),
    )
