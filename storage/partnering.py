"""How the ranks agree on partner nodes: who is on which node, and where its checkpoint server is.

Collective. The addresses and tokens of the checkpoint servers go from rank to rank, over the
process group; no checkpoint server needs to know the others before there is something to copy.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from perdure.storage.checkpoint_server.client import CheckpointClient
from perdure.storage.checkpoint_server.protocol import Message, PeerAddress
from perdure.storage.errors import StorageError
from perdure.storage.partner_copies import partners_of
from perdure.storage.staging import SavePlans

_log = logging.getLogger("perdure.storage")


class RankPlace(Message):
    """Where a rank is, as the ranks exchange it.

    Attributes:
        node: name of its node.
        address: of the checkpoint server there; None: it takes no copies.
    """

    node: str
    address: PeerAddress | None


@dataclass(frozen=True, slots=True)
class NodeOfRanks:
    """One node of an attempt.

    Attributes:
        ranks: that are on it.
    """

    name: str
    address: PeerAddress
    ranks: tuple[int, ...]


@dataclass(slots=True)
class Partnering:
    """Chooses the nodes that hold copies.

    Attributes:
        node: of this rank.
        copies: of every share.
        domains: failure domain by name of the node.
    """

    node: str
    copies: int
    domains: Mapping[str, str] = field(default_factory=dict)

    def meet(self, client: CheckpointClient, plans: SavePlans, rank: int) -> None:
        """Tell this node's checkpoint server where its shares are copied to. Collective."""
        own = place_of(client, self.node)
        gathered = plans.gather_json(own.model_dump(mode="json"))
        nodes = nodes_of([RankPlace.model_validate(one) for one in gathered])
        chosen = partners_of([one.name for one in nodes], domains=self.domains, copies=self.copies)
        here = next((i for i, one in enumerate(nodes) if rank in one.ranks), None)
        if here is None:
            return
        if rank == 0:
            _report_alone(nodes, chosen, self.copies)
        held = [one.ranks for i, one in enumerate(nodes) if i == here or here in chosen[i]]
        partners = tuple(nodes[i].address for i in chosen[here])
        try:
            client.set_partners(partners, tuple(r for ranks in held for r in ranks))
        except StorageError as exc:
            _log.error(f"nothing is copied to partner nodes: {exc}")


def place_of(client: CheckpointClient, node: str) -> RankPlace:
    """Where this rank is; a checkpoint server that does not answer takes no copies."""
    try:
        return RankPlace(node=node, address=client.address())
    except StorageError as exc:
        _log.info(str(exc))
        return RankPlace(node=node, address=None)


def nodes_of(places: Sequence[RankPlace]) -> list[NodeOfRanks]:
    """The nodes that take copies, in order of their lowest ranks. Pure."""
    ranks: dict[tuple[str, PeerAddress], list[int]] = {}
    for rank, place in enumerate(places):
        if place.address is not None:
            ranks.setdefault((place.node, place.address), []).append(rank)
    return [NodeOfRanks(name, address, tuple(of)) for (name, address), of in ranks.items()]


def _report_alone(
    nodes: Sequence[NodeOfRanks], chosen: Sequence[Sequence[int]], copies: int
) -> None:
    few = [one.name for one, partners in zip(nodes, chosen, strict=True) if len(partners) < copies]
    if few:
        _log.warning(
            f"fewer than {copies} partners outside of their failure domains: {', '.join(few)}"
        )
    pairs = ", ".join(
        f"{one.name} to {' and '.join(nodes[i].name for i in partners)}"
        for one, partners in zip(nodes, chosen, strict=True)
        if partners
    )
    _log.info(f"memory saves are copied: {pairs or 'to no node'}")
