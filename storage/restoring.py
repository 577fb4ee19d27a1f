"""Restoring from the nodes' own memory and disks, and from the store with their help.

Collective: every rank takes the same steps, and learns of the others' failures before the next
one. Ranks exchange JSON over the process group. Sizes are bytes.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from perdure.storage import safetensors_file
from perdure.storage.checkpoint import CheckpointStore, Tier
from perdure.storage.checkpoint_server.client import CheckpointClient
from perdure.storage.checkpoint_server.protocol import HeldShare
from perdure.storage.errors import Corrupt, StorageError
from perdure.storage.frozen_model import FrozenModel
from perdure.storage.loading import ManifestReader, ShardReads
from perdure.storage.manifest import Chunk, Manifest, digest
from perdure.storage.partnering import RankPlace, place_of
from perdure.storage.share import (
    SaveId,
    WrittenShare,
    delete_records,
    merge,
    named_ranks,
    read_share,
)
from perdure.storage.staging import gather_json, raw

_log = logging.getLogger("perdure.storage")

PIECE_BYTES = 64 * 2**20
GAP_BYTES = 4096  # cheaper to send than to name


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
        """What a held share is made of.

        Raises:
            StorageError: it is not held.
        """
        found = next((h.written for h in self._held if _id(h) == (save, rank)), None)
        if found is None:
            raise StorageError(f"step {save.step} rank {rank} is not on this node any more")
        return found

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


@dataclass(frozen=True, slots=True)
class _PassedOn:
    """What of one rank's file goes to all ranks.

    Attributes:
        header: of the file; None where nothing of it is wanted.
        ranges: that some rank wants, each as its begin and end.
    """

    header: bytes | None
    ranges: Sequence[tuple[int, int]]


@dataclass(slots=True)
class NodeRestore:
    """Restores a state from what the nodes hold.

    Attributes:
        node: of this rank.
        checkpoints: of the run, in the store.
        before: (placement, attempt) of now.
        device: where the ranks' messages and bytes go.
        name: of this rank's node, where nodes have copies of each other's shares; else None.
        brought: by rank whose own node lacked its share, the node whose copy it got.
        lacking: what is missing of the newest save that is not whole, for people; empty: nothing.
        num_fetched: shards that this rank read in the store.
    """

    node: NodeShares
    checkpoints: CheckpointStore
    before: tuple[int, int]
    device: torch.device
    name: str | None = None
    brought: dict[int, str] = field(default_factory=dict)
    lacking: str = ""
    num_fetched: int = 0

    def candidates(self) -> list[RestorableSave]:
        """Saves that the nodes hold whole, newest first; the same on every rank."""
        own = [one.model_dump(mode="json") for one in self.node.refresh()]
        held = {
            rank: [NodeShare.model_validate(one) for one in of_rank]
            for rank, of_rank in enumerate(gather_json(own, self.device))
        }
        found = restorable_saves(held, before=self.before)
        self.lacking = lacking_of(held, before=self.before, than=found[0].save if found else None)
        return found

    def bring(self, chosen: RestorableSave) -> RestorableSave | None:
        """Have nodes that are new get the shares of their ranks from the nodes with their copies.

        Collective. A share goes from checkpoint server to checkpoint server, once, and its node
        holds it again. What cannot be had so comes over the process group, in `load`.

        Returns:
            The same save, as the nodes hold it now; None on every rank when they lost a share of
            it meanwhile: look for candidates again.
        """
        if self.name is None or len(by_rank := self._places()) != chosen.save.world_size:
            return chosen
        rank, source = _rank(), None
        holder = chosen.holders[rank]
        if rank not in chosen.local.get(rank, {}) and chosen.local[holder][rank] is Tier.MEMORY:
            source = by_rank[holder]
        brought = self._brought(chosen.save, source) if source is not None else None
        gathered = gather_json(brought, self.device)
        self.brought = {rank: name for rank, name in enumerate(gathered) if name is not None}
        if not self.brought:
            return chosen
        return next((one for one in self.candidates() if one.save == chosen.save), None)

    def _places(self) -> list[RankPlace]:
        own = place_of(self.node.client, self.name or "").model_dump(mode="json")
        return [RankPlace.model_validate(one) for one in gather_json(own, self.device)]

    def _brought(self, save: SaveId, source: RankPlace) -> str | None:
        """The node whose copy this rank's node holds now, None where it could not be had."""
        if source.address is None:
            return None
        try:
            self.node.client.bring(save, _rank(), source.address)
        except StorageError as exc:
            _log.warning(f"the copy on {source.node} comes over the process group: {exc}")
            return None
        return source.node

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
        passed_on = self._agreed(chosen, reads, by_shard, wanted, opened)
        problem = None
        # One after the other, so that no rank holds more than one file of another node.
        for rank in sorted(wanted | opened.keys()):
            shard = _shard(chosen.save, rank)
            file = opened.pop(rank, None)
            if rank in wanted:
                size_bytes = manifest.shards[shard].size_bytes
                source = chosen.holders[rank]
                file = self._received(passed_on[rank], file, source=source, size_bytes=size_bytes)
            if file is not None and rank in needed and problem is None:
                problem = _filled(reads, shard, by_shard[shard], planner, file)
        self.num_fetched += reads.num_fetched
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

    def _agreed(
        self,
        chosen: RestorableSave,
        reads: ShardReads,
        by_shard: Mapping[str, Sequence[tuple[ReadItem, Chunk]]],
        wanted: Iterable[int],
        opened: Mapping[int, Tensor],
    ) -> dict[int, _PassedOn]:
        """By rank of a share that some rank wants, what of it goes to all; the same on every rank.

        Most want little of it: tensors that all ranks hold alike are spread over all files. Of a
        file whose header cannot be read everything is passed on, and who reads it finds out.
        """
        headers: dict[int, bytes] = {}
        own: list[tuple[int, list[tuple[int, int]]]] = []
        for rank in sorted(wanted):
            shard = _shard(chosen.save, rank)
            header = self._header(opened.get(rank), chosen.holders[rank])
            if rank in opened or shard not in by_shard:
                continue
            headers[rank] = header
            try:
                ranges = reads.ranges(shard, by_shard[shard], header)
            except Corrupt:
                ranges = [(0, reads.manifest.shards[shard].size_bytes)]
            own.append((rank, merged(ranges)))
        # One exchange for all shares: one for each would be as many answers as ranks, squared.
        of_share: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for of_rank in gather_json(own, self.device):
            for rank, ranges in of_rank:
                of_share[rank] += [(begin, end) for begin, end in ranges]
        return {rank: _PassedOn(headers.get(rank), merged(of_share[rank])) for rank in wanted}

    def _received(
        self, passed_on: _PassedOn, file: Tensor | None, *, source: int, size_bytes: int
    ) -> Tensor | None:
        """What the ranks want of one rank's file; the others help to pass it on.

        Returns:
            The file, or as much of it as is wanted here; None where nothing is.
        """
        received = None
        if passed_on.header is not None:
            received = torch.empty(size_bytes, dtype=torch.uint8)
            header = torch.frombuffer(bytearray(passed_on.header), dtype=torch.uint8)
            received[: len(header)] = header
        for ranges in in_pieces(passed_on.ranges):
            length = sum(end - begin for begin, end in ranges)
            piece = torch.empty(length, dtype=torch.uint8, device=self.device)
            if source == _rank() and file is not None:
                piece.copy_(torch.cat([file[begin:end] for begin, end in ranges]))
            dist.broadcast(piece, src=source)
            if received is not None:
                parts = torch.split(piece.cpu(), [end - begin for begin, end in ranges])
                for (begin, end), part in zip(ranges, parts, strict=True):
                    received[begin:end] = part
        return file if file is not None else received

    def _header(self, file: Tensor | None, source: int) -> bytes:
        """The header of one rank's file, on every rank."""
        header = b"?"
        if file is not None and source == _rank():
            prefix = bytes(raw(file[: safetensors_file.LENGTH.size]))
            with suppress(Corrupt):
                header = bytes(raw(file[: safetensors_file.header_size_bytes(prefix, url="")]))
        length = torch.tensor([len(header)], device=self.device)
        dist.broadcast(length, src=source)
        padded = bytearray(header.ljust(int(length.item()), b"?")[: int(length.item())])
        data = torch.frombuffer(padded, dtype=torch.uint8).to(self.device)
        dist.broadcast(data, src=source)
        return bytes(raw(data.cpu()))


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges of bytes in order, with those that touch or nearly touch made one. Pure."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted((begin, end) for begin, end in ranges):
        if found and begin <= found[-1][1] + GAP_BYTES:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def in_pieces(ranges: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Ranges of bytes, cut and put together to pieces that are sent at once. Pure."""
    piece: list[tuple[int, int]] = []
    room = PIECE_BYTES
    for begin, end in ranges:
        at = begin
        while at < end:
            stop = min(end, at + room)
            piece.append((at, stop))
            room -= stop - at
            at = stop
            if room == 0:
                yield piece
                piece, room = [], PIECE_BYTES
    if piece:
        yield piece


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


def lacking_of(
    held: Mapping[int, Sequence[NodeShare]], *, before: tuple[int, int], than: SaveId | None
) -> str:
    """What the nodes lack of the newest save that they hold in part, if it is a newer one. Pure.

    Args:
        held: by current rank, what its node holds.
        before: (placement, attempt) of now.
        than: the newest save that they hold whole.
    """
    ranks: defaultdict[SaveId, set[int]] = defaultdict(set)
    for one in (one for shares in held.values() for one in shares if one.save.owner < before):
        ranks[one.save].add(one.rank)
    newest = max(ranks, key=lambda save: (save.step, save.owner), default=None)
    if newest is None or (than is not None and newest.step <= than.step):
        return ""
    missing = sorted(set(range(newest.world_size)) - ranks[newest])
    return f"of step {newest.step} the nodes lack the shares of ranks {named_ranks(missing)}"


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
