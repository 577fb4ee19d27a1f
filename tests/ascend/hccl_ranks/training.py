"""Trains a small model; the losses and the digest of what it has learned are the result.

Arguments: `cpu` or `npu`, then `ddp`, `fsdp2` or `hsdp`.
"""

from __future__ import annotations

import gc
import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.ascend.hccl_ranks.meeting import RANK, SIZE, join, say

NUM_STEPS = 8
BATCH = 16
FEATURES = 33
CLASSES = 10


def model_of(device: torch.device, parallelism: str) -> nn.Module:
    """The model, as this kind of parallelism has it."""
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, 127), nn.GELU(), nn.LayerNorm(127), nn.Linear(127, 65)]
    model = nn.Sequential(*layers, nn.GELU(), nn.Linear(65, CLASSES)).to(device)
    if parallelism == "ddp":
        return DistributedDataParallel(model)
    shape = (SIZE,) if parallelism == "fsdp2" else (2, SIZE // 2)
    names = ("shard",) if parallelism == "fsdp2" else ("replicate", "shard")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def digest(model: nn.Module) -> str:
    """Of this rank's part of the parameters, as hexadecimal digits."""
    bits = hashlib.sha256()
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        bits.update(local.detach().cpu().numpy().tobytes())
    return bits.hexdigest()


def main() -> None:
    """Train."""
    kind, parallelism = sys.argv[1:]
    device = torch.device("cpu")
    if kind == "npu":
        device = torch.device("npu", RANK % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device.index)
    join("hccl" if kind == "npu" else "gloo")
    model = model_of(device, parallelism)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    generator = torch.Generator().manual_seed(RANK)
    losses = []
    for _ in range(NUM_STEPS):
        x_BF = torch.randn(BATCH, FEATURES, generator=generator).to(device)  # noqa: N806
        y_B = torch.randint(0, CLASSES, (BATCH,), generator=generator).to(device)  # noqa: N806
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x_BF), y_B)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.item()).hex())
    learned = digest(model)
    # DDP's reducer holds the group. If it goes last, it joins gloo's threads under the GIL, which
    # one of them may want: 2 of 20 runs hung there for ever (torch 2.13.0, pytorch/pytorch#56297).
    del model, optimizer, loss
    gc.collect()
    dist.destroy_process_group()
    say({"losses": losses, "learned": learned})


if __name__ == "__main__":
    main()
