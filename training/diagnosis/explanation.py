"""Why a diagnosis names its cause: what became of every finding, and which explains which. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perdure.training.diagnosis.cause import Diagnosis, LogSource, counts_as_failure
from perdure.training.diagnosis.recognise import Finding
from perdure.training.diagnosis.silence import SUSPECT_RULE

MAX_FINDINGS = 40


@dataclass(frozen=True, slots=True)
class ExplainedFinding:
    """A finding with what became of it.

    Attributes:
        source: file of the finding.
        verdict: why it is the cause, or why not.
        explained_by: line of the finding that is its cause; None for the cause and for what is
            no failure.
    """

    source: str
    role: str
    fault_class: str
    rule: str
    line: str
    verdict: str
    explained_by: str | None = None


def explain_choice(
    sources: Sequence[LogSource], diagnosis: Diagnosis | None
) -> list[ExplainedFinding]:
    """Explain what became of the findings, the cause first.

    Args:
        sources: all findings, by file.
        diagnosis: the choice among them; None where nothing failed.
    """
    places = [(source, finding) for source in sources for finding in source.findings]
    root = next((place for place in places if _is_root(*place, diagnosis)), None)
    each = [_explain(source, finding, root, diagnosis) for source, finding in places]
    if root is None and diagnosis is not None:
        fault = diagnosis.fault
        source = diagnosis.source or ""
        each.append(
            ExplainedFinding(
                source, "hint", fault.fault_class, SUSPECT_RULE, fault.evidence, _CAUSE
            )
        )
    each.sort(key=lambda row: row.verdict != _CAUSE)
    return each[:MAX_FINDINGS]


_CAUSE = "the cause: the first line of the best role"


def _is_root(source: LogSource, finding: Finding, diagnosis: Diagnosis | None) -> bool:
    if diagnosis is None or source.name != diagnosis.source:
        return False
    return finding.offset == diagnosis.offset and finding.line.strip().startswith(
        diagnosis.fault.evidence
    )


def _explain(
    source: LogSource,
    finding: Finding,
    root: tuple[LogSource, Finding] | None,
    diagnosis: Diagnosis | None,
) -> ExplainedFinding:
    verdict, explained_by = _judge(source, finding, root, diagnosis)
    return ExplainedFinding(
        source.name,
        finding.role.name.lower(),
        finding.fault_class,
        finding.rule,
        finding.line.strip(),
        verdict,
        explained_by,
    )


def _judge(
    source: LogSource,
    finding: Finding,
    root: tuple[LogSource, Finding] | None,
    diagnosis: Diagnosis | None,
) -> tuple[str, str | None]:
    if not counts_as_failure(finding):
        survived = "training went on after it" if finding.is_survived else "below error level"
        return f"no failure: {survived}", None
    if root is None or diagnosis is None:
        return "a failure", None
    _, cause = root
    if finding is cause:
        return _CAUSE, None
    line = cause.line.strip()
    if finding.role > cause.role:
        return f"explained: a {finding.role.name.lower()} of the cause", line
    is_timed = finding.seen_s is not None and cause.seen_s is not None
    is_same_file = source.name == diagnosis.source
    if not is_timed and not is_same_file and diagnosis.has_rival:
        return "as likely: the logs do not show which came first", None
    return "explained: later than the cause, or of the same event", line
