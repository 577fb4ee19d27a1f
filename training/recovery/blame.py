"""Blame: whether a fault is its chip's, its node's or the program's.

The fault itself says so, or the history of its chip and of its node. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure.training.recovery.chips import (
    SEPARATED,
    ChipAnswer,
    Severity,
    chip_answer,
    escalated,
    times_in_a_row,
)
from perdure.training.recovery.faults import TRAITS, USER_CAUSED_CODES, Fault, FaultClass
from perdure.training.recovery.node_suspicion import COUNTED, why_node_is_suspect
from perdure.training.recovery.rungs import ISOLATES, Policy, Recovery, Rung

# ModelArts: one code of one chip, in a row.
SAME_CODE_TIMES = 3
SAME_CODE_WINDOW_S = 86400.0


def answer_of(fault: Fault) -> ChipAnswer | None:
    """What the event of a chip asks for; None where no chip reported one."""
    severity = severity_of(fault)
    if fault.chip_code is None and severity is None:
        return None
    return chip_answer(fault.chip_code, severity)


def severity_of(fault: Fault) -> Severity | None:
    """Return the driver's severity; a program's own lines may hold the word, too."""
    is_drivers = fault.chip_code is not None or TRAITS[fault.fault_class].hardware_fault
    return Severity(fault.severity) if is_drivers and fault.severity is not None else None


def too_often(
    fault: Fault, *, now_s: float, history: Sequence[Recovery], policy: Policy
) -> str | None:
    """Why a chip that reports this code again is not to be trusted, None while it is.

    ModelArts counts the same code of the same chip in a row: in the chip's own history, since in
    a large cluster something else always comes in between. MindCluster, where the policy wants
    its limits too, has a number per code and counts every one since the chip was released by hand.
    """
    code = fault.chip_code
    if code is None or fault.device is None or fault.node is None:
        return None
    if severity_of(fault) is Severity.HINT:
        return None
    # A failed recovery is followed by a second answer to the same fault: counted once.
    chip = [
        (p.fault.code, p.fault.at_s)
        for p in history
        if not p.failed and p.fault.chip_code and _is_on_chip(p.fault, fault)
    ]
    times = times_in_a_row(chip, code, now_s=now_s, window_s=SAME_CODE_WINDOW_S)
    if times + 1 >= SAME_CODE_TIMES:
        return f"code {code} came {SAME_CODE_TIMES} times in 24 h"
    came_s = [*(at_s for theirs, at_s in chip if theirs == code), now_s]
    if policy.mindcluster_frequency and escalated(code, came_s, now_s=now_s) in SEPARATED:
        return f"code {code} came as often as MindCluster separates its chip for"
    return None


def suspicion_of_node(
    fault: Fault,
    *,
    now_s: float,
    history: Sequence[Recovery],
    policy: Policy,
    num_nodes: int | None,
) -> str | None:
    """Why a fault of software is taken for its node's, None when it is not.

    Once a node was isolated for it and the problem came back elsewhere, it was not the node.

    Args:
        fault: what is to be answered.
        now_s: the time.
        history: every past recovery of the run, oldest first.
        policy: the job's restart policy; with RSC, a new container isolates no node.
        num_nodes: that the job runs on, None: unknown.
    """
    if num_nodes is None or not _is_of_one_node(fault):
        return None
    alike = [p for p in history if p.fault.fault_class is fault.fault_class]
    isolating = ISOLATES - ({Rung.POD_RESCHEDULE} if policy.pod_before_in_place else set())
    if any(p.rung in isolating and not p.failed and _is_of_one_node(p.fault) for p in alike):
        return None
    events = [
        (p.fault.node or "", p.fault.at_s)
        for p in history
        if p.progressed and not p.failed and _is_of_one_node(p.fault)
    ]
    node = fault.node or ""
    return why_node_is_suspect(node, [*events, (node, now_s)], num_nodes=num_nodes, now_s=now_s)


def _is_of_one_node(fault: Fault) -> bool:
    """Whether software failed on one node, while the others were healthy."""
    return (
        fault.fault_class in COUNTED
        and fault.node is not None
        and fault.num_other_nodes == 0
        and not points_at_hardware(fault)
        and fault.code not in USER_CAUSED_CODES
    )


def _is_on_chip(fault: Fault, other: Fault) -> bool:
    return (fault.node, fault.device) == (other.node, other.device)


def same_fault(fault: Fault, other: Fault) -> bool:
    """Whether two faults are one problem at one place."""
    return (fault.fault_class, *_chip_of(fault)) == (other.fault_class, *_chip_of(other))


def points_at_hardware(fault: Fault) -> bool:
    """Whether a node or a chip is explicitly at fault.

    Of a broken connection alone nobody knows which side broke it.
    """
    if fault.code in USER_CAUSED_CODES:
        return False
    answer = answer_of(fault)
    if answer is not None:
        return answer is not ChipAnswer.NOTHING
    if fault.fault_class is FaultClass.LINK_DOWN:
        return fault.hardware_fault is not False
    return TRAITS[fault.fault_class].hardware_fault or fault.hardware_fault is True


def _chip_of(fault: Fault) -> tuple[str | None, int | None, str | None]:
    return fault.node, fault.device, fault.code
