"""The reference model under DDP as a program has it that knows no Perdure.

Argument: the number of steps. In each, two micro-batches, gradients clipped, and the mean loss of
all ranks for the log, as in the job that `tests.ascend.product` runs. The sequence of calls is what
matters here, so the tokens are random.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from perdure.training.config.model import ModelSpec
from perdure.training.trainer.model import Decoder
from tests.ascend.hccl_ranks.meeting import RANK, join, say

MODEL = ModelSpec(num_layers=2, hidden_size=32, num_heads=2, seq_len=32, dropout=0.0)
VOCABULARY = 257
MICRO_BATCHES = 2


def main() -> None:
    """Train."""
    device = torch.device("npu", RANK % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    join("hccl")
    torch.manual_seed(0)
    model = DistributedDataParallel(Decoder(MODEL, VOCABULARY).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    drawn = torch.Generator().manual_seed(RANK)
    losses = []
    for _ in range(int(sys.argv[1])):
        total = torch.zeros((), device=device)
        for number in range(MICRO_BATCHES):
            tokens = torch.randint(VOCABULARY, (1, MODEL.seq_len + 1), generator=drawn).to(device)
            model.require_backward_grad_sync = number == MICRO_BATCHES - 1
            loss = model(tokens[:, :-1], tokens[:, 1:]).mean() / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        losses.append(float(total.item()))
    dist.destroy_process_group()
    say({"losses": losses})


if __name__ == "__main__":
    with sdpa_kernel(SDPBackend.MATH):
        main()
