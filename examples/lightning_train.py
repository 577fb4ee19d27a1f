"""Pretrain a tiny transformer on random text with the Trainer of Lightning.

    torchrun --nproc_per_node=2 lightning_train.py --max-steps 200   # without Perdure
    perdure run lightning.yaml

Of Perdure are the two lines that are marked; without `perdure run` they do nothing.
"""

from __future__ import annotations

import argparse
import os
import random

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from perdure.integrations.lightning import PerdureCallback  # the first line

WORDS = ["quick", "lazy", "brown", "fox", "dog", "cat", "jumps", "runs", "over", "under"]


class RandomText(Dataset[Tensor]):
    """Sentences of random words, as bytes; sample `index` is the same whenever it is asked for."""

    def __init__(self, num_samples: int, block_size: int) -> None:
        self.num_samples = num_samples
        self.block_size = block_size

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Tensor:
        text = " ".join(random.Random(index).choices(WORDS, k=self.block_size))  # noqa: S311
        return torch.tensor(list(text.encode()[: self.block_size + 1]))


class LanguageModel(LightningModule):
    """Predicts the next byte."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        self.embedding = nn.Embedding(128, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 128)
        mask = nn.Transformer.generate_square_subsequent_mask(args.block_size)
        self.register_buffer("mask", mask)

    def forward(self, text: Tensor) -> Tensor:
        """Mean loss over the bytes of `text`, [batch, token]."""
        logits = self.head(self.layers(self.embedding(text[:, :-1]), self.mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, batch: Tensor) -> Tensor:
        """Train on one batch."""
        loss = self(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor) -> None:
        """Evaluate on one batch."""
        self.log("val_loss", self(batch), sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        """AdamW with a warm-up."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.args.lr)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up, "interval": "step"}}


def parse_arguments() -> argparse.Namespace:
    """Those of this program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-steps", type=int, default=-1, help="leave out under Perdure")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=1, help="batches in a step")
    parser.add_argument("--num-samples", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--val-every", type=int, default=100, help="batches")
    return parser.parse_args()


def make_trainer(args: argparse.Namespace, callbacks: list[Callback]) -> Trainer:
    """A Trainer with one device for each rank."""
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Trainer(
        strategy="ddp",
        devices=devices,
        num_nodes=int(os.environ.get("WORLD_SIZE", "1")) // devices,
        max_steps=args.max_steps, max_epochs=-1,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=1.0,
        limit_val_batches=4, val_check_interval=args.val_every, check_val_every_n_epoch=None,
        enable_checkpointing=False,  # checkpoints are Perdure's
        enable_progress_bar=False, logger=False, callbacks=callbacks,
    )  # fmt: skip


def fit(trainer: Trainer, args: argparse.Namespace) -> None:
    """Train a new model."""
    data = RandomText(args.num_samples, args.block_size)
    train, val = (DataLoader(data, args.batch_size, shuffle=one) for one in (True, False))
    trainer.fit(LanguageModel(args), train, val)


def main() -> None:
    """Train up to max_steps."""
    args = parse_arguments()
    seed_everything(11)
    fit(make_trainer(args, [PerdureCallback()]), args)  # the second line


if __name__ == "__main__":
    main()
