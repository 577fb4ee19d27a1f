"""What ranks tell each other beside tensors: JSON over the process group. Collective."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from storage.staging import raw


def gather_json(
    document: Any, device: torch.device, group: dist.ProcessGroup | None = None
) -> list[Any]:
    """What every rank says, by its rank in the group; None: of all ranks."""
    if not dist.is_initialized():
        return [document]
    data = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
    size = torch.tensor([data.numel()], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    longest = max(int(one.item()) for one in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: data.numel()] = data.to(device)
    gathered = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return [
        json.loads(raw(one[: int(length.item())].cpu()).tobytes())
        for one, length in zip(gathered, sizes, strict=True)
    ]
