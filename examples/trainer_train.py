"""Pretrain a tiny Llama on random text with the Trainer of Hugging Face transformers.

    torchrun --nproc_per_node=2 trainer_train.py --max_steps 200   # without Perdure
    perdure run trainer.yaml

Of Perdure are the two lines that are marked; without `perdure run` they do nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from perdure.integrations.transformers import PerdureCallback  # the first line

WORDS = (
    "the",
    "a",
    "quick",
    "lazy",
    "brown",
    "fox",
    "dog",
    "cat",
    "jumps",
    "runs",
    "over",
    "under",
)


@dataclass
class Arguments(TrainingArguments):
    """Those of the Trainer, with defaults of this program, and what is trained on."""

    output_dir: str = "/tmp/perdure-examples/trainer"  # noqa: S108
    use_cpu: bool = not torch.accelerator.is_available()
    per_device_train_batch_size: int = 4
    learning_rate: float = 1e-3
    save_strategy: str = "no"  # checkpoints are Perdure's
    report_to: str = "none"
    disable_tqdm: bool = True
    num_samples: int = 512
    block_size: int = 32


class RandomText(Dataset[dict[str, torch.Tensor]]):
    """Sentences of random words, as bytes; sample `index` is the same whenever it is asked for."""

    def __init__(self, args: Arguments) -> None:
        self.args = args

    def __len__(self) -> int:
        return self.args.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        drawn = random.Random(index)  # noqa: S311 no secret
        text = " ".join(drawn.choices(WORDS, k=self.args.block_size))
        tokens = torch.tensor(list(text.encode()[: self.args.block_size]))
        return {"input_ids": tokens, "labels": tokens}


def make_trainer(args: Arguments) -> Trainer:
    """A Trainer of a new model."""
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=args.block_size, attention_dropout=0.1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    data = RandomText(args)
    return Trainer(model=model, args=args, train_dataset=data, eval_dataset=data)


def main() -> None:
    """Train up to max_steps."""
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    trainer = make_trainer(args)
    trainer.add_callback(PerdureCallback(trainer))  # the second line
    trainer.train()


if __name__ == "__main__":
    main()
