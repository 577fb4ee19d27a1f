"""Copies of each node's saves in the memory of partner nodes: their holders, and the copied saves.

A lost node takes the memory tier of its ranks with it. With copies on a partner, the next attempt
still finds one whole save in the memory of the nodes that live. A copy is of use only if every
node has one of the same save, and the nodes that live still hold their own shares of it, so all
ranks decide together which save is copied (`CopyPlan`), and both it and the one before it are kept
until it is whole everywhere. Pure; sizes are bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from perdure.storage.share import SaveId

OWN_SLOTS = 3  # a rank's own: the newest copied save, the one on its way, the one being written
COPY_SLOTS = 2  # of a rank at its partner: the newest whole copy, and the one on its way


class CopyState(StrEnum):
    """Progress of the copies of one share, at every partner of its node."""

    COPYING = "copying"
    COPIED = "copied"
    FAILED = "failed"


def gives_all_partners(domains: Mapping[str, str], nodes: Collection[str]) -> bool:
    """Whether every node can have a partner in another domain: none has more than half of them."""
    sizes = Counter(domains[node] for node in nodes if node in domains)
    return 2 * max(sizes.values(), default=0) <= len(nodes)


def partners_of(
    nodes: Sequence[str], *, domains: Mapping[str, str], copies: int
) -> tuple[tuple[int, ...], ...]:
    """Choose the members that hold each member's copies; none holds more than `copies` of others.

    Members are put in order of their failure domains, the largest domain first, and each one's
    partners are those that come at fixed distances after it. A distance of the size of the largest
    domain leads out of every domain, as long as no domain has more than half of the nodes. Without
    domains that is the next member, and the one after it.

    Args:
        nodes: name of each member's node, in order of the members.
        domains: failure domain by name of the node; a node without one is a domain of its own.
        copies: wanted of each, below the number of nodes.

    Returns:
        Fewer than `copies` for members whose distance leads into their own domain. So it is for
        some with a second copy where two domains share the nodes, as with racks of equal size.
    """
    of = [domains.get(name, f"node {name}") for name in nodes]
    sizes = Counter(of)
    order = sorted(range(len(nodes)), key=lambda i: (-sizes[of[i]], of.index(of[i]), i))
    largest = max(sizes.values(), default=0)
    distances = [*range(largest, len(nodes)), *range(1, largest)][: max(0, len(nodes) - 1)]
    partners: dict[int, list[int]] = {i: [] for i in range(len(nodes))}
    for distance in distances[:copies]:
        for at, member in enumerate(order):
            partner = order[(at + distance) % len(order)]
            if of[partner] != of[member]:
                partners[member].append(partner)
    return tuple(tuple(partners[i]) for i in range(len(nodes)))


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Saves of an attempt that are copied; the same on every rank.

    Attributes:
        copied: the newest save whose copies are whole, as far as all ranks know.
        begun: the save whose copies were begun last.
    """

    copied: SaveId | None = None
    begun: SaveId | None = None

    def next(self, states: Sequence[CopyState]) -> CopyTurn:
        """Decide whether the next save is copied.

        Args:
            states: state of each rank's share of `begun`; empty where none was begun.
        """
        if self.begun is None:
            return CopyTurn(self, begins=True)
        if CopyState.COPYING in states:
            return CopyTurn(self, begins=False)
        if CopyState.FAILED in states:
            return CopyTurn(CopyPlan(self.copied, None), begins=True, has_failed=True)
        return CopyTurn(CopyPlan(self.begun, None), begins=True)


def agreed(plans: Sequence[CopyPlan]) -> CopyPlan:
    """The plan that ranks go on with, of which a fault has stopped some within a save.

    The newest one: what one rank knows as copied was whole everywhere. Ranks that are new
    processes have empty plans.

    Args:
        plans: plan of each rank, by rank.
    """
    return max(plans, key=lambda plan: (_age_key(plan.copied), _age_key(plan.begun)))


def _age_key(save: SaveId | None) -> tuple[int, ...]:
    # Not by step alone: after a roll-back lower steps come, in files of other names.
    return (*save.owner, save.first_file, save.step) if save is not None else ()


@dataclass(frozen=True, slots=True)
class CopyTurn:
    """Decision whether a save is copied, and the saves that it must leave in memory.

    Attributes:
        plan: plan as it was before this save.
        begins: whether this save is copied; else copies of an earlier save are still on their way.
        has_failed: whether copies of the previous save failed: partners may have moved.
    """

    plan: CopyPlan
    begins: bool
    has_failed: bool = False

    @property
    def keep(self) -> tuple[SaveId, ...]:
        """Saves whose memory must not be reused for this one."""
        return tuple(save for save in (self.plan.copied, self.plan.begun) if save is not None)

    def plan_after(self, save: SaveId) -> CopyPlan:
        """The plan once this save was handed over."""
        return CopyPlan(self.plan.copied, save) if self.begins else self.plan
