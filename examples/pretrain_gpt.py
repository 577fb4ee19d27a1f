"""Pretrain a small GPT in the launch form of Megatron-LM's pretrain_gpt.py, MindSpeed-LLM's too.

    torchrun --nproc_per_node=2 pretrain_gpt.py --save ckpt --load ckpt --data-path input.txt

A program that knows no Perdure, with Megatron's arguments, log line and checkpoints; rank 0 writes
the tracker last. With --use-layer-wise-distributed-optimizer each rank saves its part of AdamW.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

parser = argparse.ArgumentParser()
for name, usual in {
    "num-layers": 2, "hidden-size": 32, "num-attention-heads": 2, "seq-length": 32, "seed": 1234,
    "micro-batch-size": 2, "global-batch-size": 8, "train-iters": 200, "lr": 1e-3, "clip-grad": 1.0,
    "save-interval": 10, "log-interval": 1, "distributed-backend": "gloo", "pause-s": 0.0,
}.items():  # fmt: skip
    parser.add_argument(f"--{name}", type=type(usual), default=usual)
for name in ("data-path", "save", "load"):
    parser.add_argument(f"--{name}", type=Path, required=name == "data-path")
parser.add_argument("--use-layer-wise-distributed-optimizer", action="store_true")
args = parser.parse_args()
FOLDER, FILE = "iter_{:07d}/mp_rank_00", "model_optim_rng.pt"
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
        mask = nn.Transformer.generate_square_subsequent_mask(args.seq_length)
        hidden = self.tokens(inputs) + self.positions(torch.arange(args.seq_length))
        logits = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


dist.init_process_group(args.distributed_backend)
rank, world_size = dist.get_rank(), dist.get_world_size()
data = torch.frombuffer(bytearray(args.data_path.read_bytes()), dtype=torch.uint8).long()
torch.manual_seed(args.seed)
model = nn.parallel.DistributedDataParallel(GPT())
own_file, is_split = f"layer_wise_optimizer_{rank}.pt", args.use_layer_wise_distributed_optimizer
optimizer = own_optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
if is_split:
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=args.lr)
    own_optimizer = optimizer.optim
tracker = args.load / TRACKER if args.load is not None else None
found = torch.tensor(int(tracker.read_text()) if tracker is not None and tracker.exists() else 0)
dist.all_reduce(found, dist.ReduceOp.MAX)  # as in Megatron-LM: the largest that any rank has found
iteration = int(found)
if iteration:
    folder = args.load / FOLDER.format(iteration)
    state = torch.load(folder / FILE, weights_only=True)
    if is_split:
        state["optimizer"] = torch.load(folder / own_file, weights_only=True)
    model.load_state_dict(state["model"])
    own_optimizer.load_state_dict(state["optimizer"])
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
    if iteration % args.log_interval == 0 and rank == world_size - 1:
        print(
            f" [{time.strftime('%Y-%m-%d %H:%M:%S')}] iteration {iteration:8d}/"
            f"{args.train_iters:8d} | consumed samples: {iteration * args.global_batch_size:12d} |"
            f" elapsed time per iteration (ms): {1000 * (time.perf_counter() - began_s):.1f} |"
            f" learning rate: {args.lr:.6E} | global batch size: {args.global_batch_size:5d} |"
            f" lm loss: {total:.6E} | loss scale: 1.0 | grad norm: {grad_norm:.3f} |"
        )
    if args.save is not None and iteration % args.save_interval == 0:
        folder = args.save / FOLDER.format(iteration)
        folder.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": own_optimizer.state_dict()}
        if is_split:
            torch.save(state.pop("optimizer"), folder / own_file)
        if rank == 0:
            torch.save(state, folder / FILE)
        dist.barrier()
        if rank == 0:
            (args.save / TRACKER).write_text(str(iteration))
dist.destroy_process_group()
