"""A session whose watching stops and goes on, block by block.

While it is off, the heartbeat does nothing and the processes that watch (agent, coordinator and
supervisor) are stopped. Blocks come as on, off, off, on, so that a machine that gets slower or
faster does so to both alike. The first rank writes how long each step took. Times are seconds.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import perdure
from perdure.training.config.drill import Victim
from perdure.training.config.job import Job
from perdure.training.injection.victims import parts_of
from perdure.training.liveness.heartbeat import HeartbeatWriter

VARIABLE = "BENCH_WATCHING"
STEPS_FILE = "steps.json"
# Short, so that both of a pair meet the same machine; no time of the switch is in a step.
BLOCK_STEPS = 4
WARM_BLOCKS = 20
ORDER = (True, False, False, True)
# About 50 ms for a step on one core of the year 2024.
WIDTH, LAYERS, BATCH = 768, 4, 128
PARTS = (Victim.AGENT, Victim.COORDINATOR)
WRITES = (
    "beat",
    "enter_collective",
    "leave_collective",
    "begin_transfer",
    "record_vote",
    "record_data_wait",
)


class Workload(BaseModel):
    """The parameters of the ranks.

    Attributes:
        folder: for the times of the steps.
        home: of the run.
        supervisor: its process.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path
    home: Path
    supervisor: int


class Samples:
    """The loader: the same numbers in every step."""

    epoch = 0
    position = 0

    def __init__(self) -> None:
        self._batch = (torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))

    def next_step(self) -> list[tuple[Tensor, Tensor]]:
        """The one micro-batch of a step."""
        return [self._batch]

    def state_dict(self) -> dict[str, Any]:
        """Nothing changes."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing changes."""

    def close(self) -> None:
        """There is nothing to end."""


class Watching:
    """Stops the watching of this rank, and on the first rank that of the run, and starts it."""

    def __init__(self, watchers: list[psutil.Process]) -> None:
        self._watchers = watchers
        self._own: dict[str, Callable[..., None]] = {n: getattr(HeartbeatWriter, n) for n in WRITES}

    def set(self, *, is_on: bool) -> None:
        """Have it on, or off."""
        for name, write in self._own.items():
            setattr(HeartbeatWriter, name, write if is_on else _nothing)
        for process in self._watchers:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT if is_on else signal.SIGSTOP)

    @contextmanager
    def on_in_the_end(self) -> Iterator[None]:
        """Whatever happens inside, the run is watched after it."""
        try:
            yield
        finally:
            self.set(is_on=True)


def main(job: Job) -> None:
    """Train up to the job's target step."""
    workload = Workload.model_validate_json(os.environ[VARIABLE])
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    session = perdure.join()
    blocks = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = DistributedDataParallel(nn.Sequential(*blocks))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    session.register(model=model, optimizer=optimizer, data=Samples())
    watching = Watching(_watchers(job, workload) if session.rank == 0 else [])
    taken: list[list[float]] = []
    with watching.on_in_the_end():
        last_s = time.perf_counter()
        for step in session.steps(until=job.steps):
            block, place = divmod(step.number - 1, BLOCK_STEPS)
            if place == 0:
                watching.set(is_on=is_watched(block))
                taken.append([])
                last_s = time.perf_counter()
            with step:
                inputs, wanted = step.batch()
                step.backward(nn.functional.mse_loss(model(inputs), wanted))
                step.apply()
            now_s = time.perf_counter()
            taken[-1].append(now_s - last_s)
            last_s = now_s
    if session.rank == 0:
        (workload.folder / STEPS_FILE).write_text(json.dumps(taken), encoding="ascii")


def is_watched(block: int) -> bool:
    """Whether the watching is on in a block, from 0."""
    return block < WARM_BLOCKS or ORDER[block % len(ORDER)]


def _watchers(job: Job, workload: Workload) -> list[psutil.Process]:
    nodes = f"{workload.home / 'runs' / job.run_id / 'nodes'}/"
    own = [p for part in PARTS for p in parts_of(part, lambda marker: marker.startswith(nodes))]
    if len(own) != len(PARTS):
        raise RuntimeError(f"{len(own)} processes watch this run, not {len(PARTS)}")
    return [*own, psutil.Process(workload.supervisor)]


def _nothing(*_: Any, **__: Any) -> None:
    """Instead of a write of the heartbeat."""
