"""Nodes that work, but not as they should: MindCluster calls them sub-healthy. Pure.

The job goes on where it is; later placements take these nodes last and say why. A node that was
released begins anew. Times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from perdure.training.journal.attempt_view import AttemptView
from perdure.training.journal.events import AlertKind
from perdure.training.journal.history import RunHistory
from perdure.training.recovery.chips import ChipLevel, chip_fact
from perdure.training.recovery.faults import Fault

# Alerts about a machine; the others are about the program, the store or all ranks.
MACHINE_ALERTS = (
    AlertKind.DEVICE_UNHEALTHY,
    AlertKind.LINK_DOWN,
    AlertKind.LINK_RETRIED,
    AlertKind.STRAGGLER,
)


@dataclass(frozen=True, slots=True)
class SubHealthyNode:
    """A node that a new placement takes last.

    Attributes:
        why: the newest fact against it.
        at_s: of that fact.
    """

    node: str
    why: str
    at_s: float


def sub_healthy_nodes(history: RunHistory) -> list[SubHealthyNode]:
    """List nodes that are not isolated, but have a fact against them, by name."""
    by_name: dict[str, SubHealthyNode] = {}
    for view in history.attempts:
        for sub_healthy in _facts_in(view):
            is_new = sub_healthy.at_s > history.released.get(sub_healthy.node, float("-inf"))
            if is_new and sub_healthy.node not in history.isolated:
                by_name[sub_healthy.node] = sub_healthy
    return [by_name[node] for node in sorted(by_name)]


def _facts_in(view: AttemptView) -> Iterator[SubHealthyNode]:
    ends = [view.ended.fault] if view.ended is not None and view.ended.fault is not None else []
    for fault in [*(recovery.began.fault for recovery in view.recoveries), *ends]:
        yield from _code_fact(fault)
    for recovery in view.recoveries:
        fault = recovery.began.fault
        if recovery.is_sub_healthy and fault.node is not None:
            why = f"its connections broke and were made again at step {fault.step}"
            yield SubHealthyNode(fault.node, why, fault.at_s)
    for alert in view.alerts:
        raised = alert.began
        if alert.ended is None and raised.point in MACHINE_ALERTS and raised.node is not None:
            yield SubHealthyNode(raised.node, f"{raised.point}: {raised.text}", raised.at_s)


def _code_fact(fault: Fault) -> Iterator[SubHealthyNode]:
    fact = chip_fact(fault.code) if fault.code is not None else None
    if fact is None or fact.level is not ChipLevel.SUB_HEALTHY or fault.node is None:
        return
    cause = f" ({fact.cause})" if fact.cause else ""
    device = f" of device {fault.device}" if fault.device is not None else ""
    yield SubHealthyNode(fault.node, f"code {fault.code}{device}{cause}", fault.at_s)
