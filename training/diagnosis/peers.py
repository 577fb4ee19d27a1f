"""Comparison of several ranks' output: facts that no single output shows.

When every rank prints the same timeout, the reports differ in the facts that matter: the operator
of a rank, its progress, and the rank that wrote nothing at all. The merge of clocks relies on
steps: ranks of a synchronous training finish a step together, so lines about the same step have
the same time, or a clock is off. Times and offsets are seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from perdure.training.diagnosis.cause import LogSource
from perdure.training.diagnosis.lines import time_of
from perdure.training.diagnosis.recognise import Finding
from perdure.training.diagnosis.rules import Role
from perdure.training.recovery.faults import FaultClass, RecoverableBy

# HCCL: tag[AllReduce_<group>], then on a later line of the same report rankId[0], index[21]
_HCCL_OP = re.compile(
    r"\[TaskExecStage\].{0,80}base information is .{0,80}tag\[([A-Za-z]+)_([^\]]+)\]"
)
_MIN_REPORTING = 2  # the log of a single rank shows nothing about the others
_HCCL_PROCESS = re.compile(r"\bHCCL\((\d+),")
_NCCL_OP = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+)"
)
# Ranks number the collectives of each group: [PG ID 1 PG GUID 3(TP) Rank 5], [PG 3 Rank 5]
_NCCL_GROUP = re.compile(r"\[PG (?:ID \d+ PG GUID )?(.{1,80}?) Rank \d+\]")
_NCCL_LAST = re.compile(r"last enqueued NCCL work: (-?\d+), last completed NCCL work: (-?\d+)")
_MIN_COMMON_STEPS = 2
MAX_ANCHORS = 500
MAX_LINES = 2000
# Ranks of one node print the same step this far apart without any clock being wrong.
_TOLERATED_S = 1.0
_STEP = re.compile(r"\b(?:iteration|[sS]tep|global_step)['\"]?[\s=:\[]{1,4}(\d{1,15})\b")


@dataclass(frozen=True, slots=True)
class _Report:
    """A rank's report of the collective in which it was stuck."""

    source: int
    finding: Finding
    op: str
    group: str

    @property
    def reporter(self) -> tuple[int, int | None, str | None]:
        """The source, and the rank or process within it that reports."""
        process = _HCCL_PROCESS.search(self.finding.line)
        return self.source, self.finding.origin.rank, process[1] if process else None


def compare_sources(sources: Sequence[LogSource]) -> list[LogSource]:
    """Add the findings that only a comparison of the sources shows."""
    reports = list(_find_reports(sources))
    extra: dict[int, list[Finding]] = {}
    if pair := _find_other_operator(reports):
        first, odd = pair
        extra.setdefault(odd.source, []).append(
            replace(
                odd.finding,
                rule="peers-in-different-collectives",
                fault_class=FaultClass.LAUNCH_MISCONFIGURED,
                role=Role.ROOT,
                recoverable_by=RecoverableBy.USER_FIX,
                why=f"The ranks of one group were in different collectives: {first.op} and "
                f"{odd.op}. The program's ranks do not take the same path.",
                action="Make every rank of the group call the same collectives in the same order.",
            )
        )
    compared = [
        replace(source, findings=[*source.findings, *extra.get(index, ())])
        for index, source in enumerate(sources)
    ]
    return _name_missing_ranks(compared)


def _name_missing_ranks(sources: Sequence[LogSource]) -> list[LogSource]:
    """Add to timeouts the rank that reported none, or that lagged behind, if one shows."""
    waits = [f for s in sources for f in s.findings if _is_wait(f)]
    ranks = {s.rank for s in sources if s.rank is not None} | {
        f.origin.rank for f in waits if f.origin.rank is not None
    }
    missing = find_missing_ranks(sources, max(ranks) + 1) if ranks else ()
    slow = find_laggard(f for s in sources for f in s.findings)
    if missing:
        listed = ", ".join(map(str, missing[:8]))
        hint = f"All but rank {listed} report the wait: look there first."
    elif slow is not None and slow.origin.rank is not None:
        missing = (slow.origin.rank,)
        hint = f"Rank {slow.origin.rank} had begun the fewest collectives: look there first."
    else:
        return list(sources)
    rank = missing[0] if len(missing) == 1 else None
    return [
        replace(s, findings=[_add_hint(f, rank, hint) if _is_wait(f) else f for f in s.findings])
        for s in sources
    ]


def _is_wait(finding: Finding) -> bool:
    return finding.fault_class is FaultClass.COLLECTIVE_TIMEOUT and finding.role is not Role.ROOT


def _add_hint(finding: Finding, rank: int | None, hint: str) -> Finding:
    origin = finding.origin if rank is None else replace(finding.origin, rank=rank)
    return replace(finding, origin=origin, why=f"{finding.why} {hint}".strip())


def _find_reports(sources: Sequence[LogSource]) -> Iterable[_Report]:
    for index, source in enumerate(sources):
        for finding in source.findings:
            if match := _HCCL_OP.search(finding.line):
                yield _Report(index, finding, match[1], match[2])
            elif match := _NCCL_OP.search(finding.line):
                group = _NCCL_GROUP.search(finding.line)
                number = f"{group[1] if group else ''} {match[1]}"
                yield _Report(index, finding, match[2], number)


def _find_other_operator(reports: Sequence[_Report]) -> tuple[_Report, _Report] | None:
    """Find the first report whose operator differs from another rank's of the group."""
    first_of_group: dict[str, _Report] = {}
    for report in reports:
        first = first_of_group.setdefault(report.group, report)
        if first.op != report.op and first.reporter != report.reporter:
            return first, report
    return None


def find_missing_ranks(sources: Sequence[LogSource], world_size: int) -> tuple[int, ...]:
    """Find ranks that reported no timeout while at least half of the ranks did."""
    reporting = {
        rank
        for source in sources
        for finding in source.findings
        if finding.fault_class is FaultClass.COLLECTIVE_TIMEOUT
        for rank in [finding.origin.rank if finding.origin.rank is not None else source.rank]
        if rank is not None
    }
    missing = tuple(sorted(set(range(world_size)) - reporting))
    is_clear = len(reporting) >= _MIN_REPORTING and 0 < len(missing) <= world_size // 2
    return missing if is_clear else ()


def find_laggard(findings: Iterable[Finding]) -> Finding | None:
    """Find the report of the rank with the fewest enqueued NCCL collectives, if they differ."""
    counts = [(int(m[1]), f) for f in findings if (m := _NCCL_LAST.search(f.line))]
    if len({number for number, _ in counts}) < 2:
        return None
    return min(counts, key=lambda pair: pair[0])[1]


def find_step_times(text: str, *, year: int) -> dict[int, float]:
    """Find the first time of each of the newest steps in a text, by step."""
    times_s: dict[int, float] = {}
    for line in text.splitlines()[-MAX_LINES:]:
        step = _STEP.search(line)
        stamp = time_of(line, year=year) if step is not None else None
        if step is not None and stamp is not None:
            times_s.setdefault(int(step[1]), stamp)
    newest = sorted(times_s)[-MAX_ANCHORS:]
    return {step: times_s[step] for step in newest}


def clock_offsets(sources: Sequence[Mapping[int, float]]) -> list[float]:
    """Compute the seconds that turn the times of each source into those of the reference.

    The reference is the first source with the most steps. A source that shares too few steps
    with it, or differs from it no more than ranks do by themselves, keeps its own time.
    """
    if not sources:
        return []
    reference = max(sources, key=len)
    return [_clock_offset(reference, steps) for steps in sources]


def _clock_offset(reference: Mapping[int, float], steps: Mapping[int, float]) -> float:
    common = reference.keys() & steps.keys()
    if len(common) < _MIN_COMMON_STEPS:
        return 0.0
    difference = median(reference[step] - steps[step] for step in common)
    return difference if abs(difference) > _TOLERATED_S else 0.0
