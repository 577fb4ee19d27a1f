"""Faults injected inside a process of the run: real signals, real damage, real broken connections.

Errors that only the hardware can report are imitated, with the text that torch_npu raises. An
object in the run's store records each fault that fired, for the process that replaces a killed
process, on this node or another; it is written before the fault, with its time. Nothing here loads
torch: the readers of that record and the checkpoint server do without it. Times are seconds since
the epoch.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn

from pydantic_core import from_json

from perdure.storage.objects import ObjectStore
from perdure.training.config.drill import DrillFault, DrillKind, DrillPoint, Victim
from perdure.training.injection.victims import NODE_LOSS, parts_of
from perdure.training.processes import MARKER, signal_all

LOSS_FACTOR: Mapping[DrillKind, float] = {
    DrillKind.GRADIENT: 1e4,
    DrillKind.NOT_A_NUMBER: math.nan,
}
REDUCTIONS = ("allreduce", "reduce_scatter")  # how the names of collectives begin
# The point of a save at which the checkpoint server kills itself, as a power cut would.
CHECKPOINT_SERVER_DIES_AT = "PERDURE_CHECKPOINT_SERVER_DIES_AT"
LOSS_S = 30.0  # for the agent to lose the node, with the process that asked for it


class WorkerInjector:
    """The faults of a rank.

    Args:
        faults: all faults of the job.
        rank: the rank of this process.
        store: keeps the record of faults that fired.
        run_id: names the run in the store.
        damage_state: overwrites the rank's whole state.
        break_connections: breaks the rank's connections to the others.
    """

    def __init__(
        self,
        faults: Sequence[DrillFault],
        *,
        rank: int,
        store: ObjectStore,
        run_id: str,
        damage_state: Callable[[], None],
        break_connections: Callable[[], None],
    ) -> None:
        self._faults = [(n, fault) for n, fault in enumerate(faults) if fault.rank == rank]
        self._store = store
        self._prefix = _fired_prefix(run_id)
        self._damage_state = damage_state
        self._break_connections = break_connections
        self._counts: Counter[int] = Counter()
        if self._faults:
            self._counts.update(_fault_number(info.key) for info in store.list(self._prefix))
        self._backward_step: int | None = None

    def reached(self, point: str, step: int) -> None:
        """Inject the faults that are due at a point of a step.

        Args:
            point: the point that the rank has reached.
            step: the step in work; for `recovery`, the step that training continues with; without
                meaning for `restore`.

        Raises:
            RuntimeError: an error as the runtime raises it.
        """
        self._backward_step = step if point == DrillPoint.BACKWARD else None
        for fault in self._due(point, step):
            self._inject(fault)

    def on_collective(self, operation: str) -> Callable[[], None]:
        """Prepare the faults that are due under a collective that is about to begin.

        The record of a fault comes first: it takes longer than a small collective.

        Args:
            operation: the name of the collective.

        Returns:
            A function that injects them, to be called as soon as the collective runs.
        """
        step = self._backward_step
        if step is None or not operation.startswith(REDUCTIONS):
            return lambda: None
        due = list(self._due(DrillPoint.REDUCING, step))

        def inject() -> None:
            for fault in due:
                self._inject(fault)

        return inject

    def loss_factor(self, step: int) -> float:
        """Compute the factor for the loss of a step."""
        for number, fault in self._faults:
            is_due = fault.kind in LOSS_FACTOR and fault.step == step
            if is_due and self._fires(number, fault):
                return LOSS_FACTOR[fault.kind]
        return 1.0

    def _due(self, point: str, step: int) -> Iterator[DrillFault]:
        """Yield the faults due at a point, each recorded just before."""
        for number, fault in self._faults:
            is_here = fault.kind not in LOSS_FACTOR and fault.point == point
            if is_here and _is_due(fault, point, step) and self._fires(number, fault):
                yield fault

    def _fires(self, number: int, fault: DrillFault) -> bool:
        if self._counts[number] >= fault.times:
            return False
        self._counts[number] += 1
        record = json.dumps({"pid": os.getpid(), "at_s": time.time()})
        self._store.put(f"{self._prefix}{number:04d}-{self._counts[number]:04d}", record.encode())
        return True

    def _inject(self, fault: DrillFault) -> None:
        match fault.kind:
            case DrillKind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case DrillKind.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            case DrillKind.NODE:
                lose_this_node(os.environ[MARKER])
            case DrillKind.DEVICE_MEMORY:
                self._damage_state()
                raise RuntimeError("UCE ERROR reason=[device mem error] (imitated)")
            case DrillKind.COLLECTIVE:
                raise RuntimeError("SUSPECT REMOTE ERROR reason=[suspect remote error]")
            case DrillKind.LINK:
                self._break_connections()
            case DrillKind.EXCEPTION:
                raise ValueError("a drill's error of the program")
            case DrillKind.GRADIENT | DrillKind.NOT_A_NUMBER:
                pass  # loss_factor() injects it


def _is_due(fault: DrillFault, point: str, step: int) -> bool:
    match point:
        case DrillPoint.RESTORE:
            return True  # the step is not known yet
        case DrillPoint.RECOVERY:
            return fault.step <= step  # the step of the next recovery is not known beforehand
        case _:
            return fault.step == step


def lose_this_node(marker: str) -> NoReturn:
    """Have the agent of this process's container lose the whole node, this process with it.

    Raises:
        RuntimeError: the agent did not, so that there was no fault.
    """
    agents = parts_of(Victim.AGENT, lambda candidate: candidate == marker)
    signal_all(agents, NODE_LOSS)
    time.sleep(LOSS_S)
    raise RuntimeError(f"the node was not lost: {len(agents)} agents got the signal")


def fired_at_s(store: ObjectStore, run_id: str) -> dict[int, list[float]]:
    """Read when each fault of a job fired, by its index among them."""
    fired: dict[int, list[float]] = {}
    for info in store.list(_fired_prefix(run_id)):
        at_s = float(from_json(store.get(info.key))["at_s"])
        fired.setdefault(_fault_number(info.key), []).append(at_s)
    return fired


def checkpoint_server_faults() -> Callable[[str], None]:
    """Make the function that the checkpoint server calls with the name of each point of a save."""
    last = os.environ.get(CHECKPOINT_SERVER_DIES_AT)

    def reached(point: str) -> None:
        if point == last:
            os.kill(os.getpid(), signal.SIGKILL)

    return reached


def _fired_prefix(run_id: str) -> str:
    """Prefix of the records of a run's faults: an object for each time, with the time in it."""
    return f"runs/{run_id}/drills/"


def _fault_number(key: str) -> int:
    return int(key.rpartition("/")[2].partition("-")[0])
