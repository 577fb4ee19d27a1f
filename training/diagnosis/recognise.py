"""The meaning of a line of output: by a rule, else by its code, else as an exception, else little.

`recognise` is pure: a line and the text shortly before it in, a `Finding` or nothing out.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from perdure.training.diagnosis import codes, exceptions
from perdure.training.diagnosis.lines import Origin, is_low_level, severity_of
from perdure.training.diagnosis.rules import Classification, Role, Rule, load_rules, match_line
from perdure.training.recovery.chips import Severity
from perdure.training.recovery.faults import TRAITS, FaultClass, RecoverableBy

CODE_RULE = "code-"
_CHIP_RULE = f"{CODE_RULE}chip"
FAMILY_RULE = f"{CODE_RULE}family"
EXCEPTION_RULE = "exception"
_LEVEL_RULE = "error-line"
# An error that no rule, code or exception type explains is still worth showing.
UNEXPLAINED = (
    r"\b(?:ERROR|FATAL|CRITICAL)\b|[Ff]atal [Ee]rror\b|^[Ee]rror: |^panic: |\[[EF]\d{0,4} "
    r"|NCCL WARN "
)
_UNEXPLAINED = re.compile(UNEXPLAINED)
_UNKNOWN = Classification.model_validate({"class": FaultClass.UNKNOWN, "role": "hint"})
_AROUND_CHARS = 2048  # on each side of a code
_PART_OF_TRACEBACK = re.compile(r'File "|\^\^\^|~~~|Trace[Bb]ack \(most recent')


@dataclass(frozen=True, slots=True)
class Finding:
    """A line that is evidence of a fault.

    Attributes:
        rule: id of the rule that recognised it; "code-" with a table's name, "exception" and
            "error-line" for the general recognisers.
        offset: begin of the line in its source.
        origin: time and place in the line itself.
        seen_s: time of the line, or of the nearest line before it that has a time.
        is_low_level: whether it is logged as information or a warning, and its rule does not
            count those; or the driver's severity of its event, a hint, asks for nothing.
        is_survived: whether training continued after it in the same source.
        is_after_steps: whether training had counted steps before it.
        frame: file that raised the exception, for exceptions.
        replaces: whether the handling of the exception before it raised it, so that one was not
            the end.
        is_repeated: whether the program tried again each time it printed the line, so that
            training did not survive the last such line.
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

    @property
    def is_unnamed(self) -> bool:
        """Whether it is an exception that no table knows: it ended its process all the same."""
        return self.role is Role.ROOT and self.fault_class is FaultClass.UNKNOWN

    @property
    def is_receipt(self) -> bool:
        """Whether it shows that a signal to end came, and not who sent it."""
        is_signal = self.code in signal.Signals.__members__
        return self.fault_class is FaultClass.PREEMPTED and self.role > Role.ROOT and is_signal

    @property
    def names_sender(self) -> bool:
        """Whether it shows who ended the job: a scheduler, a platform, a person."""
        if self.fault_class is not FaultClass.PREEMPTED:
            return False
        is_named = self.code is not None and self.code not in signal.Signals.__members__
        return self.role is Role.ROOT or (self.role is Role.SYMPTOM and is_named)


def recognise(
    line: str, context: str, candidates: Iterable[Rule] | None = None, *, later: str = ""
) -> Finding | None:
    """Recognise a line: by the first rule that matches, else by a code, else as an exception.

    Args:
        line: one line of output.
        context: text shortly before it.
        candidates: rules to try, in order; None: all.
        later: text shortly after it.
    """
    finding = _find_evidence(line, context, candidates, later)
    if finding is None or severity_of(line) != Severity.HINT:
        return finding
    is_drivers = finding.rule == _CHIP_RULE or TRAITS[finding.fault_class].hardware_fault
    return replace(finding, is_low_level=finding.is_low_level or is_drivers)


def _find_evidence(
    line: str, context: str, candidates: Iterable[Rule] | None, later: str
) -> Finding | None:
    if _is_quotation(line, context):
        return None
    around = f"{context[-_AROUND_CHARS:]}\n{line}\n{later[:_AROUND_CHARS]}"
    if matched := match_line(line, context, candidates):
        rule, match = matched
        yields = rule.role is not Role.ROOT or rule.spec.yields_to_code
        coded, is_decided = _find_code(line, around) if yields else (None, False)
        decides = is_decided and coded is not None and coded.fault_class is not rule.fault_class
        is_better = coded and (coded.role is Role.ROOT or rule.spec.yields_to_code or decides)
        return coded if is_better else _add_chip_code(_apply_rule(rule, match, line), context)
    return _find_code(line, around)[0] or _find_exception(line, context) or _find_level(line)


# CANN's own guesses at causes, and the box that rich draws around a traceback.
_ADVICE = re.compile(
    r"^\s*(?:Possible [Cc]ause|Solution|Suggestion|Rectify|\u2502|\u2503)|\braise [\w.]+\("
)
_FRAME_END = re.compile(r'File "[^"\n]+", line \d+(?:, in [^\n]+)?$')


def _is_quotation(line: str, context: str) -> bool:
    """Whether a line is advice, or source code quoted in a traceback."""
    if _ADVICE.search(line):
        return True
    quoted = _FRAME_END.search(context.rstrip()) is not None
    return quoted and not exceptions.names_exception(line)


def _build_finding(rule: str, row: Classification, line: str, why: str) -> Finding:
    """Build a finding from a line and its row of a table."""
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


def _apply_rule(rule: Rule, match: re.Match[str], line: str) -> Finding:
    spec, groups = rule.spec, match.groupdict()
    rank, device = groups.get("rank"), groups.get("device")
    finding = _build_finding(rule.id, spec, line, spec.why)
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


def _add_chip_code(finding: Finding, context: str) -> Finding:
    """Add to a line in which npu-smi describes a code the code itself."""
    if finding.code is not None:
        return finding
    fact = codes.find_chip_code(finding.line, context, finding.fault_class)
    if fact is None:
        return finding
    spec = fact.spec
    return replace(
        finding,
        code=fact.code,
        recoverable_by=finding.recoverable_by or spec.recoverable_by,
        user_fault=spec.user_fault if finding.user_fault is None else finding.user_fault,
        hardware_fault=spec.hardware_fault
        if finding.hardware_fault is None
        else finding.hardware_fault,
        why=f"{finding.why} Code {fact.code}: {spec.means}.".strip(),
    )


def _find_code(line: str, around: str) -> tuple[Finding | None, bool]:
    """Find what a code means, and whether the lines around it decided that."""
    fact = codes.look_up_code(line, around)
    if fact is None:
        return None, False
    why = f"Code {fact.code}: {fact.spec.means}."
    finding = _build_finding(f"{CODE_RULE}{fact.table}", fact.spec, line, why)
    return replace(finding, code=fact.code), fact.spec.beside is not None


def _find_exception(line: str, context: str) -> Finding | None:
    raised = exceptions.judge_exception(line, context)
    if raised is None:
        return None
    where = f" in {raised.frame}." if raised.frame is not None else "."
    return replace(
        _build_finding(EXCEPTION_RULE, raised.spec, line, f"Python raised {raised.type}{where}"),
        role=raised.role,
        recoverable_by=raised.recoverable_by,
        frame=raised.frame,
    )


def _find_level(line: str) -> Finding | None:
    if _UNEXPLAINED.search(line) is None or _PART_OF_TRACEBACK.search(line):
        return None
    return _build_finding(_LEVEL_RULE, _UNKNOWN, line, "")


@cache
def list_patterns() -> Sequence[bytes]:
    """List a pattern for each rule, in their order, then those of the general recognisers.

    The last one is the beginning of a traceback.
    """
    specs = (rule.spec for rule in load_rules())
    general = (*codes.PATTERNS.values(), exceptions.PREFILTER, UNEXPLAINED, exceptions.TRACEBACK)
    return [_make_portable(text) for text in (*(s.prefilter or s.pattern for s in specs), *general)]


def _make_portable(pattern: str) -> bytes:
    """Rewrite a pattern for the automaton: a match must not run past the end of a line."""
    without_names = re.sub(r"\(\?P<\w+>", "(", pattern)
    return re.sub(r"(?<!\\)\[\^", r"[^\\n", without_names).encode()
