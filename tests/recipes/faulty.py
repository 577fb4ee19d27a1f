"""A user's session program whose ranks misbehave as FAULTS lists it.

FAULTS is a list of kind:rank:step[:seconds], kinds as below; those of ONCE happen once, whatever
is restarted, and leave a file in MARKS. A rank is slow on SLOW_NODE alone, where that is given.
PACE_S is a pause per step; the loop is left after step LEAVE_AT.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import perdure
from perdure.training.diagnosis.exits import EXIT_ABOVE_PROCESS
from perdure.training.runtime.state.checkpointer import Checkpointer
from perdure.training.trainer.pretrain import make_loader, open_data, seed_all
from tests.recipes.paced import Guesser


def hold_the_lock(_seconds: float) -> None:
    """Call a C function that neither returns nor releases the interpreter's lock."""
    ctypes.PyDLL(None).sleep(3600)


def leave_for_good(_seconds: float) -> None:
    """The rank never comes to the collective of the others."""
    while True:
        time.sleep(1)


def end_as_if_done(_seconds: float) -> None:
    """The process says that all is well, by its exit code."""
    os._exit(0)


ONCE = {
    "hold_lock": hold_the_lock,
    "absent": leave_for_good,
    "pause": time.sleep,
    "sys_exit": lambda _seconds: sys.exit(0),
    "os_exit": end_as_if_done,
    "device_lost": lambda _seconds: os._exit(EXIT_ABOVE_PROCESS),
}
IN_SAVES = {"lost_in_save": leave_for_good}


class Faults:
    """What this rank is to do, and when."""

    def __init__(self, rank: int) -> None:
        self.marks = Path(os.environ["MARKS"])
        listed = [one.split(":") for one in os.environ.get("FAULTS", "").split(",") if one]
        self.mine = [
            (kind, int(step), float(rest[0]) if rest else 0.0)
            for kind, at_rank, step, *rest in listed
            if int(at_rank) == rank
        ]
        self.rank = rank
        node = os.environ["PERDURE_NODE"]
        self.is_on_slow_node = os.environ.get("SLOW_NODE", node) == node

    def happen(self, number: int) -> None:
        """In the step of this number, before its collectives."""
        self.once(number, ONCE)
        for kind, step, seconds in self.mine:
            if kind == "slow" and step <= number and self.is_on_slow_node:
                time.sleep(seconds)

    def once(self, number: int, kinds: Mapping[str, Callable[[float], None]]) -> None:
        """What is to happen once at this step."""
        for kind, step, seconds in self.mine:
            mark = self.marks / f"{kind}-{self.rank}-{step}"
            if kind in kinds and step == number and not mark.exists():
                mark.write_text(repr(time.time()))
                kinds[kind](seconds)

    def starves(self, number: int) -> float:
        """How much longer the loader takes for a step."""
        return sum(s for kind, step, s in self.mine if kind == "starve" and step <= number)


class SlowLoader:
    """A loader that keeps its rank waiting."""

    def __init__(self, loader, faults: Faults) -> None:
        self.loader = loader
        self.faults = faults
        self.number = 0

    def __getattr__(self, name: str):
        return getattr(self.loader, name)

    def next_step(self):
        self.number += 1
        time.sleep(self.faults.starves(self.number))
        return self.loader.next_step()


def save_slowly(seconds: float, faults: Faults) -> None:
    """Have saves take so much longer, if they end at all."""
    save = Checkpointer.save

    def slow_save(self: Checkpointer, step: int, **arguments: Any) -> bool:
        faults.once(step, IN_SAVES)
        time.sleep(seconds)
        return save(self, step, **arguments)

    Checkpointer.save = slow_save  # type: ignore[method-assign]


def main(job) -> None:
    seed_all(job.seed)
    session = perdure.join()
    faults = Faults(session.rank)
    dataset, manifest = open_data(job, session)
    with session.building():
        guesser = Guesser(manifest.vocab_size)
    model = DistributedDataParallel(guesser)
    torch.manual_seed(session.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = SlowLoader(make_loader(job, session, dataset), faults)
    session.register(model=model, optimizer=optimizer, data=loader)
    save_slowly(float(os.environ.get("SAVE_S", "0")), faults)
    evaluate_s = float(os.environ.get("EVALUATE_S", "0"))
    for step in session.steps(until=job.steps):
        with step:
            time.sleep(float(os.environ.get("PACE_S", "0")))
            faults.happen(step.number)
            inputs, targets = step.batch()
            step.backward(model(inputs, targets))
            step.apply()
        if evaluate_s and step.number % 16 == 0:
            with session.evaluation():
                time.sleep(evaluate_s)
        if step.number == int(os.environ.get("LEAVE_AT", "0")):
            break
