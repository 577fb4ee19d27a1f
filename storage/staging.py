"""Which rank saves what, and a rank's share as the bytes of one safetensors file.

torch's planner does the de-duplication of replicas and knows about sharding; the ranks ask each
other only when something has changed since the last save. Sizes are bytes.
"""

from __future__ import annotations

import math
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
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from storage import safetensors_file
from storage.manifest import Chunk
from storage.share import PartOfTensor

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
DTYPE_CODES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}


def save_planner() -> DefaultSavePlanner:
    """A planner that has replicated tensors written once, spread over the ranks."""
    return DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=False
    )


@dataclass(frozen=True, slots=True)
class StagedItem:
    """One item of a rank's plan, and where it goes."""

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
        """Lay out what a plan gives to this rank.

        Raises:
            ValueError: something cannot be saved.
        """
        staged = [StagedItem(i, _chunk_of(i, shard), _resolved(i, planner)) for i in items]
        layout = safetensors_file.plan_layout(
            [(s.chunk.key, DTYPE_CODES[s.tensor.dtype], tuple(s.tensor.shape)) for s in staged]
        )
        return cls(staged, layout)

    @property
    def places(self) -> Places:
        """Where everything goes, without the tensors."""
        return Places([(staged.item, staged.chunk) for staged in self.items], self.layout)

    @property
    def size_bytes(self) -> int:
        """Of the file."""
        return self.layout.size_bytes

    def copy_into(self, out: Tensor) -> None:
        """Write the file.

        Args:
            out: uint8 of at least `size_bytes`, on the host; data on a device has arrived in
                it once the device is synchronized.
        """
        header = self.layout.header
        out[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        on_host = [s for s in self.items if _is_plain(s.tensor)]
        for staged in self.items:
            if not _is_plain(staged.tensor):
                target = self._place_of(staged, out).view(staged.tensor.dtype)
                target.view(staged.tensor.shape).copy_(staged.tensor, non_blocking=True)
        # torch would share each copy out to all cores and wait for the slowest: on cores that
        # have other work too, hundreds of copies took forty times as long as this.
        rest = iter(sorted(on_host, key=lambda staged: -staged.tensor.nbytes))

        def copy() -> None:
            for staged in rest:
                np.copyto(self._place_of(staged, out).numpy(), raw(staged.tensor))

        with ThreadPoolExecutor(COPY_THREADS) as pool:
            for done in [pool.submit(copy) for _ in range(COPY_THREADS)]:
                done.result()

    def _place_of(self, staged: StagedItem, out: Tensor) -> Tensor:
        entry = self.layout.entries[staged.chunk.key]
        return out[entry.begin : entry.end]

    def parts(self) -> dict[str, PartOfTensor]:
        """What of which tensor is in the file."""
        found: dict[str, PartOfTensor] = {}
        for staged in self.items:
            assert staged.item.tensor_data is not None  # noqa: S101 refused before
            name = staged.item.index.fqn
            before = found[name].chunks if name in found else ()
            found[name] = PartOfTensor(
                dtype=DTYPE_CODES[staged.tensor.dtype],
                shape=tuple(staged.item.tensor_data.size),
                chunks=(*before, staged.chunk),
            )
        return found


@dataclass(slots=True)
class SavePlans:
    """Plans the saves of one state, again and again. Collective where a group is initialised.

    Attributes:
        device: where the ranks' votes are exchanged.
        group: of the ranks that save together; None: all.
        is_alone: this rank saves everything by itself.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: dist.ProcessGroup | None = None
    is_alone: bool = False
    _shape: tuple[Any, ...] | None = None
    _items: Sequence[WriteItem] = ()
    _places: dict[str, Places] = field(default_factory=dict)

    def stage(self, state: Mapping[str, Tensor], shard: str) -> Staging:
        """This rank's share of `state`.

        Raises:
            ValueError: something in `state` cannot be saved.
        """
        planner = save_planner()
        alone = self.is_alone or not dist.is_initialized()
        planner.set_up_planner(dict(state), None, alone or dist.get_rank(self.group) == 0)
        local = planner.create_local_plan()
        refuse_objects(local)
        shape = tuple(map(_shape_of, local.items))
        if self._any_rank(changed=shape != self._shape, alone=alone):
            self._items = _agreed(planner, local, alone=alone, group=self.group)
            self._shape = shape
            self._places.clear()
        if shard in self._places:
            return self._places[shard].staging(planner)
        staging = Staging.of(self._items, planner, shard)
        self._places[shard] = staging.places
        return staging

    def _any_rank(self, *, changed: bool, alone: bool) -> bool:
        if alone:
            return changed
        vote = torch.tensor([int(changed)], device=self.device)
        dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self.group)
        return bool(vote.item())


def refuse_objects(plan: SavePlan) -> None:
    """Raise for what is not a tensor.

    Raises:
        ValueError: naming it.
    """
    for item in plan.items:
        if item.type is WriteItemType.BYTE_IO:
            raise ValueError(f"{item.index.fqn} is not a tensor: put it into extra")


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


def _agreed(
    planner: DefaultSavePlanner,
    local: SavePlan,
    *,
    alone: bool,
    group: dist.ProcessGroup | None,
) -> Sequence[WriteItem]:
    """What this rank saves once replicas are spread over the ranks."""
    if alone:
        plans, _ = planner.create_global_plan([local])
        return planner.finish_plan(plans[0]).items
    first = dist.get_rank(group) == 0
    gathered: list[Any] | None = [None] * dist.get_world_size(group) if first else None
    dist.gather_object(local, gathered, group=group, group_dst=0)
    spread: list[Any] | None = None
    if gathered is not None:
        spread, _ = planner.create_global_plan(gathered)
    own: list[Any] = [None]
    dist.scatter_object_list(own, spread, group=group, group_src=0)
    return planner.finish_plan(own[0]).items


def _shape_of(item: WriteItem) -> tuple[Any, ...]:
    data = item.tensor_data
    assert data is not None  # noqa: S101 BYTE_IO items are refused before
    box = data.chunk
    return item.index.fqn, data.properties.dtype, data.size, box.offsets, box.sizes


def _chunk_of(item: WriteItem, shard: str) -> Chunk:
    assert item.tensor_data is not None  # noqa: S101 BYTE_IO items are refused before
    box, size = item.tensor_data.chunk, item.tensor_data.size
    name = item.index.fqn
    if math.prod(box.sizes) != math.prod(size):
        name = f"{name}@{','.join(map(str, box.offsets))}"
    return Chunk(offsets=tuple(box.offsets), lengths=tuple(box.sizes), shard=shard, key=name)


def _resolved(item: WriteItem, planner: SavePlanner) -> Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor)  # noqa: S101 BYTE_IO items are refused before
    if tensor.dtype not in DTYPE_CODES:
        raise ValueError(f"{item.index.fqn}: {tensor.dtype} cannot be saved")
    return tensor.detach()
