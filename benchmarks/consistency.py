"""What a comparison of the ranks costs: hashes of weights and gradients, beside a training step.

    python -m benchmarks.consistency [--rounds 20]

The model of `benchmarks.recovery`, on one thread: hashes and steps in turns, in seconds of CPU
time, so that what else the machine does has little part in it. A job compares every
`watch.consistency_every_steps` steps; the share is of its time. Sizes are bytes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.recovery.workload import new_model, new_optimizer, tokens
from perdure.training.config.watch import WatchSpec
from perdure.training.runtime.step_loop.fingerprint import fingerprint

CPU = torch.device("cpu")
LIMIT = 0.002


def main() -> int:
    """Print the cost. Returns 1 when it is over the limit."""
    parser = argparse.ArgumentParser(description="the cost of comparing what the ranks hold")
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        hash_s, step_s, num_bytes = _measure(rounds)
        dist.destroy_process_group()
    every = WatchSpec().consistency_every_steps
    share = hash_s / (every * step_s)
    print(
        f"{num_bytes / 2**20:.0f} MiB of weights and gradients: {hash_s * 1e3:.1f} ms, "
        f"{num_bytes / hash_s / 1e9:.1f} GB/s; a step of one sample: {step_s * 1e3:.0f} ms\n"
        f"compared every {every} steps: {share:.3%} of the time; each step: {hash_s / step_s:.1%}"
    )
    return 0 if share < LIMIT else 1


def _measure(rounds: int) -> tuple[float, float, int]:
    """Median CPU seconds of the hashes and of a step, and the size of what is hashed."""
    model = new_model()
    optimizer = new_optimizer(model)
    hashes, steps = [], []
    for number in range(1, rounds + 2):
        steps.append(_cpu_s(partial(_backward, model, number)))
        hashes.append(_cpu_s(partial(fingerprint, model, CPU)))
        steps[-1] += _cpu_s(optimizer.step)
        optimizer.zero_grad(set_to_none=True)
    num_bytes = 2 * sum(p.numel() * p.element_size() for p in model.parameters())
    return median(hashes[1:]), median(steps[1:]), num_bytes  # without the first, which warms up


def _backward(model: nn.Module, number: int) -> None:
    model(*tokens(step=number, rank=0)).backward()


def _cpu_s(work: Callable[[], object]) -> float:
    before_s = time.process_time()
    work()
    return time.process_time() - before_s


if __name__ == "__main__":
    raise SystemExit(main())
