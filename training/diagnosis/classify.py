"""The diagnosis of an attempt: the first cause in its evidence, not the loudest symptom.

`_Tier` ranks causes between processes, nodes and refusals: whom to blame. Within the output of
one process cause.py ranks the lines (`_standing`, `_detail`): which line shows the cause.

A rank that dies makes every other rank print errors within milliseconds. Causes are therefore
ordered by tier (a cause before an echo), then by time. Pure: evidence in, `Diagnosis` out; times
are seconds since the epoch.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import IntEnum

from perdure.training.diagnosis.cause import (
    DEVICE_FAULTS,
    MAX_RUNNERS_UP,
    Candidate,
    Diagnosis,
    LogSource,
    build_fault,
    rank_candidates,
)
from perdure.training.diagnosis.chip_reports import explains_stall, reported_faults
from perdure.training.diagnosis.ended_rank import blame_ended_rank
from perdure.training.diagnosis.ending import (
    PIPE_ADVICE,
    FalseSuccess,
    find_exit_codes,
    find_first_failed,
)
from perdure.training.diagnosis.evidence import Evidence, WorkerEnd
from perdure.training.diagnosis.exits import (
    ExitMeaning,
    describe_exit,
    explain_exit,
    signal_name,
    signal_of,
)
from perdure.training.diagnosis.hang import blame_silence
from perdure.training.diagnosis.lines import is_progress
from perdure.training.diagnosis.peers import compare_sources
from perdure.training.diagnosis.plain_fault import MAX_EVIDENCE_CHARS, build_plain_fault
from perdure.training.diagnosis.recognise import Finding
from perdure.training.diagnosis.rules import Role
from perdure.training.diagnosis.scan import scan_text
from perdure.training.diagnosis.small_world import blame_small_world
from perdure.training.diagnosis.worker_finding import choose_finding
from perdure.training.recovery.faults import (
    NODE_UNWRITABLE,
    SLOW_START,
    TRAITS,
    Fault,
    FaultClass,
    RecoverableBy,
)


class _Tier(IntEnum):
    NODE = 0  # a lost container explains all output and all ends of its peers
    ROOT = 1
    GIVEN_UP = 2  # known from outside alone: a line that names a cause is more precise
    OF_DEVICE = 3  # a symptom that may explain an exception of any rank
    UNNAMED = 4  # an exception that no table knows
    SYMPTOM = 5
    GIVEN_UP_FOR_PEERS = 6  # the ranks' own lines show which of them was missing
    CASCADE = 7
    UNEXPLAINED = 8
    ASKED = 9  # ended in good order for a fault elsewhere: explains nothing
    STOPPED = 10


_TIER_OF = {
    Role.ROOT: _Tier.ROOT,
    Role.SYMPTOM: _Tier.SYMPTOM,
    Role.CASCADE: _Tier.CASCADE,
    Role.HINT: _Tier.UNEXPLAINED,
}


def _tier_of(finding: Finding) -> _Tier:
    if finding.is_unnamed:
        return _Tier.UNNAMED
    is_of_device = finding.role is Role.SYMPTOM and finding.fault_class in DEVICE_FAULTS
    return _Tier.OF_DEVICE if is_of_device else _TIER_OF[finding.role]


# Faults in the output of ranks whose peer has ended.
_PEER_FAULTS = frozenset({FaultClass.COLLECTIVE_TIMEOUT, FaultClass.LINK_DOWN})

_BY_OUTPUT_ALONE = frozenset({FaultClass.USER_CODE_ERROR, FaultClass.UNKNOWN})


@dataclass(frozen=True, slots=True)
class _Cause:
    tier: _Tier
    fault: Fault


def diagnose(evidence: Evidence) -> Diagnosis:
    """Name the first cause. Total: evidence that shows nothing gives `unknown`."""
    causes = [
        *_blame_lost_nodes(evidence),
        *_blame_unwritable_nodes(evidence),
        *_blame_staging(evidence),
        *_blame_workers(evidence),
        *(_Cause(_Tier.ROOT, fault) for fault in blame_silence(evidence)),
        *_blame_outputs(evidence),
        *_blame_fault_given_up(evidence),
        *_blame_coordinator(evidence),
        *_blame_refusal(evidence),
        *_blame_slow_node(evidence),
        *(_Cause(_Tier.ROOT, fault) for fault in reported_faults(evidence)),
        *(_Cause(_Tier.NODE, fault) for fault in blame_small_world(evidence)),
    ]
    if not causes:
        return Diagnosis(build_plain_fault(FaultClass.UNKNOWN, evidence, "no evidence"))
    causes = _demote_stalls(_demote_receipts(causes), evidence)
    causes.sort(key=lambda cause: (cause.tier, cause.fault.at_s))
    left = blame_ended_rank(evidence, causes[0].fault)
    if left is not None:
        causes.insert(0, _Cause(_Tier.ROOT, left))
    best, further = replace(causes[0].fault, num_other_nodes=_count_other_nodes(causes)), []
    classes = {best.fault_class}
    for cause in causes[1:]:
        if cause.tier is not _Tier.STOPPED and cause.fault.fault_class not in classes:
            classes.add(cause.fault.fault_class)
            further.append(cause.fault)
    return Diagnosis(best, tuple(further[:MAX_RUNNERS_UP]))


def _demote_receipts(causes: Sequence[_Cause]) -> list[_Cause]:
    """Demote the ends of processes that got a signal, where another cause shows who sent it."""
    ends = [c for c in causes if c.fault.fault_class is FaultClass.PREEMPTED]
    receipts = [c for c in ends if c.fault.code in signal.Signals.__members__]
    if len(receipts) == len(ends):
        return list(causes)
    return [replace(c, tier=max(c.tier, _Tier.CASCADE)) if c in receipts else c for c in causes]


def _demote_stalls(causes: Sequence[_Cause], evidence: Evidence) -> list[_Cause]:
    """Demote a hang for which a chip is to blame."""
    of_devices = [c.fault for c in causes if c.tier in (_Tier.ROOT, _Tier.OF_DEVICE)]
    if not explains_stall(of_devices, evidence):
        return list(causes)
    hang = FaultClass.HANG
    return [replace(c, tier=_Tier.SYMPTOM) if c.fault.fault_class is hang else c for c in causes]


def _count_other_nodes(causes: Sequence[_Cause]) -> int:
    """Count the nodes, beside that of the first cause, that have the same cause."""
    first = causes[0]
    nodes = {
        cause.fault.node
        for cause in causes
        if cause.tier is first.tier and cause.fault.fault_class is first.fault.fault_class
    }
    return len(nodes - {first.fault.node, None})


def _blame_lost_nodes(evidence: Evidence) -> Iterator[_Cause]:
    explained = {loss.node for loss in evidence.losses}
    for loss in evidence.losses:
        line = f"{loss.node}: {loss.line}"
        fault = build_plain_fault(
            loss.fault_class, evidence, line, node=loss.node, code=loss.code, why=loss.why
        )
        yield _Cause(_Tier.NODE, fault)
    for node in evidence.lost_nodes:
        if node in explained:
            continue
        why = (
            "The first process of the container does not exist any more: the node went down, or "
            "the container was taken away."
        )
        line = f"the agent of {node} is gone"
        fault = build_plain_fault(
            FaultClass.NODE_LOST, evidence, line, node=node, code="NODE_LOST", why=why
        )
        yield _Cause(_Tier.NODE, fault)


def _blame_unwritable_nodes(evidence: Evidence) -> Iterator[_Cause]:
    """Blame nodes that take no files: the cause of a refused start, and of an unexplained end."""
    for node, why_not in (evidence.unwritable or {}).items():
        is_refused = evidence.refusal is not None or node in (evidence.staging_errors or {})
        why = "The scratch folder of the node takes no files, so no processes can start there."
        fault = build_plain_fault(
            FaultClass.STORAGE_ERROR,
            evidence,
            f"{node} takes no files: {why_not}",
            node=node,
            code=NODE_UNWRITABLE,
            why=why,
        )
        action = "Make room on that node, or have its folder mended; then start the run again."
        fault = replace(fault, action=action, recoverable_by=RecoverableBy.ISOLATE)
        yield _Cause(_Tier.ROOT if is_refused else _Tier.SYMPTOM, fault)


def _blame_staging(evidence: Evidence) -> Iterator[_Cause]:
    for node, error in (evidence.staging_errors or {}).items():
        why = (
            "The processes could not be started: the token shards or a secret of env_from could "
            "not be read, or the node's folders could not be written."
        )
        fault = build_plain_fault(FaultClass.STORAGE_ERROR, evidence, error, node=node, why=why)
        yield _Cause(_Tier.ROOT, fault)


def _blame_fault_given_up(evidence: Evidence) -> Iterator[_Cause]:
    """Blame the fault that the coordinator gave up on; no output shows a replaced process."""
    given_up = evidence.given_up
    # Only the output of its process shows the meaning of an exception.
    if given_up is None or given_up.fault.fault_class in _BY_OUTPUT_ALONE:
        return
    known_fault = given_up.fault
    why = (
        f"{TRAITS[known_fault.fault_class].meaning} Recovery inside the processes: {given_up.why}."
    )
    fault = build_plain_fault(known_fault.fault_class, evidence, known_fault.evidence, why=why)
    placed = replace(
        fault,
        at_s=known_fault.at_s,
        node=known_fault.node,
        rank=known_fault.rank,
        device=known_fault.device,
        code=known_fault.code,
        step=known_fault.step,
    )
    is_peers = known_fault.fault_class in _PEER_FAULTS
    yield _Cause(_Tier.GIVEN_UP_FOR_PEERS if is_peers else _Tier.GIVEN_UP, placed)


def _blame_coordinator(evidence: Evidence) -> Iterator[_Cause]:
    """Blame a coordinator that ended: every worker ends with it, and none is to blame."""
    lost = evidence.coordinator
    if lost is None:
        return
    number = signal_of(lost.exit_code)
    code = signal_name(number) if number is not None else None
    meaning = explain_exit(lost.exit_code, is_oom=lost.node in evidence.oom_nodes)
    fault_class = meaning.fault_class if meaning and number is not None else FaultClass.UNKNOWN
    how = f"by {code}" if code is not None else f"with exit code {lost.exit_code}: {lost.line}"
    how = f"was ended: {lost.line}" if lost.was_stopped else f"ended {how}"
    line = f"the coordinator of the attempt on {lost.node} {how}"
    why = f"{TRAITS[fault_class].meaning} Without their coordinator all ranks end."
    fault = build_plain_fault(fault_class, evidence, line, node=lost.node, code=code, why=why)
    is_explained = fault_class is FaultClass.UNKNOWN and lost.node in (evidence.unwritable or {})
    tier = _Tier.UNEXPLAINED if is_explained else _Tier.ROOT
    yield _Cause(tier, replace(fault, at_s=lost.ended_s))


def _blame_refusal(evidence: Evidence) -> Iterator[_Cause]:
    if evidence.refusal is not None:
        why = "The engine could not start the processes."
        code = SLOW_START if evidence.is_late_start else None
        fault = build_plain_fault(
            FaultClass.UNKNOWN, evidence, evidence.refusal, code=code, why=why
        )
        yield _Cause(_Tier.UNEXPLAINED, fault)


def _blame_slow_node(evidence: Evidence) -> Iterator[_Cause]:
    slow = evidence.slow
    if slow is not None:
        fault = build_plain_fault(
            FaultClass.FAIL_SLOW, evidence, slow.text, node=slow.node, rank=slow.rank
        )
        yield _Cause(_Tier.NODE, replace(fault, device=slow.device))


def _blame_outputs(evidence: Evidence) -> Iterator[_Cause]:
    """Blame findings of device logs and health commands; their clocks are not the agents'."""
    year = _year_of(evidence)
    sources = [
        LogSource(
            output.name,
            scan_text(output.text, year=year).findings,
            order,
            rank=output.rank,
            node=output.node,
            device=output.device,
        )
        for order, output in enumerate(evidence.outputs)
    ]
    for candidate in rank_candidates(sources):
        fault = build_fault(candidate, at_s=evidence.at_s, step=evidence.step)
        rank = candidate.source.rank
        named = replace(fault, at_s=evidence.at_s, node=candidate.source.node, rank=rank)
        yield _Cause(_tier_of(candidate.finding), named)


def _blame_workers(evidence: Evidence) -> Iterator[_Cause]:
    failed = [end for end in evidence.workers if end.has_failed]
    year = _year_of(evidence)
    logs = compare_sources(
        [
            LogSource(end.name, scan_text(end.log, year=year).findings, order, end.rank)
            for order, end in enumerate(failed)
        ]
    )
    for end, log in zip(failed, logs, strict=True):
        yield _blame_worker(end, choose_finding(end, log), evidence)


def _year_of(evidence: Evidence) -> int:
    return datetime.fromtimestamp(evidence.at_s, UTC).year


def _blame_worker(end: WorkerEnd, finding: Finding | None, evidence: Evidence) -> _Cause:
    if end.stopped:
        return _cause_of_end(_Tier.STOPPED, FaultClass.UNKNOWN, "stopped", end, evidence)
    if end.bad_end is not None:
        return _blame_false_success(end, end.bad_end, finding, evidence)
    requested = find_exit_codes(end.log, end.exit_code) & set(evidence.restart_codes)
    if requested:
        line = f"{end.name} asked with exit code {min(requested)} to be started again"
        return _cause_of_end(_Tier.SYMPTOM, FaultClass.RESTART_REQUESTED, line, end, evidence)
    return _blame_exit(end, finding, evidence)


def _blame_exit(end: WorkerEnd, finding: Finding | None, evidence: Evidence) -> _Cause:
    is_oom = end.node in evidence.oom_nodes
    meaning = explain_exit(end.exit_code, is_oom=is_oom, is_command=end.is_command)
    number = signal_of(end.exit_code)
    was_asked = meaning is not None and meaning.is_symptom
    is_preempted = finding is not None and finding.fault_class is FaultClass.PREEMPTED
    # Output tells more of a signal than the exit code: which rank got it, or who sent it.
    if finding is not None and is_preempted and (was_asked or finding.names_sender):
        return _blame_by_output(end, finding, evidence)
    if meaning is not None and number is None:
        code = f"{end.name} ended with exit code {end.exit_code}"
        line = finding.line if finding else f"{code}: {meaning.text}"
        tier = _Tier.ASKED if meaning.is_symptom else _Tier.ROOT
        return _cause_of_end(tier, meaning.fault_class, line, end, evidence, why=meaning.text)
    if meaning and number and (end.exit_code < 0 or finding is None or _is_guess(finding)):
        return _blame_signal(meaning, number, end, finding, evidence)
    if finding is None or finding.role is Role.HINT:
        return _blame_code(end, finding, evidence)
    return _blame_by_output(end, finding, evidence)


def _blame_code(end: WorkerEnd, hint: Finding | None, evidence: Evidence) -> _Cause:
    """Blame a worker that only its exit code speaks of: its last words are the context."""
    last = next((line.strip() for line in reversed(end.log.splitlines()) if line.strip()), "")
    words = end.error or (hint.line.strip() if hint else "" if is_progress(last) else last)
    how = describe_exit(end.exit_code)
    line = f"{end.name} ended with {how}{f', after: {words}' if words else ''}"
    why = f"The last line of its output was: {last}" if last and last != words else ""
    traits = TRAITS[FaultClass.UNKNOWN]
    return _cause_of_end(
        _Tier.UNEXPLAINED, FaultClass.UNKNOWN, line, end, evidence,
        why=f"{traits.meaning} {why}".strip(),
    )  # fmt: skip


def _blame_false_success(
    end: WorkerEnd, bad: FalseSuccess, finding: Finding | None, evidence: Evidence
) -> _Cause:
    """Blame a worker whose exit code reports success."""
    if bad.fault_class is not None:
        cause = _cause_of_end(
            _Tier.ROOT, bad.fault_class, bad.text, end, evidence, bad.code, bad.why
        )
        return replace(cause, fault=replace(cause.fault, action=bad.action or cause.fault.action))
    if finding is None or finding.role is Role.HINT:
        tier, fault_class = _Tier.UNEXPLAINED, FaultClass.UNKNOWN
        return _cause_of_end(tier, fault_class, bad.text, end, evidence, why=PIPE_ADVICE)
    cause = _blame_by_output(end, finding, evidence)
    explanation = f"{PIPE_ADVICE} {cause.fault.explanation}"
    return replace(cause, fault=replace(cause.fault, explanation=explanation))


def _is_guess(finding: Finding) -> bool:
    """Whether a finding infers from an exit a cause that the exit code itself shows."""
    return finding.role is not Role.ROOT and finding.fault_class is FaultClass.HOST_OOM


def _blame_by_output(end: WorkerEnd, finding: Finding, evidence: Evidence) -> _Cause:
    """Blame a worker whose output explains its end."""
    killed = _is_guess(finding)
    if killed and end.node not in evidence.oom_nodes:
        # Elsewhere a killed process means memory; here the kernel of the node killed none for it.
        name = signal.SIGKILL.name
        cause = _cause_of_end(
            _Tier.ROOT, FaultClass.NATIVE_CRASH, finding.line, end, evidence, name
        )
        rank = cause.fault.rank if cause.fault.rank is not None else finding.origin.rank
        return replace(cause, fault=replace(cause.fault, rank=rank))
    crashed = finding.fault_class is FaultClass.NATIVE_CRASH
    tier = _Tier.ROOT if killed or crashed else _tier_of(finding)
    candidate = Candidate(LogSource(end.name, (finding,), rank=end.rank, node=end.node), finding)
    fault = build_fault(candidate, at_s=end.ended_s, step=evidence.step)
    return _Cause(tier, _place_fault(fault, end))


def _blame_signal(
    meaning: ExitMeaning, number: int, end: WorkerEnd, finding: Finding | None, evidence: Evidence
) -> _Cause:
    name = signal_name(number) or f"SIG{number}"
    is_echo = finding is not None and finding.fault_class in _PEER_FAULTS
    if name == "SIGABRT" and finding and finding.role is not Role.ROOT and is_echo:
        # Communication libraries abort the process when a peer is gone.
        return _cause_of_end(
            _Tier.CASCADE, finding.fault_class, finding.line, end, evidence, name, finding.why
        )
    line = f"{end.name} ended by {name}"
    # Nothing of a crash: its own words follow from the code.
    is_killed = number == signal.SIGKILL and meaning.fault_class is FaultClass.NATIVE_CRASH
    why = "" if is_killed else meaning.text
    return _cause_of_end(_Tier.ROOT, meaning.fault_class, line, end, evidence, name, why)


def _cause_of_end(
    tier: _Tier,
    fault_class: FaultClass,
    line: str,
    end: WorkerEnd,
    evidence: Evidence,
    code: str | None = None,
    why: str = "",
) -> _Cause:
    fault = build_plain_fault(fault_class, evidence, line, code=code, why=why)
    return _Cause(tier, _place_fault(fault, end))


def _place_fault(fault: Fault, end: WorkerEnd) -> Fault:
    """Place a fault where and when its worker ended, with the path of the whole output."""
    more = f" Output of the rank: {end.log_path}" if end.log_path is not None else ""
    named = end.rank is not None or fault.rank is not None or end.stopped
    first = None if named else find_first_failed(end.log)
    if first is not None:
        fault = replace(fault, rank=first.rank, device=first.local_rank)
    return replace(
        fault,
        at_s=end.ended_s,
        evidence=fault.evidence[:MAX_EVIDENCE_CHARS],
        node=end.node,
        # The output of a command names its ranks, if it does.
        rank=end.rank if end.rank is not None else fault.rank,
        device=end.device if end.device is not None else fault.device,
        explanation=f"{fault.explanation}{more}".strip(),
    )
