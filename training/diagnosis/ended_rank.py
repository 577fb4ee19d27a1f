"""A rank that left with exit code 0, as the first cause of its peers' errors and hangs.

Its peers miss it within milliseconds, or wait for it. torchrun lists the ranks of its node that
failed; one that it does not list has exited with 0. Pure; times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from perdure.training.diagnosis.ending import (
    RANK_CODE,
    RANK_WHY,
    find_failed_ranks,
    judge_signal,
)
from perdure.training.diagnosis.evidence import EndedRank, Evidence, WorkerEnd
from perdure.training.diagnosis.stated_end import EndReason, find_stated_end
from perdure.training.recovery.faults import TRAITS, Fault, FaultClass

# Faults that ranks show, too, when a peer has left.
_OF_MISSING_PEER = frozenset(
    {FaultClass.COLLECTIVE_TIMEOUT, FaultClass.LINK_DOWN, FaultClass.HANG, FaultClass.UNKNOWN}
)
_LATE_S = 6.0  # a rank that left is noticed by the next poll of its node


def blame_ended_rank(evidence: Evidence, fault: Fault) -> Fault | None:
    """Blame a rank that left before the others, where they miss a peer; None: none is to blame.

    Args:
        evidence: of the end of the attempt.
        fault: its first cause, as far as the others show it.
    """
    if fault.fault_class not in _OF_MISSING_PEER or any(r.stopped for r in evidence.silent):
        return None
    unlisted = [rank for rank in evidence.ended_ranks if not _is_listed(rank, evidence.workers)]
    limit_s = fault.at_s + _LATE_S
    early = [rank for rank in unlisted if rank.ended_s is None or rank.ended_s <= limit_s]
    if not early:
        return None
    first = min(early, key=lambda rank: (rank.ended_s is None, rank.ended_s or 0.0))
    logs = "\n".join(end.log for end in evidence.workers if end.node == first.node)
    stated = find_stated_end(logs, is_short=True)
    at_s = min(first.ended_s or fault.at_s, fault.at_s)
    if stated is not None and stated.reason is EndReason.SIGNAL:
        signal = judge_signal(f"{first.line}: {stated.line}")
        return _build_fault(FaultClass.PREEMPTED, signal.text, signal.why, at_s, evidence, first)
    fault = _build_fault(FaultClass.UNKNOWN, first.line, RANK_WHY, at_s, evidence, first)
    return replace(fault, code=RANK_CODE)


def _build_fault(
    fault_class: FaultClass, line: str, why: str, at_s: float, evidence: Evidence, rank: EndedRank
) -> Fault:
    """Build the fault of a rank; no node is in it, for the rank is to blame wherever it runs."""
    traits = TRAITS[fault_class]
    return Fault(
        fault_class,
        at_s,
        line,
        rank=rank.rank,
        step=evidence.step,
        explanation=why,
        action=traits.action,
        recoverable_by=traits.recoverable_by,
        user_fault=traits.user_fault,
        hardware_fault=traits.hardware_fault,
    )


def _is_listed(rank: EndedRank, workers: Sequence[WorkerEnd]) -> bool:
    """Whether the launcher of a rank lists it among those that failed, or lists none at all."""
    if rank.rank is None:
        return False
    logs = [end.log for end in workers if end.node == rank.node and end.rank is None]
    listed = [find_failed_ranks(log) for log in logs]
    if not any(listed):
        # A rank with a process of its own needs no launcher to say how it ended.
        return bool(logs) and rank.ended_s is None
    return any(rank.rank in ranks for ranks in listed)
