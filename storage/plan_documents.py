"""The plans of a save as JSON: ranks unpickle nothing of each other.

A plan goes to the first rank, which spreads what several ranks hold over them; back come the
positions, in a rank's own plan, of the items that it keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)


def plan_document(plan: SavePlan, codes: Mapping[torch.dtype, str]) -> list[Any]:
    """Describe a rank's plan, all of whose items are tensors."""
    return [_item_document(item, codes) for item in plan.items]


def _item_document(item: WriteItem, codes: Mapping[torch.dtype, str]) -> list[Any]:
    data, offset = item.tensor_data, item.index.offset
    assert data is not None  # noqa: S101 others are refused before
    return [
        item.index.fqn,
        None if offset is None else list(offset),
        item.type.value,
        list(data.chunk.offsets),
        list(data.chunk.sizes),
        list(data.size),
        codes[data.properties.dtype],
    ]


def plan_of(document: list[Any], dtypes: Mapping[str, torch.dtype]) -> SavePlan:
    """Return the plan that a document describes."""
    return SavePlan([_item_of(fields, dtypes) for fields in document])


def _item_of(fields: list[Any], dtypes: Mapping[str, torch.dtype]) -> WriteItem:
    name, offset, kind, offsets, sizes, size, dtype = fields
    return WriteItem(
        index=MetadataIndex(name, offset),
        type=WriteItemType(kind),
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
            properties=TensorProperties(dtype=dtypes[dtype]),
            size=torch.Size(size),
        ),
    )


def positions(part: SavePlan, plan: SavePlan) -> list[int]:
    """Return where in a plan the items are that are kept of it."""
    place = {item.index: position for position, item in enumerate(plan.items)}
    return [place[item.index] for item in part.items]
