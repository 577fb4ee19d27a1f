"""Restoring tensors from the nodes' own memory and disks, and from the store with their help.

Collective, as the choice of the save is (node_saves.py). Sizes are bytes.
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
from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.errors import Corrupt, StorageError
from perdure.storage.loading import ManifestReader, ShardReads, load
from perdure.storage.manifest import Chunk, Manifest
from perdure.storage.node_saves import NodeSaves, NodeShares, share_id
from perdure.storage.restorable import RestorableSave
from perdure.storage.share import SaveId
from perdure.storage.staging import GroupRanks, raw

_log = logging.getLogger("perdure.storage")

PIECE_BYTES = 64 * 2**20
GAP_BYTES = 4096  # cheaper to send than to name


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
class NodeRestore(NodeSaves):
    """Restores tensors from what the nodes hold; ranks pass on what other nodes lack.

    Attributes:
        device: device that carries the ranks' bytes.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def load(
        self, chosen: RestorableSave, state_of: Callable[[Manifest], Mapping[str, Tensor]]
    ) -> Manifest | None:
        """See `NodeSaves.load`."""
        manifest = self.manifest_of(chosen)
        reads = ShardReads(self.checkpoints, manifest)
        planner, by_shard = planned(state_of(manifest), reads)
        needed = {r for r in chosen.holders if _shard(chosen.save, r) in by_shard}
        local = chosen.local.get(self.ranks.rank, {})
        remote = [set(r) for r in self.ranks.gather(sorted(needed - local.keys()))]
        wanted = set().union(*remote)
        giving = {rank for rank in wanted if chosen.holders[rank] == self.ranks.rank}
        opened = self._opened(chosen, (needed & local.keys()) | giving)
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
                problem = _filled(self.ranks.rank, reads, shard, by_shard[shard], planner, file)
        self.num_fetched += reads.num_fetched
        problems = [rank_problem for rank_problem in self.ranks.gather(problem) if rank_problem]
        if problems:
            raise Corrupt(problems[0])
        return manifest

    def held_of(self, manifest: Manifest, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `NodeSaves.held_of`."""
        _, wanted = planned(state, ShardReads(self.checkpoints, manifest))
        files: dict[str, Tensor] = {}
        for shard, held in self.node.named(manifest).items():
            if shard not in wanted:
                continue
            try:
                files[shard] = _tensor(self.node.read(*share_id(held), held.tier))
            except StorageError as exc:
                _log.info(str(exc))
        return files

    def _opened(self, chosen: RestorableSave, ranks: Iterable[int]) -> dict[int, Tensor] | None:
        files = self.open(chosen, ranks)
        return None if files is None else {rank: _tensor(file) for rank, file in files.items()}

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
        for of_rank in self.ranks.gather(needs):
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
            if source == self.ranks.rank and file is not None:
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
        if file is not None and source == self.ranks.rank:
            prefix = bytes(raw(file[: safetensors_file.LENGTH.size]))
            with suppress(Corrupt):
                header = bytes(raw(file[: safetensors_file.header_size_bytes(prefix, url="")]))
        length = torch.tensor([len(header)], device=self.device)
        dist.broadcast(length, src=source)
        padded = bytearray(header.ljust(int(length.item()), b"?")[: int(length.item())])
        data = torch.frombuffer(padded, dtype=torch.uint8).to(self.device)
        dist.broadcast(data, src=source)
        return bytes(raw(data.cpu()))


@dataclass(frozen=True, slots=True)
class TensorReader:
    """Reads states of torch tensors.

    Attributes:
        device: device that carries the ranks' messages and bytes.
    """

    device: torch.device

    def nodes(
        self,
        shares: NodeShares,
        checkpoints: CheckpointStore,
        owner: tuple[int, int],
        name: str | None,
        announce: str,
    ) -> NodeSaves:
        """Make what restores tensors from the nodes."""
        ranks = GroupRanks(self.device)
        return NodeRestore(shares, checkpoints, owner, ranks, name, announce, device=self.device)

    def load(
        self,
        state: Mapping[str, Tensor],
        manifest: Manifest,
        *,
        checkpoints: CheckpointStore,
        held: Mapping[str, Tensor],
        verify: frozenset[str],
    ) -> int:
        """Fill tensors from a committed checkpoint."""
        return load(state, manifest, checkpoints=checkpoints, held=held, verify=verify)


def _tensor(file: memoryview) -> Tensor:
    return torch.frombuffer(file, dtype=torch.uint8)


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
    rank: int,
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
        return f"rank {rank}: {exc}"
    return None


def _shard(save: SaveId, rank: int) -> str:
    return save.shard(rank)
