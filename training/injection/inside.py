"""Faults injected inside a process of the run: real signals, real damage, real broken connections.

What only the hardware can report is imitated: the text of the error is the one that torch_npu
raises. An object in the run's store records each fault that fired, for the process that replaces
a killed one, on this node or another; it is written before the fault, with its time. Nothing here
loads torch: the readers of that record and the checkpoint server do without it. Times are seconds
since the epoch.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from perdure.storage.objects import ObjectStore
from perdure.training.config.drill import DrillFault, DrillKind, DrillPoint
from perdure.training.injection.victims import lose_this_node
from perdure.training.processes import MARKER

LOSS_FACTOR: Mapping[DrillKind, float] = {
    DrillKind.GRADIENT: 1e4,
    DrillKind.NOT_A_NUMBER: math.nan,
}
REDUCTIONS = ("allreduce", "reduce_scatter")  # how the names of collectives begin
# The point of a save at which the checkpoint server kills itself, as a power cut would.
CHECKPOINT_SERVER_DIES_AT = "PERDURE_CHECKPOINT_SERVER_DIES_AT"


class WorkerInjector:
    """The faults of one rank.

    Args:
        faults: of the job.
        rank: of this process.
        store: of the run.
        run_id: of the run.
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
            point: of the step.
            step: the one in work; for `recovery`, the one that training continues with; of no
                meaning for `restore`.

        Raises:
            RuntimeError: as the runtime would.
        """
        self._backward_step = step if point == DrillPoint.BACKWARD else None
        for fault in self._due(point, step):
            self._inject(fault)

    def on_collective(self, operation: str) -> Callable[[], None]:
        """Prepare the faults that are due under a collective that is about to begin.

        Recording a fault comes first: it takes longer than a small collective.

        Args:
            operation: by its name.

        Returns:
            What injects them, to be called as soon as the collective runs.
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
        """The factor for the loss of a step."""
        for number, fault in self._faults:
            is_due = fault.kind in LOSS_FACTOR and fault.step == step
            if is_due and self._fires(number, fault):
                return LOSS_FACTOR[fault.kind]
        return 1.0

    def _due(self, point: str, step: int) -> Iterator[DrillFault]:
        """The faults due at a point, each recorded right before it is yielded."""
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
                pass  # loss_factor() has it


def _is_due(fault: DrillFault, point: str, step: int) -> bool:
    match point:
        case DrillPoint.RESTORE:
            return True  # the step is not known yet
        case DrillPoint.RECOVERY:
            return fault.step <= step  # in which step the next one comes is not known beforehand
        case _:
            return fault.step == step


def fired_at_s(store: ObjectStore, run_id: str) -> dict[int, list[float]]:
    """When each fault of a job fired, by its index among them."""
    fired: dict[int, list[float]] = {}
    for info in store.list(_fired_prefix(run_id)):
        at_s = float(json.loads(store.get(info.key))["at_s"])
        fired.setdefault(_fault_number(info.key), []).append(at_s)
    return fired


def checkpoint_server_faults() -> Callable[[str], None]:
    """What the checkpoint server calls with the name of each point of a save."""
    last = os.environ.get(CHECKPOINT_SERVER_DIES_AT)

    def reached(point: str) -> None:
        if point == last:
            os.kill(os.getpid(), signal.SIGKILL)

    return reached


def _fired_prefix(run_id: str) -> str:
    """Where the faults of a run are recorded in its store: an object each time, its time inside."""
    return f"runs/{run_id}/drills/"


def _fault_number(key: str) -> int:
    return int(key.rpartition("/")[2].partition("-")[0])
