"""examples/trainer_train.py, paced so that faults find it at work, with an evaluation behind it.

`PACE_S` is a pause before each step, `EVALUATE_S` one for each batch of an evaluation. With
`ITERABLE` the dataset has no length and no index. `STOP_AT_STEP` has the Trainer end behind it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from torch.utils.data import IterableDataset
from transformers import HfArgumentParser, TrainerCallback

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from trainer_train import Arguments, make_trainer  # type: ignore[import-not-found]

from perdure.integrations.transformers import PerdureCallback


class Stream(IterableDataset):
    """The samples of a dataset, one after the other."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return (self.samples[index] for index in range(len(self.samples)))


class Pace(TrainerCallback):  # type: ignore[misc]
    def on_train_begin(self, args, state, control, model, **kwargs):
        print(f"trains a {type(model).__name__}", flush=True)

    def on_step_begin(self, args, state, control, **kwargs):
        pace = Path(os.environ.get("PACE_FILE", "/not/there"))
        time.sleep(float(pace.read_text() if pace.exists() else os.environ.get("PACE_S", "0")))

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == int(os.environ.get("STOP_AT_STEP", "-1")):
            control.should_training_stop = True

    def on_prediction_step(self, args, state, control, **kwargs):
        time.sleep(float(os.environ.get("EVALUATE_S", "0")))

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        if state.is_world_process_zero:
            print(f"evaluated {state.global_step}: {metrics['eval_loss']}", flush=True)


def main() -> None:
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    trainer = make_trainer(args)
    if "ITERABLE" in os.environ:
        trainer.train_dataset = Stream(trainer.train_dataset)
    trainer.add_callback(Pace())
    trainer.add_callback(PerdureCallback(trainer))
    trainer.train()
    trainer.evaluate()


if __name__ == "__main__":
    main()
