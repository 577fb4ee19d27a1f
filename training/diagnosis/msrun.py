"""The workers of MindSpore's launcher: their ranks by their pids, and which of them were followers.

msrun names the process that ended first, not its rank; each process prints its own rank with its
pid. A worker that ends itself because another one is gone is no cause, and the scheduler's limit,
half a minute later, is none where msrun has reported an end.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from perdure.training.diagnosis.recognise import Finding
from perdure.training.diagnosis.rules import Role

_ENDED = "msrun-worker-end-"
_RAISED = "msrun-worker-end-failed"
_RANK_IDS = frozenset({"mindspore-rank-id", "msrun-worker-pid"})

_KILLS_ITSELF = "mindspore-kills-itself"
_TIMED_OUT = frozenset({"mindspore-node-timed-out", "mindspore-nodes-timed-out"})
_PRINTING_PID = re.compile(r"\] \w+\((\d+),|of msrun, process (\d+)$")
_ENDED_PID = re.compile(r"Worker process (\d+) exit")


def relate_workers(sources: Sequence[Sequence[Finding]]) -> list[list[Finding]]:
    """Add ranks to the ends that msrun reports, and demote the ends of followers.

    Args:
        sources: findings by file or process.
    """
    every = [finding for findings in sources for finding in findings]
    if not any(finding.rule.startswith(_ENDED) for finding in every):
        return [list(findings) for findings in sources]
    ranks = {
        pid: finding.origin.rank
        for finding in every
        if finding.rule in _RANK_IDS and (pid := _pid(_PRINTING_PID, finding)) is not None
    }
    followers = {_pid(_PRINTING_PID, f) for f in every if f.rule == _KILLS_ITSELF} - {None}
    ends = {_pid(_ENDED_PID, f) for f in every if f.rule.startswith(_ENDED)}
    echoes = _TIMED_OUT if ends - followers else frozenset[str]()
    return [_relate(findings, ranks, followers, echoes) for findings in sources]


def _relate(
    findings: Sequence[Finding],
    ranks: Mapping[int, int | None],
    followers: Collection[int | None],
    echoes: Collection[str],
) -> list[Finding]:
    raised = [ranks.get(_pid(_ENDED_PID, f) or 0) for f in findings if f.rule == _RAISED]
    related = []
    for finding in findings:
        rank, role = finding.origin.rank, finding.role
        if finding.rule.startswith(_ENDED):
            pid = _pid(_ENDED_PID, finding)
            rank = ranks.get(pid or 0)
            role = max(role, Role.CASCADE) if pid in followers else role
        elif finding.rule in echoes:
            role = max(role, Role.CASCADE)
        elif finding.role is Role.ROOT and rank is None and len(set(raised)) == 1:
            rank = raised[0]
        origin = replace(finding.origin, rank=rank)
        related.append(replace(finding, origin=origin, role=role))
    return related


def _pid(pattern: re.Pattern[str], finding: Finding) -> int | None:
    match = pattern.search(finding.line)
    return int(match[match.lastindex or 1]) if match is not None else None
