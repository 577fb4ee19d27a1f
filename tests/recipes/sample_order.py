"""Writes down which samples every step trains, in the loop of a framework.

`sample_order.py FRAMEWORK --out FOLDER`: a line `[step, batch of the step, [sample, ...]]` for each
batch that a rank trains, in `order-RANK.jsonl`. The samples are numbers; the model has dropout, so
that losses show random numbers, too.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

SEED = 11


class Numbers(Dataset[dict[str, Tensor]]):
    """Samples whose number is in them."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        return {"index": torch.tensor(index), "x": torch.randn(8, generator=drawn)}


class Stream(IterableDataset[dict[str, Tensor]]):
    """The same samples without an index, for one rank, shared by the workers of its loader."""

    def __init__(self, size: int) -> None:
        self.numbers = Numbers(size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        return (self.numbers[index] for index in range(first, len(self.numbers), stride))


class Model(nn.Module):
    """Drives its inputs to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))

    def forward(self, x: Tensor, index: Tensor | None = None) -> dict[str, Tensor]:
        """Mean square of the outputs of `x`, [batch, 8]."""
        del index
        return {"loss": self.layers(x).square().mean()}


class Order:
    """The file of a rank."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"order-{os.environ['RANK']}.jsonl"

    def note(self, step: int, batch_of_step: int, samples: Tensor) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([step, batch_of_step, samples.tolist()]) + "\n")


def new_loader(args: argparse.Namespace) -> DataLoader[dict[str, Tensor]]:
    data: Any = Stream(args.samples) if args.stream else Numbers(args.samples)
    return DataLoader(
        data,
        args.batch_size,
        shuffle=None if args.stream else True,
        num_workers=args.workers,
        persistent_workers=args.persistent,
        drop_last=args.drop_last,
    )


def train_with_lightning(args: argparse.Namespace, order: Order) -> None:
    from lightning.pytorch import LightningModule, Trainer, seed_everything

    from perdure.integrations.lightning import PerdureCallback

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            order.note(self.global_step + 1, batch_idx % args.accumulate, batch["index"])
            return self.model(batch["x"])["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    seed_everything(SEED)
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=devices,
        num_nodes=int(os.environ["WORLD_SIZE"]) // devices,
        max_epochs=-1,
        accumulate_grad_batches=args.accumulate,
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
        callbacks=[PerdureCallback()],
    )
    trainer.fit(Module(), new_loader(args))


def train_with_trainer(args: argparse.Namespace, order: Order) -> None:
    import transformers

    from perdure.integrations.transformers import PerdureCallback

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        batch_of_step, step = 0, -1

        def compute_loss(self, model: nn.Module, inputs: Any, *rest: Any, **named: Any) -> Any:
            step = self.state.global_step + 1
            again = step != self.step or self.batch_of_step + 1 >= args.accumulate
            self.batch_of_step = 0 if again else self.batch_of_step + 1
            self.step = step
            order.note(step, self.batch_of_step, inputs["index"])
            return super().compute_loss(model, inputs, *rest, **named)

    torch.manual_seed(SEED)
    arguments = transformers.TrainingArguments(
        output_dir=str(args.out / "trainer"),
        use_cpu=True,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulate,
        dataloader_num_workers=args.workers,
        dataloader_persistent_workers=args.persistent,
        dataloader_drop_last=args.drop_last,
        remove_unused_columns=False,
        learning_rate=1e-3,
        max_steps=args.max_steps,
        accelerator_config={"dispatch_batches": False},
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    data: Any = Stream(args.samples) if args.stream else Numbers(args.samples)
    trainer = Trainer(model=Model(), args=arguments, train_dataset=data)
    trainer.add_callback(PerdureCallback(trainer))
    trainer.train()


def train_with_accelerate(args: argparse.Namespace, order: Order) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    from perdure.integrations.accelerate import training_steps

    set_seed(SEED)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=args.accumulate,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=True, dispatch_batches=False
        ),
    )
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, new_loader(args))
    for step in training_steps(accelerator, model=model, optimizer=optimizer, loader=loader):
        with step:
            for batch_of_step, batch in enumerate(step.micro_batches()):
                order.note(step.number, batch_of_step, batch["index"])
                step.backward(model(batch["x"])["loss"])
            step.apply()


FRAMEWORKS = {
    "lightning": train_with_lightning,
    "trainer": train_with_trainer,
    "accelerate": train_with_accelerate,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--max_steps", type=int, default=-1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--drop_last", action="store_true")
    parser.add_argument("--stream", action="store_true")
    args = parser.parse_args()
    FRAMEWORKS[args.framework](args, Order(args.out))


if __name__ == "__main__":
    main()
