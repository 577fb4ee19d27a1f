"""Placements of pods without a run around them."""

from __future__ import annotations

from perdure.training.engines.base import Placement
from perdure.training.journal.records import Member

PLACE_S = 300


def placement(*nodes: str) -> Placement:
    """Members on these nodes, or where the scheduler wants them."""
    members = [Member(index=i, node=node, schedule_cnt=1) for i, node in enumerate(nodes)]
    return Placement(1, tuple(members))
