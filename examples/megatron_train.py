"""Pretrain a small GPT on a text file with the loop of Megatron-LM, which PYTHONPATH has to name.

    torchrun --nproc_per_node=4 megatron_train.py --data-path input.txt --train-iters 200 ...

A program that knows no Perdure: the job's `integration` takes over its loop.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpt_builders import gpt_builder
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.utils import get_batch_on_this_tp_rank
from model_provider import model_provider


class Text(torch.utils.data.Dataset):
    """Pieces of a file, as bytes."""

    def __init__(self, path: Path, length: int, size: int) -> None:
        self._bytes = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
        self._length, self._size = length, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        drawn = torch.Generator().manual_seed(number)
        start = int(torch.randint(len(self._bytes) - self._length, (1,), generator=drawn))
        piece = self._bytes[start : start + self._length + 1]
        return {
            "tokens": piece[:-1],
            "labels": piece[1:],
            "loss_mask": torch.ones(self._length),
            "position_ids": torch.arange(self._length),
        }


def datasets(sizes: list[int]) -> tuple[Text | None, ...]:
    """Training, validation and test data, of the sizes that Megatron asks for."""
    args = get_args()
    path = Path(args.data_path[0])
    return tuple(Text(path, args.seq_length, size) if size else None for size in sizes)


def loss_of(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, Any, Any]:
    """The sum over tokens, their number, and both for the log."""
    loss, num_tokens = (losses.view(-1).float() * mask.view(-1)).sum(), mask.sum().int()
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach().clone(), num_tokens])}


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """Run a micro-batch, which the first rank of each tensor-parallel group reads."""
    batch = get_batch_on_this_tp_rank(data_iterator)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(loss_of, batch["loss_mask"])


if __name__ == "__main__":
    datasets.is_distributed = True  # type: ignore[attr-defined]  # each rank reads its own
    pretrain(
        datasets, partial(model_provider, gpt_builder), ModelType.encoder_or_decoder, forward_step
    )
