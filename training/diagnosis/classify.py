"""From what is left of an attempt to one fault: the first cause, not the loudest symptom.

A rank that dies makes every other rank print errors within milliseconds. Causes are therefore
ordered by role (a cause before an echo), then by time. Pure: evidence in, `Diagnosis` out; times
are seconds since the epoch.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import IntEnum

from perdure.training.diagnosis.cause import (
    MAX_RUNNERS_UP,
    OF_DEVICES,
    Candidate,
    Diagnosis,
    LogSource,
    fault_of,
    is_unnamed,
    rank_candidates,
)
from perdure.training.diagnosis.ending import PIPE_ADVICE, SHORT_CODE, FalseSuccess, first_failed
from perdure.training.diagnosis.evidence import Evidence, WorkerEnd
from perdure.training.diagnosis.exits import (
    KILLED_ACTION,
    KILLED_WHY,
    ExitMeaning,
    meaning_of,
    signal_name,
    signal_of,
)
from perdure.training.diagnosis.peers import compare
from perdure.training.diagnosis.recognise import Finding, recognise
from perdure.training.diagnosis.rules import Role
from perdure.training.diagnosis.scan import CONTEXT_SIZE_BYTES, scan_text
from perdure.training.liveness.culprit import find_standstill
from perdure.training.recovery.faults import TRAITS, Fault, FaultClass

MAX_EVIDENCE_CHARS = 500
_TRACED = "Traceback (most recent call last)"


class _Tier(IntEnum):
    NODE = 0  # a container that is gone explains whatever its peers printed or died of
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
    if is_unnamed(finding):
        return _Tier.UNNAMED
    is_of_device = finding.role is Role.SYMPTOM and finding.fault_class in OF_DEVICES
    return _Tier.OF_DEVICE if is_of_device else _TIER_OF[finding.role]


# What ranks print whose peer is gone.
_OF_PEERS = frozenset({FaultClass.COLLECTIVE_TIMEOUT, FaultClass.LINK_DOWN})

_BY_OUTPUT_ALONE = frozenset({FaultClass.USER_CODE_ERROR, FaultClass.UNKNOWN})


@dataclass(frozen=True, slots=True)
class _Cause:
    tier: _Tier
    fault: Fault


def diagnose(evidence: Evidence) -> Diagnosis:
    """Name the first cause. Total: evidence that shows nothing gives `unknown`."""
    causes = [
        *_lost_nodes(evidence),
        *_staging(evidence),
        *_workers(evidence),
        *_silence(evidence),
        *_outputs(evidence),
        *_given_up(evidence),
        *_coordinator(evidence),
        *_refusal(evidence),
        *_slowness(evidence),
    ]
    if not causes:
        return Diagnosis(_fault(FaultClass.UNKNOWN, evidence, "no evidence"))
    causes.sort(key=lambda cause: (cause.tier, cause.fault.at_s))
    best, further = replace(causes[0].fault, num_other_nodes=_num_other_nodes(causes)), []
    seen = {best.fault_class}
    for cause in causes[1:]:
        if cause.tier is not _Tier.STOPPED and cause.fault.fault_class not in seen:
            seen.add(cause.fault.fault_class)
            further.append(cause.fault)
    return Diagnosis(best, tuple(further[:MAX_RUNNERS_UP]))


def _num_other_nodes(causes: Sequence[_Cause]) -> int:
    """On how many nodes beside that of the first cause the same is the cause."""
    first = causes[0]
    nodes = {
        cause.fault.node
        for cause in causes
        if cause.tier is first.tier and cause.fault.fault_class is first.fault.fault_class
    }
    return len(nodes - {first.fault.node, None})


def _fault(
    fault_class: FaultClass,
    evidence: Evidence,
    line: str,
    *,
    node: str | None = None,
    rank: int | None = None,
    code: str | None = None,
    why: str = "",
) -> Fault:
    """A fault that no line of output names, with its class's traits."""
    traits = TRAITS[fault_class]
    is_killed = fault_class is FaultClass.NATIVE_CRASH and code == signal.SIGKILL.name
    return Fault(
        fault_class,
        evidence.at_s,
        line[:MAX_EVIDENCE_CHARS],
        node=node,
        rank=rank,
        code=code,
        step=evidence.step,
        explanation=why or (KILLED_WHY if is_killed else traits.meaning),
        action=KILLED_ACTION if is_killed else traits.action,
        recoverable_by=traits.recoverable_by,
        user_fault=traits.user_fault,
        hardware_fault=traits.hardware_fault,
    )


def _lost_nodes(evidence: Evidence) -> Iterator[_Cause]:
    known = {loss.node for loss in evidence.losses}
    for loss in evidence.losses:
        line = f"{loss.node}: {loss.line}"
        fault = _fault(
            loss.fault_class, evidence, line, node=loss.node, code=loss.code, why=loss.why
        )
        yield _Cause(_Tier.NODE, fault)
    for node in evidence.lost_nodes:
        if node in known:
            continue
        why = (
            "The first process of the container does not exist any more: the node went down, or "
            "the container was taken away."
        )
        line = f"the agent of {node} is gone"
        fault = _fault(FaultClass.NODE_LOST, evidence, line, node=node, code="NODE_LOST", why=why)
        yield _Cause(_Tier.NODE, fault)


def _staging(evidence: Evidence) -> Iterator[_Cause]:
    for node, error in (evidence.staging_errors or {}).items():
        why = (
            "The processes could not be started: the token shards or a secret of env_from could "
            "not be read, or the node's folders could not be written."
        )
        fault = _fault(FaultClass.STORAGE_ERROR, evidence, error, node=node, why=why)
        yield _Cause(_Tier.ROOT, fault)


def _given_up(evidence: Evidence) -> Iterator[_Cause]:
    """What the coordinator knew: the end of a process that was replaced shows nowhere else."""
    given_up = evidence.given_up
    # What an exception means is known by the output of its process alone.
    if given_up is None or given_up.fault.fault_class in _BY_OUTPUT_ALONE:
        return
    known = given_up.fault
    why = f"{TRAITS[known.fault_class].meaning} Recovery inside the processes: {given_up.why}."
    fault = _fault(known.fault_class, evidence, known.evidence, why=why)
    placed = replace(
        fault,
        at_s=known.at_s,
        node=known.node,
        rank=known.rank,
        device=known.device,
        code=known.code,
        step=known.step,
    )
    is_peers = known.fault_class in _OF_PEERS
    yield _Cause(_Tier.GIVEN_UP_FOR_PEERS if is_peers else _Tier.GIVEN_UP, placed)


def _coordinator(evidence: Evidence) -> Iterator[_Cause]:
    """Every worker ends with its coordinator: none of them is to blame."""
    lost = evidence.coordinator
    if lost is None:
        return
    number = signal_of(lost.exit_code)
    code = signal_name(number) if number is not None else None
    meaning = meaning_of(lost.exit_code, is_oom=lost.node in evidence.oom_nodes)
    fault_class = meaning.fault_class if meaning and number is not None else FaultClass.UNKNOWN
    how = f"by {code}" if code is not None else f"with exit code {lost.exit_code}: {lost.line}"
    how = f"was ended: {lost.line}" if lost.was_stopped else f"ended {how}"
    line = f"the coordinator of the attempt on {lost.node} {how}"
    why = f"{TRAITS[fault_class].meaning} Without their coordinator all ranks end."
    fault = _fault(fault_class, evidence, line, node=lost.node, code=code, why=why)
    yield _Cause(_Tier.ROOT, replace(fault, at_s=lost.ended_s))


def _refusal(evidence: Evidence) -> Iterator[_Cause]:
    if evidence.refusal is not None:
        why = "The engine could not start the processes."
        fault = _fault(FaultClass.UNKNOWN, evidence, evidence.refusal, why=why)
        yield _Cause(_Tier.UNEXPLAINED, fault)


def _slowness(evidence: Evidence) -> Iterator[_Cause]:
    slow = evidence.slow
    if slow is not None:
        fault = _fault(FaultClass.FAIL_SLOW, evidence, slow.text, node=slow.node, rank=slow.rank)
        yield _Cause(_Tier.NODE, replace(fault, device=slow.device))


def _silence(evidence: Evidence) -> Iterator[_Cause]:
    found = find_standstill(evidence.rank_progress) if evidence.silent else None
    if found is not None and found.missing:
        first = found.missing[0]
        why = f"The processes live but make no progress. {'; '.join(found.ranks)}."
        fault = _fault(
            FaultClass.HANG, evidence, found.line, node=first.node, rank=first.rank, why=why
        )
        # Of a command the step of all may be known, and that of this rank not.
        step = first.step if first.step >= 0 else evidence.step
        yield _Cause(_Tier.ROOT, replace(fault, device=first.device, step=step))
        return
    # One whose process a signal has stopped holds the others up.
    for rank in sorted(evidence.silent, key=lambda one: not one.stopped):
        why = "The processes live but none of their heartbeats advances."
        if rank.rank is None:
            why = "The program shows no sign of life."
        if found is not None:
            why = f"The processes live but make no progress. {found.line}."
        fault = _fault(
            FaultClass.HANG, evidence, rank.line, node=rank.node, rank=rank.rank, why=why
        )
        yield _Cause(_Tier.ROOT, fault)


def _outputs(evidence: Evidence) -> Iterator[_Cause]:
    """Device logs and the output of health commands; their clocks are not the agents'."""
    year = _year(evidence)
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
        fault = fault_of(candidate, at_s=evidence.at_s, step=evidence.step)
        rank = candidate.source.rank
        named = replace(fault, at_s=evidence.at_s, node=candidate.source.node, rank=rank)
        yield _Cause(_tier_of(candidate.finding), named)


def _workers(evidence: Evidence) -> Iterator[_Cause]:
    failed = [end for end in evidence.workers if end.has_failed]
    year = _year(evidence)
    logs = compare(
        [
            LogSource(end.name, scan_text(end.log, year=year).findings, order, end.rank)
            for order, end in enumerate(failed)
        ]
    )
    for end, log in zip(failed, logs, strict=True):
        yield _worker(end, _explained(end, log), evidence)


def _year(evidence: Evidence) -> int:
    return datetime.fromtimestamp(evidence.at_s, UTC).year


def _explained(end: WorkerEnd, log: LogSource) -> Finding | None:
    """The finding that explains an exit: the recorded exception, else the output."""
    if end.bad_end is not None and end.bad_end.fault_class is not None:
        return None  # nothing has crashed: what the output holds was survived
    ranked = rank_candidates([log], has_failed=True)
    best = ranked[0].finding if ranked else None
    raised = _recorded(end, log)
    if raised is None or best is None:
        return raised or best
    # torch_npu raises "The Inner error is reported as above": what it was is in the output.
    if raised.role > Role.SYMPTOM and best.role < raised.role:
        return best
    # The output explains an exception that no table knows, if anything does.
    return raised if not is_unnamed(raised) or best.role > Role.SYMPTOM else best


def _recorded(end: WorkerEnd, log: LogSource) -> Finding | None:
    """The exception that the worker recorded, with the traceback that its output has of it."""
    if not end.error:
        return None
    printed = [one for one in log.findings if one.line.strip().endswith(end.error.strip())]
    if printed and printed[-1].replaces and printed[-1].role > Role.SYMPTOM:
        return None  # a mistake in the handling of a fault, which the output names
    place = end.log.rfind(end.error)
    before = end.log[max(0, place - CONTEXT_SIZE_BYTES) : place] if place >= 0 else _TRACED
    return recognise(end.error, before if _TRACED in before else _TRACED)


def _worker(end: WorkerEnd, found: Finding | None, evidence: Evidence) -> _Cause:
    if end.stopped:
        return _ended(_Tier.STOPPED, FaultClass.UNKNOWN, "stopped", end, evidence)
    if end.bad_end is not None:
        return _not_well(end, end.bad_end, found, evidence)
    meaning = meaning_of(end.exit_code, is_oom=end.node in evidence.oom_nodes)
    number = signal_of(end.exit_code)
    if meaning is not None and number is None:
        line = found.line if found else f"exit code {end.exit_code}: {meaning.text}"
        tier = _Tier.ASKED if meaning.is_symptom else _Tier.ROOT
        return _ended(tier, meaning.fault_class, line, end, evidence, why=meaning.text)
    if meaning and number and (end.exit_code < 0 or found is None or _only_guesses(found)):
        return _signalled(meaning, number, end, found, evidence)
    if found is None or found.role is Role.HINT:
        lines = [line.strip() for line in end.log.splitlines() if line.strip()]
        line = end.error or (found.line if found else next(reversed(lines), ""))
        line = line or f"exit code {end.exit_code}"
        return _ended(_Tier.UNEXPLAINED, FaultClass.UNKNOWN, line, end, evidence)
    return _explained_by_output(end, found, evidence)


def _not_well(
    end: WorkerEnd, bad: FalseSuccess, found: Finding | None, evidence: Evidence
) -> _Cause:
    """A worker whose exit code says that nothing is wrong."""
    if bad.fault_class is FaultClass.UNKNOWN:
        why = "The command ended without an error before its target."
        return _ended(_Tier.ROOT, FaultClass.UNKNOWN, bad.text, end, evidence, SHORT_CODE, why)
    if bad.fault_class is not None:
        cause = _ended(_Tier.ROOT, bad.fault_class, bad.text, end, evidence, why=bad.why)
        return replace(cause, fault=replace(cause.fault, action=bad.action or cause.fault.action))
    if found is None or found.role is Role.HINT:
        tier, fault_class = _Tier.UNEXPLAINED, FaultClass.UNKNOWN
        return _ended(tier, fault_class, bad.text, end, evidence, why=PIPE_ADVICE)
    cause = _explained_by_output(end, found, evidence)
    explanation = f"{PIPE_ADVICE} {cause.fault.explanation}"
    return replace(cause, fault=replace(cause.fault, explanation=explanation))


def _only_guesses(found: Finding) -> bool:
    """Whether a finding infers from an exit what the exit code itself shows."""
    return found.role is not Role.ROOT and found.fault_class is FaultClass.HOST_OOM


def _explained_by_output(end: WorkerEnd, found: Finding, evidence: Evidence) -> _Cause:
    """A worker whose end its output explains."""
    killed = _only_guesses(found)
    if killed and end.node not in evidence.oom_nodes:
        # Elsewhere a killed process means memory; here the kernel of the node killed none for it.
        name = signal.SIGKILL.name
        return _ended(_Tier.ROOT, FaultClass.NATIVE_CRASH, found.line, end, evidence, name)
    crashed = found.fault_class is FaultClass.NATIVE_CRASH
    tier = _Tier.ROOT if killed or crashed else _tier_of(found)
    candidate = Candidate(LogSource(end.name, (found,), rank=end.rank, node=end.node), found)
    fault = fault_of(candidate, at_s=end.ended_s, step=evidence.step)
    return _Cause(tier, _placed(fault, end))


def _signalled(
    meaning: ExitMeaning, number: int, end: WorkerEnd, found: Finding | None, evidence: Evidence
) -> _Cause:
    name = signal_name(number) or f"SIG{number}"
    is_echo = found is not None and found.fault_class in _OF_PEERS
    if name == "SIGABRT" and found and found.role is not Role.ROOT and is_echo:
        # Communication libraries abort the process when a peer is gone.
        return _ended(_Tier.CASCADE, found.fault_class, found.line, end, evidence, name, found.why)
    line = f"{end.name} ended by {name}"
    # Nothing of a crash: its own words follow from the code.
    is_killed = number == signal.SIGKILL and meaning.fault_class is FaultClass.NATIVE_CRASH
    why = "" if is_killed else meaning.text
    return _ended(_Tier.ROOT, meaning.fault_class, line, end, evidence, name, why)


def _ended(
    tier: _Tier,
    fault_class: FaultClass,
    line: str,
    end: WorkerEnd,
    evidence: Evidence,
    code: str | None = None,
    why: str = "",
) -> _Cause:
    fault = _fault(fault_class, evidence, line, code=code, why=why)
    return _Cause(tier, _placed(fault, end))


def _placed(fault: Fault, end: WorkerEnd) -> Fault:
    """A fault where and when its worker ended, with the way to the whole output."""
    more = f" Output of the rank: {end.log_path}" if end.log_path is not None else ""
    named = end.rank is not None or fault.rank is not None or end.stopped
    first = None if named else first_failed(end.log)
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
