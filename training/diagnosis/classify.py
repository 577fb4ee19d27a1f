"""From what is left of an attempt to one fault: the first cause, not the loudest symptom.

A rank that dies makes every other rank print errors within milliseconds. Causes are therefore
ordered by role (a cause before an echo), then by time. Pure: evidence in, `Fault` out; times
are seconds since the epoch.
"""

from __future__ import annotations

import re
import signal
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache
from importlib import resources

from training.policy.faults import Fault, FaultClass

EXIT_DONE = 0
EXIT_USER = 2
EXIT_RESTART_ME = 75
EXIT_ABOVE_PROCESS = 76
SHELL_SIGNAL_BASE = 128  # a shell whose child was ended by signal n exits with 128 + n
_ABORT_RULE = "torchrun-abort"


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the rule table."""

    id: str
    pattern: re.Pattern[str]
    fault_class: FaultClass
    is_root: bool
    source: str
    example: str


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """How one worker ended.

    Attributes:
        exit_code: negative for a signal.
        error: last line of the exception it recorded, if it did.
        log: the end of its output.
        stopped: whether it was asked to stop before it ended.
        log_path: where its output is, on its node.
    """

    rank: int
    node: str
    device: int
    exit_code: int
    ended_s: float
    error: str | None = None
    log: str = ""
    stopped: bool = False
    log_path: str | None = None


@dataclass(frozen=True, slots=True)
class SilentRank:
    """A rank without progress beyond its limit."""

    rank: int
    node: str
    silent_s: float
    limit_s: float
    phase: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything known about the end of an attempt."""

    at_s: float
    step: int | None
    workers: Sequence[WorkerEnd] = ()
    lost_nodes: Sequence[str] = ()
    silent: Sequence[SilentRank] = ()
    staging_errors: Mapping[str, str] | None = None
    oom_nodes: Sequence[str] = ()
    refusal: str | None = None


class _Role(IntEnum):
    NODE = 0  # a container that is gone explains whatever its peers printed or died of
    ROOT = 1
    CASCADE = 2
    UNEXPLAINED = 3
    STOPPED = 4


@dataclass(frozen=True, slots=True)
class _Candidate:
    role: _Role
    fault: Fault


@cache
def load_rules() -> tuple[Rule, ...]:
    """The rule table, in order of precedence."""
    text = resources.files("training.diagnosis").joinpath("rules.toml").read_text("utf-8")
    return tuple(
        Rule(
            id=row["id"],
            pattern=re.compile(row["pattern"]),
            fault_class=FaultClass(row["class"]),
            is_root=row["role"] == "root",
            source=row["source"],
            example=row["example"],
        )
        for row in tomllib.loads(text)["rule"]
    )


def match_line(line: str) -> Rule | None:
    """The first rule that recognises a line."""
    return next((rule for rule in load_rules() if rule.pattern.search(line)), None)


def diagnose(evidence: Evidence) -> Fault:
    """Name the first cause. Total: evidence that says nothing gives `unknown`."""
    candidates = [
        *_lost_nodes(evidence),
        *_staging(evidence),
        *(_worker(end, evidence) for end in evidence.workers if end.exit_code != 0),
        *_silence(evidence),
        *_refusal(evidence),
    ]
    if not candidates:
        return Fault(FaultClass.UNKNOWN, evidence.at_s, "no evidence", step=evidence.step)
    return min(candidates, key=lambda c: (c.role, c.fault.at_s)).fault


def _lost_nodes(evidence: Evidence) -> Iterator[_Candidate]:
    for node in evidence.lost_nodes:
        yield _Candidate(
            _Role.NODE,
            Fault(
                FaultClass.NODE_LOST,
                evidence.at_s,
                f"the agent of {node} is gone",
                node=node,
                code="NODE_LOST",
                step=evidence.step,
                explanation="The first process of the container does not exist any more: the "
                "node went down, or the container was taken away.",
            ),
        )


def _staging(evidence: Evidence) -> Iterator[_Candidate]:
    for node, error in (evidence.staging_errors or {}).items():
        fault = Fault(
            FaultClass.STORAGE_ERROR,
            evidence.at_s,
            error,
            node=node,
            step=evidence.step,
            explanation="The processes could not be started: the token shards were not to be "
            "had, or the node's folders not to be written.",
        )
        yield _Candidate(_Role.ROOT, fault)


def _refusal(evidence: Evidence) -> Iterator[_Candidate]:
    if evidence.refusal is not None:
        fault = Fault(
            FaultClass.UNKNOWN,
            evidence.at_s,
            evidence.refusal,
            step=evidence.step,
            explanation="The engine could not start the processes.",
        )
        yield _Candidate(_Role.UNEXPLAINED, fault)


def _silence(evidence: Evidence) -> Iterator[_Candidate]:
    for rank in evidence.silent:
        fault = Fault(
            FaultClass.HANG,
            evidence.at_s,
            f"rank {rank.rank}: no progress for {rank.silent_s:.0f} s in phase {rank.phase}, "
            f"limit {rank.limit_s:.0f} s",
            node=rank.node,
            rank=rank.rank,
            step=evidence.step,
            explanation="The processes live but none of their heartbeats advances.",
        )
        yield _Candidate(_Role.ROOT, fault)


def _worker(end: WorkerEnd, evidence: Evidence) -> _Candidate:
    if end.stopped:
        return _candidate(_Role.STOPPED, FaultClass.UNKNOWN, "stopped", end, evidence)
    if end.exit_code < 0:
        return _signalled(end, evidence)
    if end.exit_code in _EXIT_CLASSES:
        fault_class, meaning = _EXIT_CLASSES[end.exit_code]
        found = _explained(end)
        line = found[1] if found else f"exit code {end.exit_code}: {meaning}"
        return _candidate(_Role.ROOT, fault_class, line, end, evidence, explanation=meaning)
    found = _explained(end)
    if found is None and _signal_name(end.exit_code - SHELL_SIGNAL_BASE) is not None:
        return _signalled(replace(end, exit_code=SHELL_SIGNAL_BASE - end.exit_code), evidence)
    if found is None:
        line = end.error or _last_line(end.log) or f"exit code {end.exit_code}"
        return _candidate(_Role.UNEXPLAINED, FaultClass.UNKNOWN, line, end, evidence)
    rule, line = found
    role = _Role.ROOT if rule.is_root else _Role.CASCADE
    return _candidate(role, rule.fault_class, line, end, evidence, explanation=rule.source)


_EXIT_CLASSES: Mapping[int, tuple[FaultClass, str]] = {
    EXIT_USER: (FaultClass.USER_CODE_ERROR, "the program says that its user must mend it"),
    EXIT_RESTART_ME: (FaultClass.UNKNOWN, "the worker saved its state and asks for a restart"),
    EXIT_ABOVE_PROCESS: (FaultClass.DEVICE_LOST, "the worker cannot go on in this container"),
    127: (FaultClass.LAUNCH_MISCONFIGURED, "the command was not found"),
}


def _signalled(end: WorkerEnd, evidence: Evidence) -> _Candidate:
    name = _signal_name(-end.exit_code) or f"SIG{-end.exit_code}"
    line = f"rank {end.rank} ended by {name}"
    if name == "SIGTERM":
        why = "Something outside asked the process to end."
        return _candidate(_Role.ROOT, FaultClass.PREEMPTED, line, end, evidence, name, why)
    if name == "SIGKILL" and end.node in evidence.oom_nodes:
        why = "The kernel's OOM killer was active on the node."
        return _candidate(_Role.ROOT, FaultClass.HOST_OOM, line, end, evidence, name, why)
    if name == "SIGABRT" and (found := _explained(end)) and not found[0].is_root:
        # Communication libraries abort the process when a peer is gone.
        rule, line = found
        return _candidate(_Role.CASCADE, rule.fault_class, line, end, evidence, name)
    why = "The process was ended by the operating system, not by an exception."
    return _candidate(_Role.ROOT, FaultClass.NATIVE_CRASH, line, end, evidence, name, why)


def _signal_name(number: int) -> str | None:
    # Real-time signals have numbers without names.
    return signal.Signals(number).name if number in set(signal.Signals) else None


def _explained(end: WorkerEnd) -> tuple[Rule, str] | None:
    """The rule and line that explain an exit: the recorded exception, else the output.

    The last lines of the output are nearest to the death, but a root cause anywhere in the
    output beats an echo after it.
    """
    if end.error and (rule := match_line(end.error)):
        return rule, end.error
    echo: tuple[Rule, str] | None = None
    abort: tuple[Rule, str] | None = None
    for line in reversed(end.log.splitlines()):
        rule = match_line(line)
        if rule is None:
            continue
        if rule.id == _ABORT_RULE:
            # Communication libraries abort the process when a peer is gone: they say so before.
            abort = abort or (rule, line.strip())
        elif rule.is_root:
            return rule, line.strip()
        else:
            echo = echo or (rule, line.strip())
    return echo or abort


def _candidate(
    role: _Role,
    fault_class: FaultClass,
    line: str,
    end: WorkerEnd,
    evidence: Evidence,
    code: str | None = None,
    explanation: str = "",
) -> _Candidate:
    if end.log_path is not None:
        explanation = f"{explanation} Output of the rank: {end.log_path}".strip()
    fault = Fault(
        fault_class,
        end.ended_s,
        line[:500],
        node=end.node,
        rank=end.rank,
        device=end.device,
        code=code,
        step=evidence.step,
        explanation=explanation,
    )
    return _Candidate(role, fault)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
