"""Split of a state over the ranks, and a rank's share as the bytes of one safetensors file.

torch's planner removes duplicates of replicas and knows about sharding; the ranks exchange plans
only when something has changed since the last save. Sizes are bytes.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from perdure.storage import safetensors_file
from perdure.storage.manifest import Chunk, TensorRecord
from perdure.storage.plan_documents import plan_document, plan_of, positions

COPY_THREADS = min(4, os.cpu_count() or 1)

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
}
_REFUSED = 2  # a vote; 1: the plan has changed
DTYPE_CODES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StagedItem:
    """An item of a rank's plan, and its place in the file."""

    item: WriteItem
    chunk: Chunk
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Places:
    """A layout that is good for every save of the same plan."""

    items: Sequence[tuple[WriteItem, Chunk]]
    layout: safetensors_file.Layout

    def staging(self, planner: SavePlanner) -> Staging:
        """The tensors as they are now, in their places."""
        staged = [StagedItem(item, chunk, _resolved(item, planner)) for item, chunk in self.items]
        return Staging(staged, self.layout)


@dataclass(frozen=True, slots=True)
class Staging:
    """A rank's share, laid out; the tensors are still where they were."""

    items: Sequence[StagedItem]
    layout: safetensors_file.Layout

    @classmethod
    def of(cls, items: Sequence[WriteItem], planner: SavePlanner, shard: str) -> Staging:
        """Lay out what a plan gives to this rank."""
        staged = [StagedItem(i, _chunk_of(i, shard), _resolved(i, planner)) for i in items]
        layout = safetensors_file.plan_layout(
            [(s.chunk.key, DTYPE_CODES[s.tensor.dtype], tuple(s.tensor.shape)) for s in staged]
        )
        return cls(staged, layout)

    @property
    def places(self) -> Places:
        """Places of the items, without the tensors."""
        return Places([(staged.item, staged.chunk) for staged in self.items], self.layout)

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self.layout.size_bytes

    def copy_into(self, memory: mmap.mmap | bytearray) -> None:
        """Write the file.

        Args:
            memory: of at least `size_bytes`; data on a device has arrived in it once the device
                is synchronized.
        """
        out = torch.frombuffer(memory, dtype=torch.uint8)
        header = self.layout.header
        out[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        on_host = [s for s in self.items if _is_plain(s.tensor)]
        for staged in self.items:
            if not _is_plain(staged.tensor):
                target = self._place_of(staged, out).view(staged.tensor.dtype)
                target.view(staged.tensor.shape).copy_(staged.tensor, non_blocking=True)
        # torch would share each copy out to all cores and wait for the slowest: on cores that
        # have other work too, hundreds of copies took forty times as long as this.
        remaining = iter(sorted(on_host, key=lambda staged: -staged.tensor.nbytes))

        def copy() -> None:
            for staged in remaining:
                np.copyto(self._place_of(staged, out).numpy(), raw(staged.tensor))

        with ThreadPoolExecutor(COPY_THREADS) as pool:
            for done in [pool.submit(copy) for _ in range(COPY_THREADS)]:
                done.result()

    def _place_of(self, staged: StagedItem, out: Tensor) -> Tensor:
        entry = self.layout.entries[staged.chunk.key]
        return out[entry.begin : entry.end]

    def parts(self) -> dict[str, TensorRecord]:
        """Records of the tensors in the file, with the chunks that lie in it."""
        records: dict[str, TensorRecord] = {}
        for staged in self.items:
            assert staged.item.tensor_data is not None  # noqa: S101 refused before
            name = staged.item.index.fqn
            chunks = records[name].chunks if name in records else ()
            records[name] = TensorRecord(
                dtype=DTYPE_CODES[staged.tensor.dtype],
                shape=tuple(staged.item.tensor_data.size),
                chunks=(*chunks, staged.chunk),
            )
        return records


@dataclass(slots=True)
class SavePlans:
    """Plans the saves of one state, again and again. Collective where a group is initialised.

    Attributes:
        device: device that carries the ranks' votes.
        group: process group of the ranks that save together; None: all.
        is_alone: this rank saves everything by itself.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: dist.ProcessGroup | None = None
    is_alone: bool = False
    _shape: tuple[Any, ...] | None = None
    _items: Sequence[WriteItem] = ()
    _places: dict[str, Places] = field(default_factory=dict)

    def stage(self, state: Mapping[str, Tensor], shard: str) -> Staging:
        """Stage this rank's share of `state`.

        Raises:
            ValueError: something in `state` cannot be saved.
        """
        # Replicated tensors are written once, spread over the ranks.
        planner = DefaultSavePlanner(
            flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=False
        )
        planner.set_up_planner(dict(state), None, self._is_first)
        local = planner.create_local_plan()
        problem = _problem_of(local)
        shape = tuple(map(_shape_of, local.items)) if problem is None else None
        vote = _REFUSED if problem is not None else int(shape != self._shape)
        highest = self._highest(vote)
        if highest == _REFUSED:
            raise ValueError(problem or "another rank has what cannot be saved")
        if highest:
            self._items = self._agreed(planner, local)
            self._shape = shape
            self._places.clear()
        if shard in self._places:
            return self._places[shard].staging(planner)
        staging = Staging.of(self._items, planner, shard)
        self._places[shard] = staging.places
        return staging

    def gather_json(self, document: Any) -> list[Any]:
        """Gather a document of every rank, by its rank in the group."""
        return [document] if self._alone else gather_json(document, self.device, self.group)

    def gather_to_first(self, document: Any) -> list[Any] | None:
        """Gather a document of every rank on the first rank; None on the others."""
        if self._alone:
            return [document]
        return gather_json_to_first(document, self.device, self.group)

    @property
    def _alone(self) -> bool:
        return self.is_alone or not dist.is_initialized()

    @property
    def _is_first(self) -> bool:
        return self._alone or dist.get_rank(self.group) == 0

    def _highest(self, vote: int) -> int:
        if self._alone:
            return vote
        votes = torch.tensor([vote], device=self.device)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.group)
        return int(votes.item())

    def _agreed(self, planner: DefaultSavePlanner, local: SavePlan) -> Sequence[WriteItem]:
        """Agree on the items that this rank saves once replicas are spread over the ranks."""
        gathered = self.gather_to_first(plan_document(local, DTYPE_CODES))
        answers = None if gathered is None else _spread(planner, gathered)
        if self._alone:
            (answer,) = answers or [None]
        else:
            answer = scatter_json(answers, self.device, self.group)
        if isinstance(answer, str):
            raise ValueError(answer)  # noqa: TRY004 what the first rank says
        return planner.finish_plan(SavePlan([local.items[place] for place in answer])).items


def _spread(planner: DefaultSavePlanner, gathered: Sequence[Any]) -> list[Any]:
    """Return the positions of the items that each rank keeps, or to all of them why not."""
    plans = [plan_of(document, DTYPES) for document in gathered]
    try:
        spread, _ = planner.create_global_plan(plans)
    except ValueError as exc:  # the other ranks wait for an answer
        return [str(exc)] * len(plans)
    return [positions(part, plan) for part, plan in zip(spread, plans, strict=True)]


def _problem_of(plan: SavePlan) -> str | None:
    """Why something in a plan cannot be saved, else None."""
    for item in plan.items:
        if item.tensor_data is None:
            return f"{item.index.fqn} is not a tensor: put it into extra"
        if item.tensor_data.properties.dtype not in DTYPE_CODES:
            return f"{item.index.fqn}: {item.tensor_data.properties.dtype} cannot be saved"
    return None


def _is_plain(tensor: Tensor) -> bool:
    """Whether its memory holds its values in order, here."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    flat = tensor.reshape(-1).view(torch.uint8)
    return flat.numpy().data if flat.numel() else memoryview(b"")


@dataclass(frozen=True, slots=True)
class GroupRanks:
    """The ranks of the default process group; a process without one is alone.

    Attributes:
        device: device that carries the bytes of what they say.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def rank(self) -> int:
        """See `Ranks.rank`."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def world_size(self) -> int:
        """See `Ranks.world_size`."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def gather(self, document: Any) -> list[Any]:
        """See `Ranks.gather`."""
        return gather_json(document, self.device)


def gather_json(
    document: Any, device: torch.device, group: dist.ProcessGroup | None = None
) -> list[Any]:
    """JSON of every rank, by its rank in the group. Collective.

    Args:
        document: JSON document of this rank.
        device: device that carries the bytes.
        group: None: all ranks.
    """
    if not dist.is_initialized():
        return [document]
    data = _json_bytes(document)
    sizes = _gather_sizes(data, device, group)
    padded = _padded(data, max(sizes), device)
    gathered = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return [_json_of(*rank_data) for rank_data in zip(gathered, sizes, strict=True)]


def gather_json_to_first(
    document: Any, device: torch.device, group: dist.ProcessGroup | None
) -> list[Any] | None:
    """`gather_json` for the first rank of a group alone; None on the others. Collective."""
    data = _json_bytes(document)
    sizes = _gather_sizes(data, device, group)
    padded = _padded(data, max(sizes), device)
    is_first = dist.get_rank(group) == 0
    gathered = [torch.zeros_like(padded) for _ in sizes] if is_first else None
    # torch_npu's gather takes no group_dst (2.13.0).
    first = 0 if group is None else dist.get_global_rank(group, 0)
    dist.gather(padded, gathered, dst=first, group=group)
    if gathered is None:
        return None
    return [_json_of(*rank_data) for rank_data in zip(gathered, sizes, strict=True)]


def scatter_json(
    documents: Sequence[Any] | None, device: torch.device, group: dist.ProcessGroup | None
) -> Any:
    """Give every rank of a group its document of the first rank's. Collective.

    Args:
        documents: one for each rank, by its rank in the group; None on all ranks but the first.
        device: device that carries the bytes.
        group: None: all ranks.
    """
    parts = None if documents is None else [_json_bytes(document) for document in documents]
    longest = 0 if parts is None else max(part.numel() for part in parts)
    size = torch.tensor([longest], device=device)
    dist.broadcast(size, group=group, group_src=0)
    # JSON may end with blanks, so that no rank needs the length of its own.
    padded = None if parts is None else [_padded(part, longest, device) for part in parts]
    received = torch.zeros(int(size.item()), dtype=torch.uint8, device=device)
    dist.scatter(received, padded, group=group, group_src=0)
    return _json_of(received, received.numel())


def _json_bytes(document: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)


def _gather_sizes(
    data: Tensor, device: torch.device, group: dist.ProcessGroup | None
) -> Sequence[int]:
    size = torch.tensor([data.numel()], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    return [int(rank_size.item()) for rank_size in sizes]


def _padded(data: Tensor, size_bytes: int, device: torch.device) -> Tensor:
    padded = torch.full((size_bytes,), ord(" "), dtype=torch.uint8, device=device)
    padded[: data.numel()] = data.to(device)
    return padded


def _json_of(data: Tensor, size_bytes: int) -> Any:
    return json.loads(raw(data[:size_bytes].cpu()).tobytes())


def _shape_of(item: WriteItem) -> tuple[Any, ...]:
    data = item.tensor_data
    assert data is not None  # noqa: S101 others are refused before
    box = data.chunk
    return item.index.fqn, data.properties.dtype, data.size, box.offsets, box.sizes


def _chunk_of(item: WriteItem, shard: str) -> Chunk:
    assert item.tensor_data is not None  # noqa: S101 others are refused before
    box, size = item.tensor_data.chunk, item.tensor_data.size
    name = item.index.fqn
    if math.prod(box.sizes) != math.prod(size):
        name = f"{name}@{','.join(map(str, box.offsets))}"
    return Chunk(offsets=tuple(box.offsets), lengths=tuple(box.sizes), shard=shard, key=name)


def _resolved(item: WriteItem, planner: SavePlanner) -> Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor)  # noqa: S101 others are refused before
    return tensor.detach()
