"""Pretrain a tiny model of bytes in a loop of its own over accelerate.

    torchrun --nproc_per_node=2 accelerate_train.py --max_steps 200   # without Perdure
    perdure run accelerate.yaml

The loop takes its steps from Perdure's `training_steps`; without `perdure run` they are plain
calls of accelerate.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from perdure.integrations.accelerate import training_steps


def parser() -> argparse.ArgumentParser:
    """The arguments of this program."""
    parsed = argparse.ArgumentParser(allow_abbrev=False)
    parsed.add_argument("--data", type=Path, default=Path(__file__).parent.parent / "README.md")
    parsed.add_argument("--max_steps", type=int, help="under Perdure those of the job")
    parsed.add_argument("--batch_size", type=int, default=4)
    parsed.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parsed.add_argument("--block_size", type=int, default=32)
    parsed.add_argument("--num_samples", type=int, default=504)
    parsed.add_argument("--seed", type=int, default=1)
    return parsed


class Blocks(Dataset[dict[str, Tensor]]):
    """Blocks of a text, as bytes."""

    def __init__(self, path: Path, block_size: int, num_samples: int) -> None:
        text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
        num_samples = min(num_samples, (len(text) - 1) // block_size)
        self._text = text[: num_samples * block_size + 1]
        self._block_size = block_size

    def __len__(self) -> int:
        return len(self._text) // self._block_size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * self._block_size
        block = self._text[start : start + self._block_size + 1]
        return {"input_ids": block[:-1], "labels": block[1:]}


class Bytes(nn.Module):
    """Predicts the next byte from those before it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of `input_ids` and `labels`, [batch, length] each."""
        hidden, _ = self.mix(self.embed(input_ids))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def make_accelerator(args: argparse.Namespace, **further: Any) -> Accelerator:
    """Accelerate on all devices, or on the CPU where there are none."""
    return Accelerator(
        cpu=not torch.accelerator.is_available(),
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        **further,
    )


def train(args: argparse.Namespace, accelerator: Accelerator) -> None:
    """Train up to max_steps."""
    set_seed(args.seed)
    model = Bytes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.95)
    data = Blocks(args.data, args.block_size, args.num_samples)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    for step in training_steps(
        accelerator, model=model, optimizer=optimizer, loader=loader, scheduler=scheduler,
        max_grad_norm=1.0, until=args.max_steps,
    ):  # fmt: skip
        with step:
            losses = []
            for batch in step.micro_batches():
                loss = model(**batch)
                step.backward(loss)
                losses.append(loss.item())
            step.apply()
            accelerator.print(f"step {step.number}: losses of the first rank {losses}", flush=True)


if __name__ == "__main__":
    arguments = parser().parse_args()
    train(arguments, make_accelerator(arguments))
