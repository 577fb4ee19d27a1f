"""Sharded save and load through torch.distributed.checkpoint planners.

Each rank writes one safetensors file; the coordinator writes the manifest. torch's planners do the
de-duplication of replicas and the resharding. Only tensors: everything else belongs into `extra`,
which is JSON. Nothing read from storage is unpickled. Sizes are bytes.

`save` and `load` are collective: with a process group every rank of it must call them. The group
must carry CPU objects (gloo); without an initialised group they work in one process.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, override

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
