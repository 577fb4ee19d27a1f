"""Faults made on purpose inside a worker: real signals, real damage, real broken connections.

What cannot be had without the hardware is the runtime's own word: the text of the error is the
one that torch_npu raises. An object in the run's store remembers what has fired, for the process
that takes the place of a killed one, on this node or another; a file beside the heartbeat proves
it on the spot. Both are written before the fault, with its time.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from storage.objects import ObjectStore
from training.injection.fired import fired_path, fired_prefix, number_of
from training.processes import MARKER, kill_container
from training.runtime.process_group.connections import shut_down
from training.runtime.process_group.generations import Generations
from training.runtime.program import Training
from training.runtime.state.transfer import local_part
from training.specs.drill import DrillFault, DrillKind, DrillPoint

LOSS_FACTOR: Mapping[DrillKind, float] = {
    DrillKind.GRADIENT: 1e4,
    DrillKind.NOT_A_NUMBER: math.nan,
}
REDUCTIONS = ("allreduce", "reduce_scatter")  # how the names of collectives begin


class Drill:
    """The faults of one rank.

    Args:
        faults: of the job.
        rank: of this process.
        folder: of the attempt on this node.
        generations: whose links are broken.
        store: of the run.
        run_id: of the run.
    """

    def __init__(
        self,
        faults: Sequence[DrillFault],
        *,
        rank: int,
        folder: Path,
        generations: Generations | None,
        store: ObjectStore,
        run_id: str,
    ) -> None:
        self._own = [(n, one) for n, one in enumerate(faults) if one.rank == rank]
        self._folder = folder
        self._generations = generations
        self._store = store
        self._prefix = fired_prefix(run_id)
        self._counts: Counter[int] = Counter()
        if self._own:
            self._counts.update(number_of(info.key) for info in store.list(self._prefix))
        self._backward_step: int | None = None
        self.training: Training | None = None

    def reached(self, point: str, step: int) -> None:
        """Make what is due here.

        Args:
            point: of a step.
            step: the one in work, for `recovery` the one that training goes on with.

        Raises:
            RuntimeError: as the runtime would.
        """
        self._backward_step = step if point == DrillPoint.BACKWARD else None
        for fault in self._due(point, step):
            self._make(fault)

    def begins(self, operation: str) -> Callable[[], None]:
        """A collective is about to begin.

        Word of a fault is left before it, which takes longer than a small collective.

        Args:
            operation: by its name.

        Returns:
            What makes the faults that are due, to be called as soon as the collective runs.
        """
        step = self._backward_step
        if step is None or not operation.startswith(REDUCTIONS):
            return lambda: None
        due = list(self._due(DrillPoint.REDUCING, step))

        def make() -> None:
            for fault in due:
                self._make(fault)

        return make

    def _due(self, point: str, step: int) -> Iterator[DrillFault]:
        """The faults to be made here, word of each left right before it."""
        for number, fault in self._own:
            is_here = fault.kind not in LOSS_FACTOR and fault.point == point
            # NoHook knows which step the next recovery comes in.
            is_due = fault.step <= step if point == DrillPoint.RECOVERY else fault.step == step
            if is_here and is_due and self._fires(number, fault):
                yield fault

    def loss_factor(self, step: int) -> float:
        """What the loss of a step is multiplied with."""
        for number, fault in self._own:
            is_due = fault.kind in LOSS_FACTOR and fault.step == step
            if is_due and self._fires(number, fault):
                return LOSS_FACTOR[fault.kind]
        return 1.0

    def _fires(self, number: int, fault: DrillFault) -> bool:
        if self._counts[number] >= fault.times:
            return False
        self._counts[number] += 1
        line = json.dumps({"pid": os.getpid(), "at_s": time.time()}) + "\n"
        self._store.put(f"{self._prefix}{number:04d}-{self._counts[number]:04d}", line.encode())
        with fired_path(self._folder, number).open("a", encoding="utf-8") as file:
            file.write(line)
        return True

    def _make(self, fault: DrillFault) -> None:
        match fault.kind:
            case DrillKind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case DrillKind.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            case DrillKind.NODE:
                kill_container(os.environ[MARKER])
                os.kill(os.getpid(), signal.SIGKILL)
            case DrillKind.DEVICE_MEMORY:
                self._damage()
                raise RuntimeError("UCE ERROR reason=[device mem error]")
            case DrillKind.COLLECTIVE:
                raise RuntimeError("SUSPECT REMOTE ERROR reason=[suspect remote error]")
            case DrillKind.LINK:
                self._break_links()
            case DrillKind.EXCEPTION:
                raise ValueError("a drill's error of the program")
            case DrillKind.GRADIENT | DrillKind.NOT_A_NUMBER:
                pass  # loss_factor() has it

    def _damage(self) -> None:
        """Overwrite the rank's whole state: weights, buffers, and what the optimizer keeps."""
        training = self.training
        assert training is not None  # noqa: S101 steps come after register()
        kept = chain.from_iterable(one.values() for one in training.optimizer.state.values())
        with torch.no_grad():
            for value in chain(training.model.parameters(), training.model.buffers(), kept):
                if isinstance(value, Tensor):
                    own = local_part(value)
                    own.fill_(math.nan if own.is_floating_point() else -1)

    def _break_links(self) -> None:
        if self._generations is not None:
            for link in self._generations.links().values():
                shut_down(link.sockets)
