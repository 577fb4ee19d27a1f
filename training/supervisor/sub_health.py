"""Nodes that work, but not as they should: the last that a new placement takes.

MindCluster's sub-health: the job goes on where it is, and later placements avoid the node while
there is another one. A node that was released begins anew. Pure. Times are seconds since the
epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from perdure.training.journal.attempt_view import AttemptView
from perdure.training.journal.events import HealthPoint
from perdure.training.journal.history import RunHistory
from perdure.training.recovery.chips import ChipLevel, chip_fact
from perdure.training.recovery.faults import Fault

# Alerts about a machine; the others are about the program, the store or all ranks.
OF_MACHINES = frozenset(
    {
        *(HealthPoint.DEVICE_UNHEALTHY, HealthPoint.LINK_DOWN, HealthPoint.LINK_RETRIED),
        HealthPoint.STRAGGLER,
    }
)


@dataclass(frozen=True, slots=True)
class SubHealthyNode:
    """A node that is used last.

    Attributes:
        why: what was seen, the newest of it.
        at_s: when.
    """

    node: str
    why: str
    at_s: float


def sub_healthy_nodes(history: RunHistory) -> list[SubHealthyNode]:
    """Nodes that are not isolated and of which something was seen, by name."""
    found: dict[str, SubHealthyNode] = {}
    for view in history.attempts:
        for one in _seen_in(view):
            is_new = one.at_s > history.released.get(one.node, float("-inf"))
            if is_new and one.node not in history.isolated:
                found[one.node] = one
    return [found[node] for node in sorted(found)]


def _seen_in(view: AttemptView) -> Iterator[SubHealthyNode]:
    ends = [view.ended.fault] if view.ended is not None and view.ended.fault is not None else []
    for fault in [*(one.began.fault for one in view.recoveries), *ends]:
        yield from _of_code(fault)
    for recovery in view.recoveries:
        fault = recovery.began.fault
        if recovery.left_sub_healthy and fault.node is not None:
            why = f"its connections broke and were made again at step {fault.step}"
            yield SubHealthyNode(fault.node, why, fault.at_s)
    for alert in view.alerts:
        raised = alert.began
        if alert.ended is None and raised.point in OF_MACHINES and raised.node is not None:
            yield SubHealthyNode(raised.node, f"{raised.point}: {raised.text}", raised.at_s)


def _of_code(fault: Fault) -> Iterator[SubHealthyNode]:
    fact = chip_fact(fault.code) if fault.code is not None else None
    if fact is None or fact.level is not ChipLevel.SUB_HEALTHY or fault.node is None:
        return
    cause = f" ({fact.cause})" if fact.cause else ""
    device = f" of device {fault.device}" if fault.device is not None else ""
    yield SubHealthyNode(fault.node, f"code {fault.code}{device}{cause}", fault.at_s)
