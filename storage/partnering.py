"""Agreement of the ranks on partner nodes, and on the addresses of their checkpoint servers.

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
from perdure.storage.partner_copies import gives_all_partners, partners_of
from perdure.storage.plans import Plans

_log = logging.getLogger("perdure.storage")


class RankPlace(Message):
    """Node and checkpoint server of a rank, as the ranks exchange it.

    Attributes:
        node: name of the node that the rank runs on.
        address: address of that node's checkpoint server; None when it takes no copies.
        super_pod: the node's super pod, as its rank table has it; None: not known.
    """

    node: str
    address: PeerAddress | None
    super_pod: str | None = None


@dataclass(frozen=True, slots=True)
class NodeOfRanks:
    """A node of an attempt, with its ranks."""

    name: str
    address: PeerAddress
    ranks: tuple[int, ...]


@dataclass(slots=True)
class Partnering:
    """Chooses the nodes that hold copies.

    Attributes:
        node: name of this rank's node.
        copies: number of partner nodes that hold each share.
        domains: failure domain by name of the node; where it is empty, the super pods are.
        super_pod: super pod of this node; None: not known.
    """

    node: str
    copies: int
    domains: Mapping[str, str] = field(default_factory=dict)
    super_pod: str | None = None

    def meet(self, client: CheckpointClient, plans: Plans, rank: int) -> None:
        """Tell this node's checkpoint server where its shares are copied to. Collective."""
        place = place_of(client, self.node).model_copy(update={"super_pod": self.super_pod})
        gathered = plans.gather_json(place.model_dump(mode="json"))
        places = [RankPlace.model_validate(place_json) for place_json in gathered]
        nodes = nodes_of(places)
        domains = self.domains or super_pod_domains(places)
        chosen = partners_of([node.name for node in nodes], domains=domains, copies=self.copies)
        node_index = next((i for i, node in enumerate(nodes) if rank in node.ranks), None)
        if node_index is None:
            return
        if rank == 0:
            _report_alone(nodes, chosen, self.copies)
        held = [
            node.ranks for i, node in enumerate(nodes) if i == node_index or node_index in chosen[i]
        ]
        partners = tuple(nodes[i].address for i in chosen[node_index])
        try:
            client.set_partners(partners, tuple(r for ranks in held for r in ranks))
        except StorageError as exc:
            _log.error(f"nothing is copied to partner nodes: {exc}")


def place_of(client: CheckpointClient, node: str) -> RankPlace:
    """Place of this rank; a checkpoint server that does not answer takes no copies."""
    try:
        return RankPlace(node=node, address=client.address())
    except StorageError as exc:
        _log.info(str(exc))
        return RankPlace(node=node, address=None)


def super_pod_domains(places: Sequence[RankPlace]) -> dict[str, str]:
    """Super pods as failure domains, by name of the node. Pure.

    They are none where one super pod has more than half of the nodes: not all of its nodes could
    have a partner in another one, and a partner in the same super pod is better than none.
    """
    nodes = {place.node for place in places}
    pods = {place.node: place.super_pod for place in places if place.super_pod is not None}
    if not gives_all_partners(pods, nodes):
        return {}
    return {node: f"super pod {pod}" for node, pod in pods.items()}


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
    few = [
        node.name for node, partners in zip(nodes, chosen, strict=True) if len(partners) < copies
    ]
    if few:
        _log.warning(
            f"fewer than {copies} partners outside of their failure domains: {', '.join(few)}"
        )
    pairs = ", ".join(
        f"{node.name} to {' and '.join(nodes[i].name for i in partners)}"
        for node, partners in zip(nodes, chosen, strict=True)
        if partners
    )
    _log.info(f"memory saves are copied: {pairs or 'to no node'}")
