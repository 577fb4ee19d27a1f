"""Saves that the nodes hold whole between them, and the rank that gives each share. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perdure.storage.checkpoint import Tier
from perdure.storage.frozen_model import FrozenModel
from perdure.storage.share import SaveId, named_ranks


class NodeShare(FrozenModel):
    """A share that a node can give, as the ranks exchange it."""

    save: SaveId
    rank: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class RestorableSave:
    """A save of which the nodes together hold every share.

    Attributes:
        holders: lowest current rank whose node has the share, by rank of the share.
        local: shares that each current rank's node holds, with the nearest tier.
    """

    save: SaveId
    holders: Mapping[int, int]
    local: Mapping[int, Mapping[int, Tier]]


def restorable_saves(
    held: Mapping[int, Sequence[NodeShare]], *, owner: tuple[int, int]
) -> list[RestorableSave]:
    """The saves that the nodes hold whole, newest step first. Pure.

    Args:
        held: shares that each current rank's node holds.
        owner: (placement, attempt) of this attempt; only saves of earlier attempts count.
    """
    by_save: defaultdict[SaveId, dict[int, dict[int, Tier]]] = defaultdict(dict)
    for reader, shares in held.items():
        for share in shares:
            if share.save.owner >= owner:
                continue
            tiers = by_save[share.save].setdefault(reader, {})
            tiers[share.rank] = min(tiers.get(share.rank, share.tier), share.tier, key=_nearness)
    whole = [
        RestorableSave(save, holders, local)
        for save, local in by_save.items()
        if len(holders := _holders(local)) == save.world_size
    ]
    return sorted(
        whole, key=lambda restorable: (restorable.save.step, restorable.save.owner), reverse=True
    )


def lacking_of(
    held: Mapping[int, Sequence[NodeShare]], *, owner: tuple[int, int], than: SaveId | None
) -> str:
    """Name the shares that the nodes lack of a newer save that they hold in part. Pure.

    Args:
        held: shares that each current rank's node holds.
        owner: (placement, attempt) of this attempt.
        than: the newest save that they hold whole.
    """
    ranks: defaultdict[SaveId, set[int]] = defaultdict(set)
    for older in (
        share for shares in held.values() for share in shares if share.save.owner < owner
    ):
        ranks[older.save].add(older.rank)
    newest = max(ranks, key=lambda save: (save.step, save.owner), default=None)
    if newest is None or (than is not None and newest.step <= than.step):
        return ""
    missing = sorted(set(range(newest.world_size)) - ranks[newest])
    return f"of step {newest.step} the nodes lack the shares of ranks {named_ranks(missing)}"


def _holders(local: Mapping[int, Mapping[int, Tier]]) -> dict[int, int]:
    """Giver of each rank's share: memory before disk, then the lowest rank."""
    best: dict[int, tuple[int, int]] = {}
    for reader, tiers in local.items():
        for rank, tier in tiers.items():
            offer = (_nearness(tier), reader)
            best[rank] = min(best.get(rank, offer), offer)
    return {rank: reader for rank, (_, reader) in best.items()}


def _nearness(tier: Tier) -> int:
    return list(Tier).index(tier)
