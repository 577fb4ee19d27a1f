"""Pretrain a small GPT in the launch form of Megatron-LM's pretrain_gpt.py, MindSpeed-LLM's too.

    torchrun --nproc_per_node=2 pretrain_gpt.py --save ckpt --load ckpt --data-path input.txt

A program that knows no Perdure, with Megatron's arguments, log line and checkpoints, of which
latest_checkpointed_iteration.txt is written last, by rank 0. `--load` of a folder without one
begins anew. With --use-layer-wise-distributed-optimizer each rank saves its part of the optimizer.
"""

import argparse
import time
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--num-layers", type=int, default=2)
parser.add_argument("--hidden-size", type=int, default=32)
parser.add_argument("--num-attention-heads", type=int, default=2)
parser.add_argument("--seq-length", type=int, default=32)
parser.add_argument("--micro-batch-size", type=int, default=2)
parser.add_argument("--global-batch-size", type=int, default=8)
parser.add_argument("--train-iters", type=int, default=200)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--clip-grad", type=float, default=1.0)
parser.add_argument("--seed", type=int, default=1234)
parser.add_argument("--data-path", type=Path, required=True)
parser.add_argument("--save", type=Path)
parser.add_argument("--load", type=Path)
parser.add_argument("--save-interval", type=int, default=10)
parser.add_argument("--log-interval", type=int, default=1)
parser.add_argument("--use-layer-wise-distributed-optimizer", action="store_true")
parser.add_argument("--distributed-backend", default="gloo")
parser.add_argument("--pause-s", type=float, default=0.0, help="in every iteration, to watch it")
args = parser.parse_args()
FOLDER = "iter_{:07d}/mp_rank_00"
FILE = "model_optim_rng.pt"
TRACKER = "latest_checkpointed_iteration.txt"


class GPT(nn.Module):
    """Attention blocks over bytes."""

    def __init__(self) -> None:
        super().__init__()
        width, heads = args.hidden_size, args.num_attention_heads
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(args.seq_length, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, args.num_layers)
        self.head = nn.Linear(width, 256)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean loss of predicting each next byte."""
        length = inputs.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.tokens(inputs) + self.positions(torch.arange(length))
        logits = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


dist.init_process_group(args.distributed_backend)
rank, world_size = dist.get_rank(), dist.get_world_size()
data = torch.frombuffer(bytearray(args.data_path.read_bytes()), dtype=torch.uint8).long()
torch.manual_seed(args.seed)
model = DistributedDataParallel(GPT())
own_file = f"layer_wise_optimizer_{rank}.pt"
if args.use_layer_wise_distributed_optimizer:
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=args.lr)
    own_optimizer = optimizer.optim
else:
    optimizer = own_optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
# As Megatron-LM does: the largest iteration that any rank's folder names is that of all.
tracker = args.load / TRACKER if args.load is not None else None
found = torch.tensor(int(tracker.read_text()) if tracker is not None and tracker.exists() else 0)
dist.all_reduce(found, dist.ReduceOp.MAX)
iteration = int(found)
if iteration:
    folder = args.load / FOLDER.format(iteration)
    state = torch.load(folder / FILE, weights_only=True)
    model.load_state_dict(state["model"])
    own = "optimizer" not in state
    own_optimizer.load_state_dict(
        torch.load(folder / own_file, weights_only=True) if own else state["optimizer"]
    )
    if rank == 0:
        print(f"  successfully loaded checkpoint from {args.load} at iteration {iteration}")
accumulate = args.global_batch_size // (args.micro_batch_size * world_size)


def get_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The number-th micro-batch of this rank; the same whenever it is asked for."""
    drawn = torch.Generator().manual_seed(number * world_size + rank)
    size, length = (args.micro_batch_size,), args.seq_length
    starts = torch.randint(len(data) - length - 1, size, generator=drawn).tolist()
    rows = torch.stack([data[start : start + length + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


while iteration < args.train_iters:
    began_s, total = time.perf_counter(), 0.0
    for micro in range(accumulate):
        model.require_backward_grad_sync = micro == accumulate - 1
        loss = model(*get_batch(iteration * accumulate + micro)) / accumulate
        loss.backward()
        total += loss.item()
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad).item()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iteration += 1
    time.sleep(args.pause_s)
    took_ms = 1000 * (time.perf_counter() - began_s)
    if iteration % args.log_interval == 0 and rank == world_size - 1:
        now = f"{datetime.now():%Y-%m-%d %H:%M:%S}"  # noqa: DTZ005 local time, as Megatron has it
        print(
            f" [{now}] iteration {iteration:8d}/{args.train_iters:8d} |"
            f" consumed samples: {iteration * args.global_batch_size:12d} |"
            f" elapsed time per iteration (ms): {took_ms:.1f} | learning rate: {args.lr:.6E} |"
            f" global batch size: {args.global_batch_size:5d} | lm loss: {total:.6E} |"
            f" loss scale: 1.0 | grad norm: {grad_norm:.3f} |"
        )
    if args.save is not None and iteration % args.save_interval == 0:
        folder = args.save / FOLDER.format(iteration)
        folder.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": own_optimizer.state_dict()}
        if args.use_layer_wise_distributed_optimizer:
            torch.save(state.pop("optimizer"), folder / own_file)
        if rank == 0:
            torch.save(state, folder / FILE)
        dist.barrier()
        if rank == 0:
            (args.save / TRACKER).write_text(str(iteration))
        dist.barrier()
dist.destroy_process_group()
