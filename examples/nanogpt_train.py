"""Pretrain a small GPT in the form of nanoGPT's train.py: a program that knows no Perdure.

    torchrun --nproc_per_node=2 nanogpt_train.py --out_dir=out --max_iters=200 --dataset=input.txt

As nanoGPT, it begins anew unless it is told `--init_from=resume`, keeps one `ckpt.pt` in `out_dir`,
and prints the number of an iteration before it counts it. Unlike nanoGPT, the samples of an
iteration depend on its number alone, so that a run that resumes prints what one run would have.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

config = {
    "init_from": "scratch", "out_dir": "out", "dataset": "input.txt", "max_iters": 200,
    "eval_interval": 20, "log_interval": 1, "batch_size": 4, "block_size": 32, "n_embd": 32,
    "learning_rate": 1e-3, "grad_clip": 1.0, "pause_s": 0.0,
}  # fmt: skip
for argument in sys.argv[1:]:
    key, _, text = argument.removeprefix("--").partition("=")
    if key not in config:
        raise ValueError(f"Unknown config key: {key}")
    config[key] = type(config[key])(text)
width, block_size, batch_size = config["n_embd"], config["block_size"], config["batch_size"]


class GPT(nn.Module):
    """Two attention blocks over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(block_size, width)
        block = nn.TransformerEncoderLayer(width, 2, 4 * width, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 2)
        self.head = nn.Linear(width, 256)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean loss of predicting each next byte."""
        length = inputs.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.tokens(inputs) + self.positions(torch.arange(length))
        logits = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
master_process = rank == 0
os.makedirs(config["out_dir"], exist_ok=True)  # noqa: PTH103 as people write it
ckpt_path = os.path.join(config["out_dir"], "ckpt.pt")  # noqa: PTH118 likewise
with open(config["dataset"], "rb") as file:  # noqa: PTH123 likewise
    data = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()


def get_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of this rank in an iteration; the same whenever they are asked for."""
    drawn = torch.Generator().manual_seed(number * world_size + rank)
    ix = torch.randint(len(data) - block_size - 1, (batch_size,), generator=drawn).tolist()
    rows = torch.stack([data[i : i + block_size + 1] for i in ix])
    return rows[:, :-1], rows[:, 1:]


torch.manual_seed(1337)
raw_model = GPT()
model = DistributedDataParallel(raw_model)
optimizer = torch.optim.AdamW(model.parameters(), lr=config["learning_rate"])
iter_num, best_val_loss = 0, 1e9
if config["init_from"] == "resume":
    if master_process:
        print(f"Resuming training from {config['out_dir']}")
    checkpoint = torch.load(ckpt_path, weights_only=True)
    raw_model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
elif master_process:
    print("Initializing a new model from scratch")

splits = ((0, "train"), (1, "val"))
t0 = time.time()
while True:
    if iter_num % config["eval_interval"] == 0 and iter_num > 0 and master_process:
        with torch.no_grad():
            losses = {
                split: raw_model(*get_batch(i)).item() for i, split in ((1, "train"), (2, "val"))
            }
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        best_val_loss = min(best_val_loss, losses["val"])
        state = {
            "model": raw_model.state_dict(), "optimizer": optimizer.state_dict(),
            "iter_num": iter_num, "best_val_loss": best_val_loss, "config": config,
        }  # fmt: skip
        print(f"saving checkpoint to {config['out_dir']}")
        torch.save(state, f"{ckpt_path}.part")  # a process that is killed leaves no half of one
        os.replace(f"{ckpt_path}.part", ckpt_path)  # noqa: PTH105 as people write it
    if iter_num >= config["max_iters"]:
        break
    loss = model(*get_batch(iter_num + 3))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config["grad_clip"])
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    time.sleep(config["pause_s"])
    t1 = time.time()
    dt, t0 = t1 - t0, t1
    if iter_num % config["log_interval"] == 0 and master_process:
        print(f"iter {iter_num}: loss {loss.item():.4f}, time {dt * 1000:.2f}ms, mfu -100.00%")
    iter_num += 1
dist.destroy_process_group()
