"""What one line of output means: by a rule, else by its code, else as an exception, else little.

`recognise` is pure: a line and the text shortly before it in, a `Finding` or nothing out. All
patterns are also compiled together, to find the lines that are worth reading. That takes seconds,
so the compiled form is kept on this machine, under a name that holds for these patterns, this
Hyperscan and this kind of machine alone. It is trusted like Python's own bytecode cache: a file
of the user's, with a checksum against damage. Without a place for it the patterns are compiled
each time.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import hyperscan

from training.diagnosis import codes, exceptions
from training.diagnosis.lines import Origin, is_low_level
from training.diagnosis.rules import Classification, Role, Rule, load_rules, match_line
from training.files import home_folder
from training.recovery.faults import FaultClass, RecoverableBy

CODE_RULE = "code-"
EXCEPTION_RULE = "exception"
_LEVEL_RULE = "error-line"
# An error that no rule, code or exception type explains is still worth showing.
UNEXPLAINED = (
    r"\b(?:ERROR|FATAL|CRITICAL)\b|[Ff]atal [Ee]rror\b|^[Ee]rror: |^panic: |\[[EF]\d{0,4} "
    r"|NCCL WARN "
)
_UNEXPLAINED = re.compile(UNEXPLAINED)
_NOTHING_KNOWN = Classification.model_validate({"class": FaultClass.UNKNOWN, "role": "hint"})
_PART_OF_TRACEBACK = re.compile(r'File "|\^\^\^|~~~|Trace[Bb]ack \(most recent')
_FLAGS = hyperscan.HS_FLAG_MULTILINE | hyperscan.HS_FLAG_PREFILTER


@dataclass(frozen=True, slots=True)
class Finding:
    """A line that is evidence of a fault.

    Attributes:
        rule: id of the rule that recognised it; "code-" with a table's name, "exception" and
            "error-line" for the general ones.
        offset: where the line begins in its source.
        origin: time and place in the line itself.
        seen_s: time of the line, or of the nearest line before it that has one.
        is_low_level: logged as information or a warning, and its rule does not count those.
        is_survived: training went on after it in the same source.
        is_after_steps: training had counted steps before it.
        frame: file that raised the exception, for exceptions.
        replaces: raised while the exception before it was being handled, so that one was not
            the end.
        is_repeated: tried again each time it is printed, so that the last such line is the one
            that training did not survive.
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
    is_repeated: bool = False


def recognise(line: str, before: str, candidates: Iterable[Rule] | None = None) -> Finding | None:
    """What a line means: by the first rule that matches, else by a code, else as an exception.

    Args:
        line: one line of output.
        before: text shortly before it.
        candidates: rules to try, in order; None: all.
    """
    if _is_no_evidence(line, before):
        return None
    if matched := match_line(line, before, candidates):
        rule, found = matched
        coded = _by_code(line) if rule.role is not Role.ROOT else None
        is_better = coded and (coded.role is Role.ROOT or rule.spec.yields_to_code)
        return coded if is_better else _by_rule(rule, found, line)
    return _by_code(line) or _by_exception(line, before) or _by_level(line)


# CANN's own guesses at causes, and the box that rich draws around a traceback.
_ADVICE = re.compile(
    r"^\s*(?:Possible [Cc]ause|Solution|Suggestion|Rectify|\u2502|\u2503)|\braise [\w.]+\("
)
_FRAME_END = re.compile(r'File "[^"\n]+", line \d+(?:, in [^\n]+)?$')


def _is_no_evidence(line: str, before: str) -> bool:
    """Whether a line is advice, or source code quoted in a traceback."""
    if _ADVICE.search(line):
        return True
    quoted = _FRAME_END.search(before.rstrip()) is not None
    return quoted and not exceptions.names_exception(line)


def _classified(rule: str, row: Classification, line: str, why: str) -> Finding:
    """A line with its row of a table."""
    return Finding(
        rule=rule,
        fault_class=row.fault_class,
        role=row.role,
        line=line,
        offset=0,
        origin=Origin(),
        recoverable_by=row.recoverable_by,
        user_fault=row.user_fault,
        hardware_fault=row.hardware_fault,
        why=why,
        is_low_level=is_low_level(line),
    )


def _by_rule(rule: Rule, found: re.Match[str], line: str) -> Finding:
    spec, groups = rule.spec, found.groupdict()
    rank, device = groups.get("rank"), groups.get("device")
    finding = _classified(rule.id, spec, line, spec.why)
    return replace(
        finding,
        origin=Origin(
            rank=int(rank) if rank and rank.isdigit() else None,
            node=groups.get("node"),
            device=int(device) if device and device.isdigit() else None,
        ),
        code=groups.get("code") or spec.code,
        action=spec.action,
        is_low_level=finding.is_low_level and not spec.any_level,
        is_repeated=spec.repeated,
    )


def _by_code(line: str) -> Finding | None:
    fact = codes.look_up(line)
    if fact is None:
        return None
    why = f"Code {fact.code}: {fact.spec.means}."
    return replace(_classified(f"{CODE_RULE}{fact.table}", fact.spec, line, why), code=fact.code)


def _by_exception(line: str, before: str) -> Finding | None:
    raised = exceptions.judge(line, before)
    if raised is None:
        return None
    where = f" in {raised.frame}." if raised.frame is not None else "."
    return replace(
        _classified(EXCEPTION_RULE, raised.spec, line, f"Python raised {raised.type}{where}"),
        role=raised.role,
        recoverable_by=raised.recoverable_by,
        frame=raised.frame,
    )


def _by_level(line: str) -> Finding | None:
    if _UNEXPLAINED.search(line) is None or _PART_OF_TRACEBACK.search(line):
        return None
    return _classified(_LEVEL_RULE, _NOTHING_KNOWN, line, "")


@cache
def patterns() -> Sequence[bytes]:
    """One pattern per rule, in their order, then those of the general recognisers.

    The last one is the beginning of a traceback.
    """
    specs = (rule.spec for rule in load_rules())
    general = (*codes.PATTERNS.values(), exceptions.PREFILTER, UNEXPLAINED, exceptions.TRACEBACK)
    return [portable(text) for text in (*(s.prefilter or s.pattern for s in specs), *general)]


@cache
def every_match() -> hyperscan.Database:
    """Reports every place where a pattern matches."""
    wanted = patterns()
    key = hashlib.sha256(
        b"\n".join(
            [
                *wanted,
                importlib.metadata.version("hyperscan").encode(),
                platform.machine().encode(),
            ]
        )
    ).hexdigest()
    path = home_folder() / "cache" / f"diagnosis-{key[:32]}"
    found = _load(path)
    if found is None:
        found = _compile(wanted)
        _keep(path, found)
    return found


def portable(pattern: str) -> bytes:
    """A rule's pattern for the automaton: nothing may run past the end of a line."""
    without_names = re.sub(r"\(\?P<\w+>", "(", pattern)
    return re.sub(r"(?<!\\)\[\^", r"[^\\n", without_names).encode()


def _compile(wanted: Sequence[bytes]) -> hyperscan.Database:
    database = hyperscan.Database()
    database.compile(
        expressions=wanted,
        ids=list(range(len(wanted))),
        elements=len(wanted),
        flags=[_FLAGS] * len(wanted),
    )
    return database


def _load(path: Path) -> hyperscan.Database | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    checksum, body = data[:32], data[32:]
    if hashlib.sha256(body).digest() != checksum:
        return None
    try:
        database = hyperscan.loadb(body, mode=hyperscan.HS_MODE_BLOCK)
    except hyperscan.error:
        return None  # compiled for other processors
    database.scratch = hyperscan.Scratch(database)
    return database


def _keep(path: Path, database: hyperscan.Database) -> None:
    body = hyperscan.dumpb(database)
    temporary = path.with_suffix(f".{id(database):x}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(hashlib.sha256(body).digest() + body)
        temporary.replace(path)
    except OSError:
        return  # nowhere to keep it: the next process compiles again
