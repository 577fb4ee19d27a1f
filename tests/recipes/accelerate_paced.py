"""examples/accelerate_train.py, paced so that faults find it at work, with evaluations.

`PACE_S` is a pause before each step; `EVALUATE_S` that of an evaluation before every eighth step,
none without. `SHARDED` has FSDP2 shard the model.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate.utils import FullyShardedDataParallelPlugin

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.append(str(Path(__file__).resolve().parents[2]))

import accelerate_train as program  # type: ignore[import-not-found]

from perdure.integrations.accelerate import TrainingStep, evaluation, training_steps
from perdure.integrations.sharding import shard_on_cpu
from tests.recipes.two_optimizers import Average


def paced_steps(accelerator: Any, **given: Any) -> Iterator[TrainingStep]:
    print(f"trains a {type(given['model']).__name__}", flush=True)
    average = Average(given["model"])
    accelerator.register_for_checkpointing(average)
    pause_s = os.environ.get("EVALUATE_S")
    for step in training_steps(accelerator, **given, on_applied=average.update):
        pace = Path(os.environ.get("PACE_FILE", "/not/there"))
        time.sleep(float(pace.read_text() if pace.exists() else os.environ.get("PACE_S", "0")))
        if step.number % 8 == 0 and pause_s is not None:
            with evaluation():
                time.sleep(float(pause_s))
        yield step


def main() -> None:
    args = program.parser().parse_args()
    accelerator = program.make_accelerator(args)
    if "SHARDED" in os.environ:
        shard_on_cpu(accelerator, FullyShardedDataParallelPlugin(fsdp_version=2))
    program.training_steps = paced_steps
    program.train(args, accelerator)
    accelerator.print(f"behind the loop: {accelerator.num_processes} ranks", flush=True)


if __name__ == "__main__":
    main()
