"""The first cause among the findings of output: by role, then by time, then by place.

`_standing` and `_detail` rank lines of output: which line of a source, and which source, shows the
cause. They do not rank processes; `_Tier` in classify.py decides which process, node or refusal
of an attempt is to blame, with or without output.

A rank fails and a thousand others print timeouts. A cause beats a symptom, a symptom an echo;
among equals the earliest in time wins, across ranks whose clocks have been merged. A fault that
training survived is no cause. Times are seconds since the epoch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from math import inf

from perdure.training.diagnosis.confidence import rate
from perdure.training.diagnosis.exceptions import names_exception
from perdure.training.diagnosis.lines import severity_of
from perdure.training.diagnosis.msrun import relate_workers
from perdure.training.diagnosis.recognise import CODE_RULE, EXCEPTION_RULE, FAMILY_RULE, Finding
from perdure.training.diagnosis.rules import Role
from perdure.training.diagnosis.scan import CONTEXT_SIZE_BYTES
from perdure.training.recovery.faults import TRAITS, Fault, FaultClass, RecoverableBy

MAX_RUNNERS_UP = 5
MAX_EVIDENCE_CHARS = 2000
_EVENT_SPAN_S = 60.0  # lines that a source prints within this time are about the same event


@dataclass(frozen=True, slots=True)
class LogSource:
    """Findings of a file or process, with the place where it ran as far as it is known.

    Attributes:
        name: path or other label.
        order: position among the sources, for findings without a time.
        clock_offset_s: difference of the first source's clock from that of this source.
    """

    name: str
    findings: Sequence[Finding]
    order: int = 0
    rank: int | None = None
    node: str | None = None
    device: int | None = None
    clock_offset_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A finding that may be the first cause, with its source."""

    source: LogSource
    finding: Finding

    @property
    def at_s(self) -> float | None:
        """Time on the merged clock."""
        seen_s = self.finding.seen_s
        return None if seen_s is None else seen_s + self.source.clock_offset_s


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The first cause, and the runners-up of the evidence, most likely first.

    Attributes:
        source: name of the file with the key line; None where no file was read.
        offset: rough begin of the line in the file.
        has_rival: whether another cause would explain the evidence as well.
    """

    fault: Fault
    runners_up: tuple[Fault, ...] = ()
    source: str | None = None
    offset: int = 0
    has_rival: bool = False


def counts_as_failure(finding: Finding) -> bool:
    """Whether a finding is a failure: not logged as harmless, not survived by training."""
    if finding.is_low_level:
        return False
    lasting = finding.hardware_fault or TRAITS[finding.fault_class].hardware_fault
    diverged = finding.fault_class is FaultClass.NUMERIC_ANOMALY and finding.role <= Role.SYMPTOM
    return not finding.is_survived or bool(lasting) or diverged


def rank_candidates(sources: Sequence[LogSource], *, has_failed: bool = False) -> list[Candidate]:
    """List every finding that counts, first cause first.

    Args:
        sources: findings by file or process.
        has_failed: there was a failure for certain, so a fault that training seems to have
            survived counts where no other finding explains it.
    """
    related = [_doubt_users(f) for f in relate_workers([s.findings for s in sources])]
    sources = [replace(s, findings=f) for s, f in zip(sources, related, strict=True)]
    candidates = [
        Candidate(source, finding)
        for source in sources
        for finding in source.findings
        if counts_as_failure(finding)
    ]
    if has_failed and all(c.finding.role is Role.HINT for c in candidates):
        candidates += [
            Candidate(source, finding)
            for source in sources
            for finding in source.findings
            if not finding.is_low_level and finding.is_survived
        ]
    yields = any(candidate.finding.is_unnamed for candidate in candidates)
    if any(candidate.finding.names_sender for candidate in candidates):
        candidates = [_demote_receipt(candidate) for candidate in candidates]
    first: dict[tuple[int, float], Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: c.finding.offset):
        first.setdefault((candidate.source.order, _standing(candidate, yields=yields)), candidate)

    def key(candidate: Candidate) -> tuple[float, float, int, int, int, int]:
        """Order by standing, its first time in the source, the source, and the line's detail."""
        source, finding = candidate.source, candidate.finding
        standing = _standing(candidate, yields=yields)
        began = first[source.order, standing]
        began_s = inf if began.at_s is None else began.at_s
        later = int(_is_later(candidate, began) and not finding.is_repeated)
        place = -finding.offset if finding.is_repeated else finding.offset
        return (standing, began_s, source.order, later, _detail(finding), place)

    return sorted(candidates, key=key)


def _doubt_users(findings: Sequence[Finding]) -> list[Finding]:
    """Demote exceptions of the user's own lines that follow from evidence before them."""
    return [
        replace(f, role=max(f.role, Role.CASCADE)) if follows_evidence(f, findings) else f
        for f in findings
    ]


def follows_evidence(finding: Finding, findings: Sequence[Finding]) -> bool:
    """Whether a device had failed shortly before the user's own line raised an exception.

    What a failed device returns is no longer what the program expects of it.

    Args:
        finding: an exception, or not.
        findings: all of its source.
    """
    if finding.fault_class is not FaultClass.USER_CODE_ERROR or finding.role is not Role.ROOT:
        return False
    return names_exception(finding.line) and any(
        other.fault_class in DEVICE_FAULTS
        and other.role <= Role.SYMPTOM
        and counts_as_failure(other)
        and _is_shortly_before(other, finding)
        for other in findings
    )


def _is_shortly_before(earlier: Finding, finding: Finding) -> bool:
    if (
        earlier.offset >= finding.offset
        or len({earlier.origin.rank, finding.origin.rank} - {None}) > 1
    ):
        return False
    if earlier.origin.at_s is None or finding.seen_s is None:
        return finding.offset - earlier.offset < CONTEXT_SIZE_BYTES
    return 0.0 <= finding.seen_s - earlier.origin.at_s <= _EVENT_SPAN_S


def _demote_receipt(candidate: Candidate) -> Candidate:
    """Demote the line of a process that got a signal: another line shows who sent it."""
    finding = candidate.finding
    if not finding.is_receipt:
        return candidate
    return replace(candidate, finding=replace(finding, role=max(finding.role, Role.CASCADE)))


# A symptom of a device explains an exception that no table knows; lines of peers and launchers
# about the end of its process do not.
DEVICE_FAULTS = frozenset(
    fault_class for fault_class, traits in TRAITS.items() if traits.hardware_fault
) | {
    FaultClass.OPERATOR_ERROR,
    FaultClass.DEVICE_OOM,
}


def _standing(candidate: Candidate, *, yields: bool) -> float:
    """Rank a finding by role, exceptions that no table knows below symptoms of a device."""
    finding = candidate.finding
    if finding.is_unnamed:
        return Role.SYMPTOM + 0.1
    is_other = finding.role is Role.SYMPTOM and finding.fault_class not in DEVICE_FAULTS
    return Role.SYMPTOM + 0.2 if yields and is_other else finding.role


def _is_later(candidate: Candidate, began: Candidate) -> bool:
    """Tell whether a line belongs to another event than the first of its role in the source."""
    if candidate.at_s is None or began.at_s is None:
        return False
    # A line without a time has that of a line before it, which may be much older.
    is_next = candidate.finding.offset - began.finding.offset < CONTEXT_SIZE_BYTES
    if is_next and began.finding.origin.at_s is None and candidate.finding.origin.at_s is not None:
        return False
    return candidate.at_s - began.at_s > _EVENT_SPAN_S


# torch_npu wraps reports of CANN, and CANN collects logs of its modules and adds the calls that led
# there: the report nearest to the device is the most precise.
_PLOG = re.compile(
    r"\[ERROR\] ?[A-Z]+\(\d+,|\bThe error from device\b"
    r"|\b[kK]ernel execute failed\b|\bKernel task happen error\b"
)
_CALLER = re.compile(r"\[FUNC:\w+\] ?\[FILE:")
_CANN_CODE = re.compile(r"\bE[A-Z0-9]\d{4}(?::|\[PID|\))")
_WRAPPER = re.compile(
    r"\bfunction error: |\bHCCL error in: |Error: .{0,300}\berror code is \d{6}\b"
    r"|\bcall aclnn\w+ failed\b(?!.*detail:E\w+: \[)"
)
_IS_VAGUE = re.compile(r"\b(?:RuntimeError|Exception|OSError): |Error:?\s*$")
_SUMMARY_OF_EXIT = re.compile(r"^\s*exitcode\s*: ")
_FRAME_OF_SUMMARY = re.compile(
    r"^\s*error_file\s*:|\bTo enable traceback\b|Root Cause|<NO_OTHER_FAILURES>"
)
# The exception after it repeats it; or the line only announces what comes next.
_ANNOUNCES = re.compile(
    r"THCudaCheck FAIL|\bfollowing (?:error|exception|reason)s?\b[^:\n]{0,60}:\s*$"
)
_BEHIND_PROGRESS_BAR = re.compile(r"\d(?:it/s|s/it)\b")


_OF_RANK = re.compile(r"^\s*\[rank:?\s?\d+\]|\bRankID:\s?\d")  # of the process that prints it


class _Detail(IntEnum):
    """The precision of a line, compared with lines of the same role in its source."""

    NEAREST = 0
    OWN_WORDS = 1
    CALLER = 2
    CODE = 3
    GENERAL = 4
    WRAPPER = 5


_DETAILS: Sequence[tuple[_Detail, Callable[[Finding], object]]] = (
    (_Detail.WRAPPER, lambda f: _WRAPPER.search(f.line)),
    (_Detail.NEAREST, lambda f: _PLOG.search(f.line)),
    (_Detail.GENERAL, lambda f: f.rule == EXCEPTION_RULE and _IS_VAGUE.search(f.line)),
    (_Detail.CODE, lambda f: f.rule.startswith(CODE_RULE) and not _CANN_CODE.search(f.line)),
    (_Detail.GENERAL, lambda f: f.rule == FAMILY_RULE),
    (_Detail.CALLER, lambda f: _SUMMARY_OF_EXIT.search(f.line)),
    (_Detail.GENERAL, lambda f: _FRAME_OF_SUMMARY.search(f.line)),
    (_Detail.CALLER, lambda f: _ANNOUNCES.search(f.line)),
    (_Detail.CALLER, lambda f: _BEHIND_PROGRESS_BAR.search(f.line)),
    (_Detail.CALLER, lambda f: _CALLER.search(f.line) and not _CANN_CODE.search(f.line)),
)


def _detail(finding: Finding) -> _Detail:
    return next((d for d, holds in _DETAILS if holds(finding)), _Detail.OWN_WORDS)


def _add_event_details(best: Candidate, ranked: Sequence[Candidate]) -> Candidate:
    """Add to a line that names a failed kernel the facts in other lines of its event.

    "EZ9999: <what failed>" describes the failure, the exception around it has the number,
    and the dump of the core's errors shows when the kernel's own addresses are wrong.
    """
    finding = best.finding
    if finding.fault_class is not FaultClass.OPERATOR_ERROR or finding.role is Role.ROOT:
        return best
    candidates = [o for o in ranked if o.source is best.source]
    theirs = [o.finding for o in candidates if o.finding.fault_class is FaultClass.OPERATOR_ERROR]
    if any(finding.recoverable_by is RecoverableBy.USER_FIX for finding in theirs):
        answer = finding.recoverable_by or RecoverableBy.USER_FIX
        finding = replace(finding, recoverable_by=answer)
        best = replace(best, finding=finding)
    for other in candidates:
        wrapper = other.finding
        if _detail(wrapper) is _Detail.WRAPPER:
            informed = replace(
                finding,
                fault_class=wrapper.fault_class,
                code=finding.code or wrapper.code,
                recoverable_by=finding.recoverable_by or wrapper.recoverable_by,
                why=finding.why or wrapper.why,
            )
            return replace(best, finding=informed)
    return best


def _add_place(best: Candidate, ranked: Sequence[Candidate]) -> Candidate:
    """Add to a line without a place the rank and the device that the lines around it name."""
    origin = best.finding.origin
    if origin.rank is not None or origin.device is not None or best.source.rank is not None:
        return best
    near = [
        other.finding
        for other in ranked
        if other.source is best.source
        and abs(other.finding.offset - best.finding.offset) < CONTEXT_SIZE_BYTES
    ]
    # Elsewhere in a line, the rank may be that of a peer.
    ranks = {finding.origin.rank for finding in near if _OF_RANK.search(finding.line)} - {None}
    devices = {finding.origin.device for finding in near} - {None}
    place = replace(
        origin,
        rank=next(iter(ranks)) if len(ranks) == 1 else None,
        device=next(iter(devices)) if len(devices) == 1 and len(ranks) <= 1 else None,
    )
    return replace(best, finding=replace(best.finding, origin=place))


def choose_cause(
    sources: Sequence[LogSource], *, at_s: float, step: int | None = None
) -> Diagnosis | None:
    """Choose the first cause with its runners-up; None when nothing counts as a failure.

    Args:
        sources: findings by file or process.
        at_s: the time of a cause whose line has none.
        step: last completed step, if known.
    """
    ranked = rank_candidates(sources)
    if not ranked:
        return None
    best, runners_up = _add_place(_add_event_details(ranked[0], ranked), ranked), []
    kinds = {_kind(ranked[0])}
    for candidate in ranked[1:]:
        if _kind(candidate) not in kinds:
            kinds.add(_kind(candidate))
            runners_up.append(build_fault(candidate, at_s=at_s, step=step))
    fault = build_fault(best, at_s=at_s, step=step)
    has_rival = any(_is_rival(candidate, ranked[0]) for candidate in ranked[1:])
    if has_rival:
        fault = replace(
            fault,
            confidence=rate(best.finding, has_rival=True),
            explanation=f"{fault.explanation} {_ORDER_UNKNOWN}",
        )
    return Diagnosis(
        fault,
        tuple(runners_up[:MAX_RUNNERS_UP]),
        best.source.name,
        best.finding.offset,
        has_rival,
    )


_ORDER_UNKNOWN = "The logs do not show whether this or another cause came first."


def _is_rival(candidate: Candidate, best: Candidate) -> bool:
    """Whether a cause of another kind, in another file, may have come before the best one.

    A program's own error does not break a device.
    """
    is_timed = candidate.at_s is not None and best.at_s is not None
    return (
        not is_timed
        and candidate.source is not best.source
        and candidate.finding.role is best.finding.role is Role.ROOT
        and not candidate.finding.is_unnamed
        and candidate.finding.fault_class is not best.finding.fault_class
        and not (
            TRAITS[best.finding.fault_class].hardware_fault
            and TRAITS[candidate.finding.fault_class].user_fault
        )
    )


def _kind(candidate: Candidate) -> tuple[str, FaultClass]:
    return candidate.finding.rule, candidate.finding.fault_class


def build_fault(candidate: Candidate, *, at_s: float, step: int | None) -> Fault:
    """Build the fault that a candidate stands for, with the traits of its class."""
    finding, source, origin = candidate.finding, candidate.source, candidate.finding.origin
    traits = TRAITS[finding.fault_class]
    answer = finding.recoverable_by or _usual_answer(finding)
    user = _value_or(finding.user_fault, traits.user_fault)
    return Fault(
        fault_class=finding.fault_class,
        at_s=candidate.at_s if candidate.at_s is not None else at_s,
        evidence=finding.line.strip()[:MAX_EVIDENCE_CHARS],
        node=origin.node or source.node,
        rank=origin.rank if origin.rank is not None else source.rank,
        device=origin.device if origin.device is not None else source.device,
        code=finding.code,
        step=step,
        explanation=f"{traits.meaning} {finding.why}".strip(),
        action=finding.action or _action(finding.fault_class, answer),
        recoverable_by=answer,
        user_fault=user
        if finding.recoverable_by is not RecoverableBy.RETRY
        else _value_or(finding.user_fault, False),
        hardware_fault=_value_or(finding.hardware_fault, traits.hardware_fault),
        severity=severity_of(finding.line),
        confidence=rate(finding),
    )


def _usual_answer(finding: Finding) -> RecoverableBy:
    """Return the answer of the class; a crash before any step is the program's, and recurs."""
    if finding.fault_class is FaultClass.NATIVE_CRASH and not finding.is_after_steps:
        return RecoverableBy.USER_FIX
    return TRAITS[finding.fault_class].recoverable_by


def _value_or(value: bool | None, default: bool) -> bool:  # noqa: FBT001 a value, not a switch
    return default if value is None else value


_ACTIONS = {
    RecoverableBy.RETRY: "Start again; if it comes back, look further.",
    RecoverableBy.RESCHEDULE: "Let the job go on elsewhere; look at the node before its next use.",
    RecoverableBy.ISOLATE: "Keep the node out until its hardware has been checked.",
    RecoverableBy.USER_FIX: "Correct what the line names; a restart alone will fail again.",
}


def _action(fault_class: FaultClass, answer: RecoverableBy) -> str:
    """Return the advice of the class where its usual answer holds, else that of the answer."""
    traits = TRAITS[fault_class]
    return traits.action if answer is traits.recoverable_by else _ACTIONS[answer]
