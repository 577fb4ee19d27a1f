"""A fault that no line of output names, with the traits of its class. Pure."""

from __future__ import annotations

import signal

from perdure.training.diagnosis.evidence import Evidence
from perdure.training.diagnosis.exits import KILLED_ACTION, KILLED_WHY
from perdure.training.recovery.faults import TRAITS, Fault, FaultClass

MAX_EVIDENCE_CHARS = 500
_FROM_OUTSIDE = frozenset({FaultClass.NODE_LOST, FaultClass.FAIL_SLOW})


def build_plain_fault(
    fault_class: FaultClass,
    evidence: Evidence,
    line: str,
    *,
    node: str | None = None,
    rank: int | None = None,
    code: str | None = None,
    why: str = "",
) -> Fault:
    """Build a fault that no line of output names, with the traits of its class."""
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
        # Silence and slowness alone show no broken machine: the network, the platform or a person
        # may be behind them.
        hardware_fault=traits.hardware_fault and fault_class not in _FROM_OUTSIDE,
    )
