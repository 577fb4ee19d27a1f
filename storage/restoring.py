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
from perdure.storage.loading import ManifestReader, ShardReads
from perdure.storage.manifest import Chunk, Manifest, digest
from perdure.storage.partnering import RankPlace, place_of
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
from perdure.storage.staging import gather_json, raw

_log = logging.getLogger("perdure.storage")

PIECE_BYTES = 64 * 2**20
GAP_BYTES = 4096  # cheaper to send than to name


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
        self._held = [h for h in shares if h.tier is Tier.MEMORY or _id(h) not in self._damaged]
        return [NodeShare(save=_id(h)[0], rank=_id(h)[1], tier=h.tier) for h in self._held]

    def written(self, save: SaveId, rank: int) -> WrittenShare:
        """Record of a held share.

        Raises:
            StorageError: it is not held.
        """
        written = next((h.written for h in self._held if _id(h) == (save, rank)), None)
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
    """Parts of one rank's file that go to all ranks.

    Attributes:
        header: bytes of the file's header; None where no rank wants the file.
        ranges: bytes that some rank wants, each as begin and end.
    """

    header: bytes | None
    ranges: Sequence[tuple[int, int]]


@dataclass(slots=True)
class NodeRestore:
    """Restores a state from what the nodes hold.

    Attributes:
        node: shares of this rank's node.
        checkpoints: checkpoints of the run, in the store.
        owner: (placement, attempt) of this attempt.
        device: device that carries the ranks' messages and bytes.
        name: name of this rank's node where nodes copy each other's shares; else None.
        brought: node that gave its copy, by rank whose node lacked the share.
        lacking: shares missing of the newest save, for people; empty when it is whole.
        num_fetched: shards that this rank read in the store.
    """

    node: NodeShares
    checkpoints: CheckpointStore
    owner: tuple[int, int]
    device: torch.device
    name: str | None = None
    brought: dict[int, str] = field(default_factory=dict)
    lacking: str = ""
    num_fetched: int = 0

    def candidates(self) -> list[RestorableSave]:
        """Saves that the nodes hold whole, newest first; the same on every rank."""
        node_shares = [share.model_dump(mode="json") for share in self.node.refresh()]
        held = {
            rank: [NodeShare.model_validate(share_json) for share_json in of_rank]
            for rank, of_rank in enumerate(gather_json(node_shares, self.device))
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
        rank, source = _rank(), None
        holder = chosen.holders[rank]
        if rank not in chosen.local.get(rank, {}) and chosen.local[holder][rank] is Tier.MEMORY:
            source = by_rank[holder]
        brought = self._brought(chosen.save, source) if source is not None else None
        gathered = gather_json(brought, self.device)
        self.brought = {rank: name for rank, name in enumerate(gathered) if name is not None}
        if not self.brought:
            return chosen
        return next((save for save in self.candidates() if save.save == chosen.save), None)

    def _places(self) -> list[RankPlace]:
        place = place_of(self.node.client, self.name or "").model_dump(mode="json")
        return [
            RankPlace.model_validate(place_json) for place_json in gather_json(place, self.device)
        ]

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
        problems = [
            rank_problem for rank_problem in gather_json(problem, self.device) if rank_problem
        ]
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
        written = [
            self.node.written(chosen.save, rank).model_dump(mode="json")
            for rank, holder in chosen.holders.items()
            if holder == _rank()
        ]
        gathered = gather_json(written, self.device)
        shares = [
            WrittenShare.model_validate(written_json)
            for of_rank in gathered
            for written_json in of_rank
        ]
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
        """Agree on the parts of each wanted share that go to all ranks; the same on every rank.

        Most want little of it: tensors that all ranks hold alike are spread over all files. A
        file whose header cannot be read is passed on whole, and its reader finds out.
        """
        headers: dict[int, bytes] = {}
        needs: list[tuple[int, list[tuple[int, int]]]] = []
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
            needs.append((rank, merged(ranges)))
        # One exchange for all shares: one for each would be as many answers as ranks, squared.
        of_share: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for of_rank in gather_json(needs, self.device):
            for rank, ranges in of_rank:
                of_share[rank] += [(begin, end) for begin, end in ranges]
        return {rank: _PassedOn(headers.get(rank), merged(of_share[rank])) for rank in wanted}

    def _received(
        self, passed_on: _PassedOn, file: Tensor | None, *, source: int, size_bytes: int
    ) -> Tensor | None:
        """Receive the wanted parts of one rank's file; all ranks help to pass it on.

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
    merged_ranges: list[tuple[int, int]] = []
    for begin, end in sorted((begin, end) for begin, end in ranges):
        if merged_ranges and begin <= merged_ranges[-1][1] + GAP_BYTES:
            merged_ranges[-1] = (merged_ranges[-1][0], max(end, merged_ranges[-1][1]))
        else:
            merged_ranges.append((begin, end))
    return merged_ranges


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
    """Plan the reads of `state` from a checkpoint, by shard, with the planner that places them."""
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
