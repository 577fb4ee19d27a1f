"""The finding that explains how one worker ended: the exception that it recorded, or its output."""

from __future__ import annotations

from perdure.training.diagnosis.cause import LogSource, follows_evidence, rank_candidates
from perdure.training.diagnosis.evidence import WorkerEnd
from perdure.training.diagnosis.recognise import Finding, recognise
from perdure.training.diagnosis.rules import Role
from perdure.training.diagnosis.scan import CONTEXT_SIZE_BYTES

_TRACED = "Traceback (most recent call last)"


def choose_finding(end: WorkerEnd, log: LogSource) -> Finding | None:
    """Choose the finding that explains an exit: the recorded exception, else the output."""
    if end.bad_end is not None and end.bad_end.fault_class is not None:
        return None  # nothing has crashed: the program survived the errors in its output
    ranked = rank_candidates([log], has_failed=True)
    best = ranked[0].finding if ranked else None
    raised = _read_recorded_exception(end, log)
    if raised is None or best is None:
        return raised or best
    # torch_npu raises "The Inner error is reported as above": the output has the error itself.
    if raised.role > Role.SYMPTOM and best.role < raised.role:
        return best
    # Only the output can explain an exception that no table knows.
    return raised if not raised.is_unnamed or best.role > Role.SYMPTOM else best


def _read_recorded_exception(end: WorkerEnd, log: LogSource) -> Finding | None:
    """Read the exception that the worker recorded, with the traceback in its output."""
    if not end.error:
        return None
    printed = [
        finding for finding in log.findings if finding.line.strip().endswith(end.error.strip())
    ]
    if printed and printed[-1].replaces and printed[-1].role > Role.SYMPTOM:
        return None  # a mistake in the handling of a fault, which the output names
    if printed and follows_evidence(printed[-1], log.findings):
        return None
    place = end.log.rfind(end.error)
    context = end.log[max(0, place - CONTEXT_SIZE_BYTES) : place] if place >= 0 else _TRACED
    return recognise(end.error, context if _TRACED in context else _TRACED)
