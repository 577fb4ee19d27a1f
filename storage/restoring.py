"""Restoring from the nodes' own memory and disks, and from the store with their help.

Collective: every rank takes the same steps, and learns of the others' failures before the next
one. Ranks exchange JSON over the process group. Sizes are bytes.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from storage.checkpoint import CheckpointStore, Tier
from storage.checkpoint_server.client import CheckpointClient
from storage.checkpoint_server.protocol import HeldShare
from storage.errors import Corrupt, StorageError
from storage.frozen_model import FrozenModel
from storage.loading import ManifestReader, ShardReads
from storage.manifest import Chunk, Manifest, digest
from storage.share import SaveId, WrittenShare, delete_records, merge, read_share
from storage.staging import gather_json, raw

_log = logging.getLogger("perdure.storage")

PIECE_BYTES = 64 * 2**20


class NodeShare(FrozenModel):
    """One share that a node can give, as the ranks exchange it."""

    save: SaveId
    rank: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class RestorableSave:
    """A save of which the nodes together hold every share.

    Attributes:
        holders: by rank of the share, the lowest current rank whose node has it.
        local: by current rank, the shares that its node holds, with the nearest tier.
    """

    save: SaveId
    holders: Mapping[int, int]
    local: Mapping[int, Mapping[int, Tier]]


@dataclass(slots=True)
class NodeShares:
    """The shares that this rank's node holds, and their bytes.

    Attributes:
        client: to the node's checkpoint server.
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
        self._held = [h for h in shares if h.tier is Tier.MEMORY or _id(h) not in self._damaged]
        return [NodeShare(save=_id(h)[0], rank=_id(h)[1], tier=h.tier) for h in self._held]

    def written(self, save: SaveId, rank: int) -> WrittenShare:
        """What a held share is made of."""
        return next(h.written for h in self._held if _id(h) == (save, rank))

    def named(self, manifest: Manifest) -> dict[str, HeldShare]:
        """Shards of a manifest that this node holds just as they were published."""
        found: dict[str, HeldShare] = {}
        for held in reversed(self._held):  # memory comes first in the list, and wins
            shard = held.written.share.shard
            if manifest.shards.get(shard) == held.written.record:
                found[shard] = held
        return found

    def read(self, save: SaveId, rank: int, tier: Tier) -> Tensor:
        """The file of a held share, [bytes] uint8; memory is shared, not copied.

        Raises:
            StorageError: it is gone or damaged.
        """
        written = self.written(save, rank)
        if tier is Tier.MEMORY:
            memory = self.client.open(save, rank)
            return torch.frombuffer(memory, dtype=torch.uint8)[: written.record.size_bytes]
        return self._read_disk(written)

    def _read_disk(self, written: WrittenShare) -> Tensor:
        assert self.disk is not None  # noqa: S101 the checkpoint server has listed it there
        share = written.share
        file = torch.empty(written.record.size_bytes, dtype=torch.uint8)
        try:
            read_share(self.disk, written, raw(file))
        except StorageError:
            self._damaged.add((share.save_id, share.rank))
            with suppress(StorageError):  # never offered again, to later attempts either
                delete_records(self.disk, share.save_id, [share.rank])
            raise
        return file


def _id(held: HeldShare) -> tuple[SaveId, int]:
    return held.written.share.save_id, held.written.share.rank


@dataclass(slots=True)
class NodeRestore:
    """Restores a state from what the nodes hold.

    Attributes:
        node: of this rank.
        checkpoints: of the run, in the store.
        before: (placement, attempt) of now.
        device: where the ranks' messages and bytes go.
    """

    node: NodeShares
    checkpoints: CheckpointStore
    before: tuple[int, int]
    device: torch.device

    def candidates(self) -> list[RestorableSave]:
        """Saves that the nodes hold whole, newest first; the same on every rank."""
        own = [one.model_dump(mode="json") for one in self.node.refresh()]
        held = {
            rank: [NodeShare.model_validate(one) for one in of_rank]
            for rank, of_rank in enumerate(gather_json(own, self.device))
        }
        return restorable_saves(held, before=self.before)

    def load(
        self, chosen: RestorableSave, state_of: Callable[[Manifest], Mapping[str, Tensor]]
    ) -> Manifest | None:
        """Fill a state; None when a share turned out damaged: look for candidates again.

        Raises:
            Corrupt: on every rank, when a share does not hold what it should; the state is then
                undefined.
        """
        manifest = self._manifest(chosen)
        reads = ShardReads(self.checkpoints, manifest)
        planner, by_shard = planned(state_of(manifest), reads)
        needed = {r for r in chosen.holders if _shard(chosen.save, r) in by_shard}
        local = chosen.local.get(_rank(), {})
        remote = [set(r) for r in gather_json(sorted(needed - local.keys()), self.device)]
        wanted = set().union(*remote)
        giving = {rank for rank in wanted if chosen.holders[rank] == _rank()}
        opened = self._open(chosen, (needed & local.keys()) | giving)
        if opened is None:
            return None
        problem = None
        # One after the other, so that no rank holds more than one file of another node.
        for rank in sorted(wanted | opened.keys()):
            shard = _shard(chosen.save, rank)
            file = opened.pop(rank, None)
            if rank in wanted:
                size_bytes = manifest.shards[shard].size_bytes
                source = chosen.holders[rank]
                keep = rank in needed
                file = self._broadcast(file, size_bytes=size_bytes, source=source, keep=keep)
            if file is not None and rank in needed and problem is None:
                problem = _filled(reads, shard, by_shard[shard], planner, file)
        problems = [one for one in gather_json(problem, self.device) if one]
        if problems:
            raise Corrupt(problems[0])
        return manifest

    def held_of(self, manifest: Manifest, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Files of a committed checkpoint that `state` wants and this node holds."""
        _, wanted = planned(state, ShardReads(self.checkpoints, manifest))
        files: dict[str, Tensor] = {}
        for shard, held in self.node.named(manifest).items():
            if shard not in wanted:
                continue
            try:
                files[shard] = self.node.read(*_id(held), held.tier)
            except StorageError as exc:
                _log.info(str(exc))
        return files

    def repair(self, manifest: Manifest, damaged: Iterable[str]) -> bool:
        """Put damaged shards into the store again from nodes that hold the same bytes.

        Returns:
            Whether every one of them was.
        """
        mine = self.node.named(manifest)
        holders = [set(names) for names in gather_json(sorted(mine), self.device)]
        done = True
        for shard in sorted(damaged):
            holder = next((r for r, names in enumerate(holders) if shard in names), None)
            done = done and holder is not None
            if holder == _rank():
                done = self._put_again(manifest.step, shard, mine[shard]) and done
        return all(gather_json(done, self.device))

    def _put_again(self, step: int, shard: str, held: HeldShare) -> bool:
        try:
            file = self.node.read(*_id(held), held.tier)
            if digest(raw(file)) != held.written.record.xxh3_128:
                raise Corrupt(f"{shard}: this node's copy is damaged too")
            self.checkpoints.store.put(self.checkpoints.key(step, shard), raw(file))
        except StorageError as exc:
            _log.info(str(exc))
            return False
        return True

    def _manifest(self, chosen: RestorableSave) -> Manifest:
        own = [
            self.node.written(chosen.save, rank).model_dump(mode="json")
            for rank, holder in chosen.holders.items()
            if holder == _rank()
        ]
        gathered = gather_json(own, self.device)
        shares = [WrittenShare.model_validate(one) for of_rank in gathered for one in of_rank]
        return merge(shares, owner=chosen.save.owner, written_at_s=self.checkpoints.clock())

    def _open(self, chosen: RestorableSave, ranks: Iterable[int]) -> dict[int, Tensor] | None:
        local = chosen.local.get(_rank(), {})
        opened: dict[int, Tensor] = {}
        damaged = False
        for rank in sorted(ranks):
            try:
                opened[rank] = self.node.read(chosen.save, rank, local[rank])
            except StorageError as exc:
                _log.info(str(exc))
                damaged = True
        return None if any(gather_json(damaged, self.device)) else opened

    def _broadcast(
        self, file: Tensor | None, *, size_bytes: int, source: int, keep: bool
    ) -> Tensor | None:
        """One rank's file to those that want it; the others help to pass it on."""
        received = torch.empty(size_bytes, dtype=torch.uint8) if keep and file is None else None
        for start in range(0, size_bytes, PIECE_BYTES):
            length = min(PIECE_BYTES, size_bytes - start)
            if file is not None:
                piece = file[start : start + length].to(self.device)
            else:
                piece = torch.empty(length, dtype=torch.uint8, device=self.device)
            dist.broadcast(piece, src=source)
            if received is not None:
                received[start : start + length] = piece.cpu()
        return file if file is not None else received


def planned(
    state: Mapping[str, Tensor], reads: ShardReads
) -> tuple[LoadPlanner, dict[str, list[tuple[ReadItem, Chunk]]]]:
    """What `state` needs of a checkpoint, by shard, and the planner that knows where it goes."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = ManifestReader(reads).read_metadata()
    planner.set_up_planner(dict(state), metadata, is_coordinator=False)
    return planner, reads.by_shard(planner.create_local_plan().items)


def _filled(
    reads: ShardReads,
    shard: str,
    wanted: Sequence[tuple[ReadItem, Chunk]],
    planner: LoadPlanner,
    file: Tensor,
) -> str | None:
    """Fill what one file holds. Returns what is wrong with it, else None."""
    try:
        reads.read_shard(shard, wanted, planner, held=file)
    except StorageError as exc:
        return f"rank {_rank()}: {exc}"
    return None


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _shard(save: SaveId, rank: int) -> str:
    return save.shard(rank)


def restorable_saves(
    held: Mapping[int, Sequence[NodeShare]], *, before: tuple[int, int]
) -> list[RestorableSave]:
    """The saves that the nodes hold whole, newest step first. Pure.

    Args:
        held: by current rank, what its node holds.
        before: (placement, attempt) of now; saves that are not older are of no use.
    """
    by_save: defaultdict[SaveId, dict[int, dict[int, Tier]]] = defaultdict(dict)
    for reader, shares in held.items():
        for one in shares:
            if one.save.owner >= before:
                continue
            tiers = by_save[one.save].setdefault(reader, {})
            tiers[one.rank] = min(tiers.get(one.rank, one.tier), one.tier, key=_nearness)
    whole = [
        RestorableSave(save, holders, local)
        for save, local in by_save.items()
        if len(holders := _holders(local)) == save.world_size
    ]
    return sorted(whole, key=lambda one: (one.save.step, one.save.owner), reverse=True)


def _holders(local: Mapping[int, Mapping[int, Tier]]) -> dict[int, int]:
    """By rank of the share, who gives it: memory before disk, then the lowest rank."""
    best: dict[int, tuple[int, int]] = {}
    for reader, tiers in local.items():
        for rank, tier in tiers.items():
            offer = (_nearness(tier), reader)
            best[rank] = min(best.get(rank, offer), offer)
    return {rank: reader for rank, (_, reader) in best.items()}


def _nearness(tier: Tier) -> int:
    return list(Tier).index(tier)
