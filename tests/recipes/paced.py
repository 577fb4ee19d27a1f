"""A user's own session program: a small recurrent model, paced so that faults find it at work.

`PACE_S` in the environment is a pause per step; what the file `PACE_FILE` holds, once there is one,
comes in its place. Neither changes a number.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import perdure
from perdure.training.trainer.pretrain import make_loader, open_data, seed_all


class Guesser(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 16)
        self.memory = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, vocab_size)
        self.dropout = nn.Dropout(0.1)

    def forward(self, inputs, targets):
        hidden, _ = self.memory(self.embedding(inputs))
        logits = self.head(self.dropout(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(job) -> None:
    seed_all(job.seed)
    session = perdure.join()
    dataset, manifest = open_data(job, session)
    model = DistributedDataParallel(Guesser(manifest.vocab_size))
    torch.manual_seed(session.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.register(model=model, optimizer=optimizer, data=make_loader(job, session, dataset))
    pace = Path(os.environ.get("PACE_FILE", "/not/there"))
    for step in session.steps(until=job.steps):
        with step:
            time.sleep(float(pace.read_text() if pace.exists() else os.environ["PACE_S"]))
            inputs, targets = step.batch()
            step.backward(model(inputs, targets))
            step.apply()


def counted(job) -> None:
    print(f"rank {os.environ['RANK']} is start {os.environ['MA_PROC_START_CNT']}", flush=True)
    main(job)


def unlucky(job) -> None:
    """Rank 1 comes to life once in a container: each process in its place is killed at once."""
    if os.environ["RANK"] == "1" and os.environ["MA_PROC_START_CNT"] != "1":
        os.kill(os.getpid(), signal.SIGKILL)
    counted(job)


def lazy(job) -> None:
    print("nothing to do", job.run_id)


def broken(job) -> None:
    seed_all(job.seed)
    session = perdure.join()
    raise TypeError(f"forward() got an unexpected argument on rank {session.rank}")


def sealed(job) -> None:
    """Print the secrets in the variables that `GIVEN` names; the first time, fail with them."""
    values = {name: os.environ[name] for name in os.environ["GIVEN"].split(",")}
    for name, value in values.items():
        digest = hashlib.sha256(value.encode()).hexdigest()
        print(f"{name} is {value}, its digest {digest}", flush=True)
        print(f"{name} is {value!r} here as well", file=sys.stderr)
    if os.environ["MA_PROC_START_CNT"] == "1":
        everything = " ".join(values.values())
        raise ConnectionResetError(f"login with {everything} failed: Connection reset by peer")
    main(job)
