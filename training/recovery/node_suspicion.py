"""Suspicion of a node: the number of software faults after which their node is to blame.

A crash shows that a process ended, not why. If processes crash repeatedly on the same node while
the other nodes run the same program and stay healthy, the node is the likely cause. `ROWS` has the
number of faults: if every node were equally likely each time, some node of the job would have that
many faults by chance in fewer than one of a hundred cases
(`nodes x P(Binomial(of, 1 / nodes) >= times)`).

Crashes, exhausted host memory and failed kernels count, if they hit one node alone and if progress
followed each of them except the newest. A program that never makes progress is at fault itself,
however often it fails on the same node. Classes that carry the node of the rank that noticed first
(time-outs, hangs, broken connections) do not count: which rank notices first is no chance.

Times are seconds since the epoch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from perdure.training.recovery.faults import FaultClass

WINDOW_S = 86400.0  # as the platforms count the codes of a chip
COUNTED = frozenset({FaultClass.NATIVE_CRASH, FaultClass.HOST_OOM, FaultClass.OPERATOR_ERROR})


@dataclass(frozen=True, slots=True)
class Threshold:
    """On a job of so many nodes or more: `times` of the newest `of` are on one node."""

    nodes: int
    times: int
    of: int


ROWS: Sequence[Threshold] = (
    Threshold(nodes=2, times=11, of=12),
    Threshold(nodes=3, times=7, of=8),
    Threshold(nodes=4, times=6, of=7),
    Threshold(nodes=5, times=5, of=6),
    Threshold(nodes=8, times=4, of=5),
)


def chance_of(row: Threshold) -> float:
    """How likely some node comes so often where each is equally likely, an upper bound."""
    chance = 1 / row.nodes
    ways = (
        math.comb(row.of, n) * chance**n * (1 - chance) ** (row.of - n) for n in range(row.of + 1)
    )
    return row.nodes * sum(list(ways)[row.times :])


def why_node_is_suspect(
    node: str, events: Sequence[tuple[str, float]], *, num_nodes: int, now_s: float
) -> str | None:
    """Why it is the node, as a few words; None while it may be chance.

    Args:
        node: of the newest fault.
        events: node and time of each fault that counts, oldest first, the newest included.
        num_nodes: that the job runs on; a single one has nothing to be compared with.
        now_s: the moment asked about.
    """
    row = next((row for row in reversed(ROWS) if num_nodes >= row.nodes), None)
    if row is None:
        return None
    newest = [where for where, at_s in events if now_s - at_s <= WINDOW_S][-row.of :]
    times, hours = newest.count(node), round(WINDOW_S / 3600)
    if times < row.times:
        return None
    return (
        f"the same node again and again: {node} had {times} of the last {len(newest)} faults of "
        f"software in {hours} h, the others of {num_nodes} nodes at most {len(newest) - times}"
    )
