"""How sure a diagnosis is: the share of diagnoses of its kind that name the right class and line.

The shares are measured on labelled logs (docs/diagnosis.md), by `benchmarks.diagnose_quality`.
Where several causes explain the evidence equally, the share is halved. It is then below
`recovery.faults.MIN_CONFIDENCE`: the ladder treats the fault as unknown. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from perdure.training.diagnosis.recognise import CODE_RULE, EXCEPTION_RULE, Finding
from perdure.training.diagnosis.rules import Role
from perdure.training.diagnosis.silence import SUSPECT_RULE


class Ground(StrEnum):
    """The kind of evidence that a diagnosis rests on."""

    RULE = "a rule names the cause"
    SYMPTOM = "a rule names what failed, not why"
    CODE = "a code alone"
    EXCEPTION = "the type and place of an exception"
    ECHO = "the echo of another failure"
    ERROR = "an error that nothing explains"
    SUSPECT = "an unusual line"


SHARES: Mapping[Ground, float] = {
    Ground.RULE: 0.98,
    Ground.SYMPTOM: 0.98,
    Ground.CODE: 0.95,
    Ground.EXCEPTION: 0.95,
    Ground.ECHO: 0.90,
    Ground.ERROR: 0.70,
    Ground.SUSPECT: 0.60,
}
_TIE = 0.5


def find_ground(finding: Finding) -> Ground:
    """Find the kind of evidence that a finding is."""
    if finding.rule == SUSPECT_RULE:
        return Ground.SUSPECT
    if finding.role is Role.HINT:
        return Ground.ERROR
    if finding.role is Role.CASCADE:
        return Ground.ECHO
    if finding.rule == EXCEPTION_RULE:
        return Ground.EXCEPTION
    if finding.rule.startswith(CODE_RULE):
        return Ground.CODE
    return Ground.RULE if finding.role is Role.ROOT else Ground.SYMPTOM


def rate(finding: Finding, *, has_rival: bool = False) -> float:
    """Rate how likely a diagnosis by this finding is right.

    Args:
        finding: its key line.
        has_rival: whether another cause would explain the evidence as well.
    """
    share = SHARES[find_ground(finding)]
    return share * _TIE if has_rival else share
