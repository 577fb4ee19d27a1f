"""Saves that the nodes hold in their memory and on their disks, as the ranks see them.

Collective: every rank takes the same steps, and learns of the others' failures before the next
one. Sizes are bytes.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from perdure.storage.checkpoint import CheckpointStore, Tier
from perdure.storage.checkpoint_server.client import CheckpointClient
from perdure.storage.checkpoint_server.protocol import HeldShare
from perdure.storage.errors import Corrupt, StorageError
from perdure.storage.manifest import Manifest, digest
from perdure.storage.partnering import RankPlace, place_of
from perdure.storage.ranks import Ranks
from perdure.storage.restorable import (
    NodeShare,
    RestorableSave,
    lacking_of,
    restorable_saves,
)
from perdure.storage.share import (
    SaveId,
    WrittenShare,
    delete_records,
    merge,
    read_share,
)

_log = logging.getLogger("perdure.storage")


@dataclass(slots=True)
class NodeShares:
    """The shares that this rank's node holds, and their bytes.

    Attributes:
        client: connection to the node's checkpoint server.
        disk: checkpoints on the node's disk, where there is that tier.
    """

    client: CheckpointClient
    disk: CheckpointStore | None
    _held: Sequence[HeldShare] = ()
    _damaged: set[tuple[SaveId, int]] = field(default_factory=set)

    def refresh(self) -> list[NodeShare]:
        """List what the checkpoint server holds; what turned out damaged is left out.

        A server that does not answer holds nothing: the other ranks must not wait for this one.
        """
        try:
            shares = self.client.shares()
        except StorageError as exc:
            _log.info(str(exc))
            shares = ()
        self._held = [
            h for h in shares if h.tier is Tier.MEMORY or share_id(h) not in self._damaged
        ]
        return [
            NodeShare(save=share_id(h)[0], rank=share_id(h)[1], tier=h.tier) for h in self._held
        ]

    def written(self, save: SaveId, rank: int) -> WrittenShare:
        """Record of a held share.

        Raises:
            StorageError: it is not held.
        """
        written = next((h.written for h in self._held if share_id(h) == (save, rank)), None)
        if written is None:
            raise StorageError(f"step {save.step} rank {rank} is not on this node any more")
        return written

    def named(self, manifest: Manifest) -> dict[str, HeldShare]:
        """Shards of a manifest that this node holds just as they were published."""
        by_shard: dict[str, HeldShare] = {}
        for held in reversed(self._held):  # memory comes first in the list, and wins
            shard = held.written.share.shard
            if manifest.shards.get(shard) == held.written.record:
                by_shard[shard] = held
        return by_shard

    def read(self, save: SaveId, rank: int, tier: Tier) -> memoryview:
        """The file of a held share; memory is shared, not copied.

        Raises:
            StorageError: it is gone or damaged.
        """
        written = self.written(save, rank)
        if tier is Tier.MEMORY:
            memory = self.client.open(save, rank)
            return memoryview(memory)[: written.record.size_bytes]
        return self._read_disk(written)

    def _read_disk(self, written: WrittenShare) -> memoryview:
        assert self.disk is not None  # noqa: S101 the checkpoint server has listed it there
        share = written.share
        file = memoryview(bytearray(written.record.size_bytes))
        try:
            read_share(self.disk, written, file)
        except StorageError:
            self._damaged.add((share.save_id, share.rank))
            with suppress(StorageError):  # never offered again, to later attempts either
                delete_records(self.disk, share.save_id, [share.rank])
            raise
        return file


def share_id(held: HeldShare) -> tuple[SaveId, int]:
    """Return the save and the rank of a held share."""
    return held.written.share.save_id, held.written.share.rank


@dataclass(slots=True)
class NodeSaves(ABC):
    """The choice of a save that the nodes hold whole, and its repair in the store.

    Attributes:
        node: shares of this rank's node.
        checkpoints: checkpoints of the run, in the store.
        owner: (placement, attempt) of this attempt.
        ranks: the ranks of this attempt.
        name: name of this rank's node where nodes copy each other's shares; else None.
        announce: file that gets a line once a save that is published is committed.
        brought: node that gave its copy, by rank whose node lacked the share.
        lacking: shares missing of the newest save, for people; empty when it is whole.
        num_fetched: shards that this rank read in the store.
    """

    node: NodeShares
    checkpoints: CheckpointStore
    owner: tuple[int, int]
    ranks: Ranks
    name: str | None = None
    announce: str | None = None
    brought: dict[int, str] = field(default_factory=dict)
    lacking: str = ""
    num_fetched: int = 0

    @abstractmethod
    def load(
        self, chosen: RestorableSave, state_of: Callable[[Manifest], Mapping[str, Any]]
    ) -> Manifest | None:
        """Fill a state; None when a share turned out damaged: look for candidates again.

        Raises:
            Corrupt: on every rank, when a share does not hold what it should; the state is then
                undefined.
        """

    @abstractmethod
    def held_of(self, manifest: Manifest, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Files of a committed checkpoint that `state` wants and this node holds."""

    def publish(self, chosen: RestorableSave) -> None:
        """Copy to the store what so far only the nodes have."""
        rank = self.ranks.rank
        ranks = tuple(r for r, holder in chosen.holders.items() if holder == rank)
        self.node.client.republish(
            chosen.save,
            ranks=ranks if self.name is not None else None,
            owner=self.owner,
            commit=rank == 0,
            announce=self.announce,
        )

    def candidates(self) -> list[RestorableSave]:
        """Saves that the nodes hold whole, newest first; the same on every rank."""
        node_shares = [share.model_dump(mode="json") for share in self.node.refresh()]
        held = {
            rank: [NodeShare.model_validate(share_json) for share_json in of_rank]
            for rank, of_rank in enumerate(self.ranks.gather(node_shares))
        }
        saves = restorable_saves(held, owner=self.owner)
        self.lacking = lacking_of(held, owner=self.owner, than=saves[0].save if saves else None)
        return saves

    def bring(self, chosen: RestorableSave) -> RestorableSave | None:
        """Have nodes that are new get the shares of their ranks from the nodes with their copies.

        Collective. A share goes from checkpoint server to checkpoint server, once, and its node
        holds it again. Other shares come over the process group, in `load`.

        Returns:
            The same save, as the nodes hold it now; None on every rank when they lost a share of
            it meanwhile: look for candidates again.
        """
        if self.name is None or len(by_rank := self._places()) != chosen.save.world_size:
            return chosen
        rank, source = self.ranks.rank, None
        holder = chosen.holders[rank]
        if rank not in chosen.local.get(rank, {}) and chosen.local[holder][rank] is Tier.MEMORY:
            source = by_rank[holder]
        brought = self._brought(chosen.save, source) if source is not None else None
        gathered = self.ranks.gather(brought)
        self.brought = {rank: name for rank, name in enumerate(gathered) if name is not None}
        if not self.brought:
            return chosen
        return next((save for save in self.candidates() if save.save == chosen.save), None)

    def _places(self) -> list[RankPlace]:
        place = place_of(self.node.client, self.name or "").model_dump(mode="json")
        return [RankPlace.model_validate(place_json) for place_json in self.ranks.gather(place)]

    def _brought(self, save: SaveId, source: RankPlace) -> str | None:
        """The node whose copy this rank's node holds now, None where it could not be had."""
        if source.address is None:
            return None
        try:
            self.node.client.bring(save, self.ranks.rank, source.address)
        except StorageError as exc:
            _log.warning(f"the copy on {source.node} comes over the process group: {exc}")
            return None
        return source.node

    def repair(self, manifest: Manifest, damaged: Iterable[str]) -> bool:
        """Put damaged shards into the store again from nodes that hold the same bytes.

        Returns:
            Whether every one of them was.
        """
        mine = self.node.named(manifest)
        holders = [set(names) for names in self.ranks.gather(sorted(mine))]
        done = True
        for shard in sorted(damaged):
            holder = next((r for r, names in enumerate(holders) if shard in names), None)
            done = done and holder is not None
            if holder == self.ranks.rank:
                done = self._put_again(manifest.step, shard, mine[shard]) and done
        return all(self.ranks.gather(done))

    def _put_again(self, step: int, shard: str, held: HeldShare) -> bool:
        try:
            file = self.node.read(*share_id(held), held.tier)
            if digest(file) != held.written.record.xxh3_128:
                raise Corrupt(f"{shard}: this node's copy is damaged too")
            self.checkpoints.store.put(self.checkpoints.key(step, shard), file)
        except StorageError as exc:
            _log.info(str(exc))
            return False
        return True

    def manifest_of(self, chosen: RestorableSave) -> Manifest:
        """Merge the shares of a save that the nodes hold. Collective."""
        written = [
            self.node.written(chosen.save, rank).model_dump(mode="json")
            for rank, holder in chosen.holders.items()
            if holder == self.ranks.rank
        ]
        gathered = self.ranks.gather(written)
        shares = [
            WrittenShare.model_validate(written_json)
            for of_rank in gathered
            for written_json in of_rank
        ]
        return merge(shares, owner=chosen.save.owner, written_at_s=self.checkpoints.clock())

    def open(self, chosen: RestorableSave, ranks: Iterable[int]) -> dict[int, memoryview] | None:
        """Open files that this node holds; None on every rank where one is damaged. Collective."""
        local = chosen.local.get(self.ranks.rank, {})
        opened: dict[int, memoryview] = {}
        damaged = False
        for rank in sorted(ranks):
            try:
                opened[rank] = self.node.read(chosen.save, rank, local[rank])
            except StorageError as exc:
                _log.info(str(exc))
                damaged = True
        return None if any(self.ranks.gather(damaged)) else opened
