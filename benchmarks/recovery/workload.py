"""The training that every contender runs, and the log that all of them keep of it.

A decoder of ten million parameters on tokens that are addressed by step and rank, AdamW, one
thread a process: whatever restarts, shifts or repeats a step is given the same numbers. Times are
seconds since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self, TextIO

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from benchmarks.recovery.processes import node_of_this_process
from perdure.training.config.model import ModelSpec, OptimizerSpec
from perdure.training.runtime.state.random_numbers import seed_of
from perdure.training.trainer.model import Decoder
from perdure.training.trainer.pretrain import make_optimizer

VARIABLE = "BENCH_RECOVERY"
NUM_RANKS = 4
NUM_NODES = 2  # where nodes are lost; a third one is the spare
SEED = 11
VOCABULARY = 4096
BATCH = 1
MODEL = ModelSpec(num_layers=11, hidden_size=256, num_heads=8, seq_len=64)
OPTIMIZER = OptimizerSpec()
FAULT_FILE = "fault.json"
NOTICED = "noticed"  # first part of the files that say when a survivor noticed the fault
ARMED_FILE = "armed"
REPLICA = "BENCH_REPLICA"  # the rank of a process that is a group of its own
COLLECTIVE_S = 5.0  # of torchft: as long as its lighthouse waits for a heartbeat by itself
LIMIT = "BENCH_COLLECTIVE_S"  # the same, where it is another one
SPARES = "BENCH_SPARES"  # how many such groups there are beyond the ranks


class Workload(BaseModel):
    """The parameters of one run's processes, in an environment variable.

    Attributes:
        folder: for logs and checkpoints.
        steps: target.
        kill_step: step in which a rank kills itself, None: none does.
        kill_rank: which one.
        loses_node: whether everything on the rank's node is killed with it, as soon as the step is
            reached and the spare node waits.
        saves: whether every step is saved, and restarts begin from the newest.
        num_ranks: that train.
        block_steps: after so many steps the ranks wait for their next turn, None: they do not.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path
    steps: int
    kill_step: int | None = None
    kill_rank: int = 2
    loses_node: bool = False
    saves: bool = False
    num_ranks: int = NUM_RANKS
    block_steps: int | None = None

    @classmethod
    def of_environment(cls) -> Self:
        """The parameters of this process."""
        return cls.model_validate_json(os.environ[VARIABLE])

    def kill_if_due(self, *, step: int, rank: int) -> None:
        """SIGKILL this process or node, once in the run, between forward and backward."""
        path = self.folder / FAULT_FILE
        if rank != self.kill_rank or not self.is_due(step) or path.exists():
            return
        others = node_of_this_process() if self.loses_node else ()
        path.write_text(json.dumps({"at_s": time.time()}), encoding="ascii")
        for pid in (*others, os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def is_due(self, step: int) -> bool:
        """Whether the fault is to happen in a step."""
        if self.kill_step is None or not self.loses_node:
            return step == self.kill_step
        return step >= self.kill_step and (self.folder / ARMED_FILE).exists()

    def arm(self) -> None:
        """The spare node waits: another one may be lost."""
        (self.folder / ARMED_FILE).touch()

    def noticed(self, at_s: float | None = None) -> None:
        """A survivor has noticed the fault, now or then."""
        line = json.dumps({"at_s": time.time() if at_s is None else at_s})
        with (self.folder / f"{NOTICED}-{os.getpid()}.jsonl").open("a", encoding="ascii") as file:
            file.write(line + "\n")


Start = Callable[[Workload], None]  # runs a workload to its end


class Turns:
    """Has a rank wait at the first step of every block."""

    def __init__(self, workload: Workload, rank: int) -> None:
        self._block_steps = workload.block_steps
        self._path = pipe_path(workload.folder, rank)
        self._pipe: TextIO | None = None

    def wait(self, step: int) -> None:
        """Wait, when a block begins with this step."""
        if self._block_steps is None or step % self._block_steps != 1:
            return
        if self._pipe is None:
            self._pipe = self._path.open(encoding="ascii")
        self._pipe.readline()


def pipe_path(folder: Path, rank: int) -> Path:
    """Where a rank learns that it is its turn."""
    return folder / f"turn-{rank}"


class StepLog:
    """Steps that this process completed, a JSON line each."""

    def __init__(self, workload: Workload, rank: int) -> None:
        path = workload.folder / f"steps-{rank}-{os.getpid()}.jsonl"
        self._file = path.open("a", encoding="ascii", buffering=1)
        self._rank = rank
        self._is_last = workload.steps

    def completed(self, step: int, loss: float) -> None:
        """A step is done here: the optimizer has run."""
        record: dict[str, float] = {"rank": self._rank, "step": step, "loss": loss}
        record |= {"at_s": time.time(), "cpu_s": time.process_time()}
        if step == self._is_last:
            record["memory_bytes"] = private_bytes()
        self._file.write(json.dumps(record) + "\n")


def private_bytes() -> int:
    """Memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def prepare() -> None:
    """What every process does first."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)


def new_model() -> nn.Module:
    """The same weights in every process."""
    torch.manual_seed(SEED)
    return Decoder(MODEL, VOCABULARY)


def new_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """AdamW over a model, wrapped or not."""
    return make_optimizer(model, OPTIMIZER)


def tokens(*, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a rank in a step, each [BATCH, seq_len]."""
    generator = torch.Generator().manual_seed(seed_of(SEED, rank=rank, step=step))
    shape = (BATCH, MODEL.seq_len + 1)
    drawn = torch.randint(0, VOCABULARY, shape, generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def state_bytes() -> int:
    """Weights and AdamW's two moments."""
    return MODEL.num_parameters(VOCABULARY) * 4 * 3
