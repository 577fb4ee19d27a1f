"""Pretrain a small GPT on one text file: a program as people have it, that knows no Perdure.

    torchrun --nproc_per_node=2 train.py --data input.txt --out out --max-iters 200

It keeps its own checkpoint, and resumes by its own condition: whether that file is there.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, required=True)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--max-iters", type=int, default=200)
parser.add_argument("--save-every", type=int, default=10)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--block-size", type=int, default=32)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--pause-s", type=float, default=0.0, help="in every iteration, to watch it")
args = parser.parse_args()


class GPT(nn.Module):
    """Two attention blocks over bytes."""

    def __init__(self, width: int, block_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(block_size, width)
        block = nn.TransformerEncoderLayer(width, 2, 4 * width, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 2)
        self.head = nn.Linear(width, 256)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean loss of predicting each next byte."""
        length = inputs.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=inputs.device)
        hidden = self.tokens(inputs) + self.positions(torch.arange(length, device=inputs.device))
        logits = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
is_first = rank == 0
data = torch.frombuffer(bytearray(args.data.read_bytes()), dtype=torch.uint8).long()
checkpoint = args.out / "ckpt.pt"
args.out.mkdir(parents=True, exist_ok=True)

torch.manual_seed(1337)
model = DistributedDataParallel(GPT(args.width, args.block_size))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
iteration = 0
if checkpoint.exists():
    state = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    iteration = state["iteration"]
    if is_first:
        print(f"resuming from iteration {iteration}", flush=True)


def get_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The number-th micro-batch of this rank; the same whenever it is asked for."""
    drawn = torch.Generator().manual_seed(number * world_size + rank)
    size = (args.batch_size,)
    starts = torch.randint(len(data) - args.block_size - 1, size, generator=drawn).tolist()
    rows = torch.stack([data[start : start + args.block_size + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


while iteration < args.max_iters:
    began_s = time.perf_counter()
    for micro in range(args.accumulate):
        model.require_backward_grad_sync = micro == args.accumulate - 1
        loss = model(*get_batch(iteration * args.accumulate + micro)) / args.accumulate
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iteration += 1
    time.sleep(args.pause_s)
    if is_first:
        took_ms = 1000 * (time.perf_counter() - began_s)
        shown = loss.item() * args.accumulate
        print(f"iter {iteration}: loss {shown:.4f}, time {took_ms:.0f}ms", flush=True)
    if iteration % args.save_every == 0 and is_first:
        # Written under another name first: a process that is killed leaves no half checkpoint.
        part = checkpoint.with_suffix(".part")
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "iteration": iteration,
            },
            part,
        )
        os.replace(part, checkpoint)  # noqa: PTH105 as people write it
dist.destroy_process_group()
