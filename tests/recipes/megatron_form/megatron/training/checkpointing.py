"""Megatron's own saves, in the least form: a file of each rank, and a tracker written last."""

from __future__ import annotations

from pathlib import Path

import torch

from .global_vars import get_args


def save_checkpoint(iteration, model, optimizer, opt_param_scheduler, *_further) -> None:
    args = get_args()
    folder = Path(args.save) / f"iter_{iteration:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    weights = [chunk.state_dict() for chunk in model]
    torch.save(weights, folder / f"rank_{torch.distributed.get_rank()}.pt")
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (Path(args.save) / "latest_checkpointed_iteration.txt").write_text(str(iteration))
