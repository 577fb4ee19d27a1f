"""examples/lightning_train.py, paced so that faults find it at work.

`PACE_S` is a pause before each step, `EVALUATE_S` one for each batch of a validation. With
`PRINT_READ` the first rank prints every sample that it reads. With `ITERABLE` the samples are a
stream, in an order that is drawn when it begins. `STOP_AT_STEP` has the Trainer end within the next
step.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback, seed_everything
from torch.utils.data import DataLoader, IterableDataset

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import lightning_train  # type: ignore[import-not-found]
from lightning_train import RandomText as Text

from perdure.integrations.lightning import PerdureCallback


class Pace(Callback):  # type: ignore[misc]
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx % trainer.accumulate_grad_batches == 0:
            pace = Path(os.environ.get("PACE_FILE", "/not/there"))
            time.sleep(float(pace.read_text() if pace.exists() else os.environ.get("PACE_S", "0")))
        self.begun = trainer.global_step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step != self.begun:
            print(f"trained {trainer.global_step}: {outputs['loss'].item()}", flush=True)

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if not trainer.sanity_checking:
            time.sleep(float(os.environ.get("EVALUATE_S", "0")))

    def on_validation_end(self, trainer, pl_module):
        if trainer.is_global_zero and not trainer.sanity_checking:
            loss = trainer.callback_metrics["val_loss"].item()
            print(f"validated {trainer.global_step}: {loss}", flush=True)


class Stop(Callback):  # type: ignore[misc]
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        is_within = (batch_idx + 1) % trainer.accumulate_grad_batches
        if is_within and trainer.global_step == int(os.environ.get("STOP_AT_STEP", "-1")):
            trainer.should_stop = True


class Stream(IterableDataset):
    def __init__(self, num_samples, block_size):
        self.text = Text(num_samples, block_size)

    def __iter__(self):
        order = torch.randperm(len(self.text)).tolist()
        own = order[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]
        return (self.text[index] for index in own)


class PrintedText(lightning_train.RandomText):  # type: ignore[misc]
    def __getitem__(self, index):
        if os.environ["RANK"] == "0":
            print(f"read {index}", flush=True)
        return super().__getitem__(index)


def main() -> None:
    args = lightning_train.parse_arguments()
    seed_everything(11)
    if os.environ.get("PRINT_READ"):
        lightning_train.RandomText = PrintedText
    trainer = lightning_train.make_trainer(args, [Pace(), Stop(), PerdureCallback()])
    if os.environ.get("ITERABLE"):
        stream = DataLoader(Stream(args.num_samples, args.block_size), args.batch_size)
        trainer.fit(lightning_train.LanguageModel(args), stream)
    else:
        lightning_train.fit(trainer, args)


if __name__ == "__main__":
    main()
