"""What every program begins with: its rank, and a group over gloo beside HCCL."""

from __future__ import annotations

import datetime as dt
import json
import os
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from tests.ascend.hccl_ranks import LIMIT_S

RANK = int(os.environ["RANK"])
SIZE = int(os.environ["WORLD_SIZE"])
LIMIT = dt.timedelta(seconds=LIMIT_S)


def join(backend: str) -> None:
    """Make the default group of all ranks."""
    store = FileStore(os.environ["STORE"], SIZE)
    dist.init_process_group(backend, store=store, rank=RANK, world_size=SIZE, timeout=LIMIT)


def shared(value: Any) -> Any:
    """Rank 0's value, on all ranks, over gloo."""
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def say(result: Any) -> None:
    """Print the program's result."""
    print(json.dumps(result), flush=True)
