"""The table of drills: the faults, and the recoveries that the ladder must answer with. Data only.

A further drill is a further row. Steps are completed optimizer steps, times seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from perdure.training.config.drill import DrillFault, DrillKind, DrillPoint
from perdure.training.drill.job import HANG_TIMEOUT_S, SAVE_EVERY_STEPS
from perdure.training.recovery.rungs import Rung

STEPS = 40
AT_STEP = 13  # the step in work when the fault comes
SNAPSHOT_EVERY_STEPS = 5
PACE_S = 0.1  # added to every step where a hook has to notice it or a save has to end first
SLOW_PACE_S = 0.3  # where a hook has to pause the run before the fault
_ABNORMAL = 1e3  # far above any step of the small model


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected result of a drill.

    Attributes:
        rungs: recovery actions, in order.
        steps_lost: limit for completed steps that are executed again.
        last_save: step that the survivors save before their processes end.
        num_fetched: limit for shards that are read from the store; None: any number.
    """

    rungs: tuple[Rung, ...]
    steps_lost: int = 0
    last_save: int | None = None
    num_fetched: int | None = None


@dataclass(frozen=True, slots=True)
class Drill:
    """A row of the table.

    Attributes:
        name: the drill's name on the command line.
        injected: the faults in words, for reports.
        expected: the expected result.
        faults: injected inside the worker processes.
        hits_replicas: each fault also hits every replica of its rank, during the recovery.
        pauses_at: completed step at which the run is paused, and resumed later.
        changes: fields of the job that differ, by section.
        without_replicas: expected where no rank holds the state of another; None: `expected`.
        differs_from: step from which on the curve may differ: an abnormal step was accepted.
        starts: how often the run is started; it ends in between.
        num_nodes: number of nodes that its ranks are on, with each fault on the node of its number;
            None: the job's number.
        is_of_gloo: whether it breaks connections of gloo, which devices do not have.
    """

    name: str
    injected: str
    expected: Expected
    faults: tuple[DrillFault, ...] = ()
    hits_replicas: bool = False
    pauses_at: int | None = None
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    without_replicas: Expected | None = None
    differs_from: int | None = None
    starts: int = 1
    num_nodes: int | None = None
    is_of_gloo: bool = False

    @property
    def pace_s(self) -> float:
        """Seconds added to every step."""
        if self.changes.get("engine", {}).get("warm_spares"):
            return SLOW_PACE_S
        loses_a_node = any(fault.kind is DrillKind.NODE for fault in self.faults)
        return PACE_S if loses_a_node or self.pauses_at is not None else 0.0


def _fault(
    kind: DrillKind,
    rank: int,
    point: DrillPoint = DrillPoint.BACKWARD,
    *,
    step: int = AT_STEP,
    times: int = 1,
) -> DrillFault:
    return DrillFault(kind=kind, rank=rank, step=step, point=point, times=times)


_STEP_RETRY = Expected((Rung.STEP_RETRY,))
_REPLACED = Expected((Rung.PROCESS_REPLACE,))
_FROM_CHECKPOINT = Expected((Rung.IN_PLACE_RESTART,), steps_lost=SAVE_EVERY_STEPS)
_HANGS = {"restart": {"hang_timeout_s": HANG_TIMEOUT_S}}
_TRE = {
    "numeric_retry": True,
    "snapshot_every_steps": SNAPSHOT_EVERY_STEPS,
    "abnormal_loss": _ABNORMAL,
    "abnormal_grad_norm": _ABNORMAL,
}
# The last snapshot is at least a step old, and at most as old as the distance of two.
_TO_SNAPSHOT = SNAPSHOT_EVERY_STEPS - 1
# In a slow store, the only save before the fault may be incomplete when the node is lost.
_WITHOUT_A_NODE = AT_STEP - 1
_RESCHEDULED = Expected((Rung.POD_RESCHEDULE,), steps_lost=_WITHOUT_A_NODE)
_WARM = {"engine": {"warm_spares": 1}}
# The copies of the only save have seven steps to complete.
_AFTER_THE_COPY = SAVE_EVERY_STEPS + 8
_SINCE_THE_SAVE = _AFTER_THE_COPY - 1 - SAVE_EVERY_STEPS

DRILLS: tuple[Drill, ...] = (
    Drill(
        "operator-retry",
        "rank 1 loses its connections while gradients are reduced",
        Expected((Rung.OPERATOR_RETRY,)),
        faults=(_fault(DrillKind.LINK, 1, DrillPoint.REDUCING),),
        changes={"comm": {"link_retry": True}},
        is_of_gloo=True,
    ),
    Drill(
        "step-retry-uce",
        "device memory of rank 2 is damaged (UCE)",
        _STEP_RETRY,
        faults=(_fault(DrillKind.DEVICE_MEMORY, 2),),
        without_replicas=_FROM_CHECKPOINT,
    ),
    Drill(
        "step-retry-hcce",
        "a collective of rank 1 fails (HCCE)",
        _STEP_RETRY,
        faults=(_fault(DrillKind.COLLECTIVE, 1, DrillPoint.PREPARED),),
    ),
    Drill(
        "link-broken",
        "rank 1 loses its connections",
        _STEP_RETRY,
        faults=(_fault(DrillKind.LINK, 1),),
        is_of_gloo=True,
    ),
    Drill(
        "tre",
        "loss and gradient of rank 0 are 10,000 times too large",
        Expected((Rung.STEP_RETRY,), steps_lost=_TO_SNAPSHOT),
        faults=(_fault(DrillKind.GRADIENT, 0),),
        changes={"restart": _TRE},
    ),
    Drill(
        "tre-persistent",
        "the same, and again when the step is executed again: accepted",
        Expected((Rung.STEP_RETRY, Rung.STEP_RETRY), steps_lost=_TO_SNAPSHOT),
        faults=(_fault(DrillKind.GRADIENT, 0, times=2),),
        changes={"restart": _TRE},
        differs_from=AT_STEP,
    ),
    Drill(
        "replace-rank",
        "SIGKILL of rank 3",
        _REPLACED,
        faults=(_fault(DrillKind.KILL, 3),),
        without_replicas=_FROM_CHECKPOINT,
    ),
    Drill(
        "replace-first-rank",
        "SIGKILL of rank 0, between two collectives of a step",
        _REPLACED,
        faults=(_fault(DrillKind.KILL, 0, DrillPoint.PREPARED),),
        without_replicas=_FROM_CHECKPOINT,
    ),
    Drill(
        "replace-two",
        "SIGKILL of ranks 1 and 2 in the same step",
        Expected((Rung.PROCESS_REPLACE, Rung.PROCESS_REPLACE)),
        faults=(_fault(DrillKind.KILL, 1), _fault(DrillKind.KILL, 2)),
        without_replicas=_FROM_CHECKPOINT,
    ),
    Drill(
        "death-in-recovery",
        "a collective of rank 1 fails; SIGKILL of rank 2 during the recovery",
        Expected((Rung.STEP_RETRY, Rung.PROCESS_REPLACE)),
        faults=(
            _fault(DrillKind.COLLECTIVE, 1),
            _fault(DrillKind.KILL, 2, DrillPoint.RECOVERY),
        ),
        without_replicas=_FROM_CHECKPOINT,
    ),
    Drill(
        "replica-holder-dies",
        "SIGKILL of rank 0, and of all ranks with the same state while it is replaced",
        _FROM_CHECKPOINT,
        faults=(_fault(DrillKind.KILL, 0),),
        hits_replicas=True,
    ),
    Drill(
        "end-of-life",
        "SIGKILL of rank 1 while process replacement is off",
        Expected((Rung.IN_PLACE_RESTART,), last_save=AT_STEP - 1),
        faults=(_fault(DrillKind.KILL, 1),),
        changes={"restart": {"process_replace": False}},
        without_replicas=_FROM_CHECKPOINT,
    ),
    Drill(
        "program-error",
        "an exception of the program on rank 2; the run is started again",
        Expected((Rung.STOP,), last_save=AT_STEP - 1),
        faults=(_fault(DrillKind.EXCEPTION, 2),),
        without_replicas=Expected((Rung.STOP,), steps_lost=SAVE_EVERY_STEPS),
        starts=2,
    ),
    Drill(
        "hang",
        "SIGSTOP of rank 2",
        Expected((Rung.HANG_RESTART,), steps_lost=SAVE_EVERY_STEPS),
        faults=(_fault(DrillKind.STOP, 2),),
        changes=_HANGS,
    ),
    Drill(
        "hang-at-start",
        "SIGSTOP of rank 2 before it restores its state",
        Expected((Rung.HANG_RESTART,)),
        faults=(_fault(DrillKind.STOP, 2, DrillPoint.RESTORE),),
        changes=_HANGS,
    ),
    Drill(
        "hang-in-recovery",
        "a collective of rank 1 fails; SIGSTOP of rank 2 during the recovery",
        Expected((Rung.HANG_RESTART,), steps_lost=SAVE_EVERY_STEPS),
        faults=(
            _fault(DrillKind.COLLECTIVE, 1),
            _fault(DrillKind.STOP, 2, DrillPoint.RECOVERY),
        ),
        changes=_HANGS,
    ),
    Drill(
        "node-lost",
        "SIGKILL of everything on the node of rank 2, with a warm spare",
        Expected((Rung.NODE_REPLACE,)),
        faults=(_fault(DrillKind.NODE, 2),),
        changes=_WARM,
        without_replicas=_RESCHEDULED,
    ),
    Drill(
        "node-lost-cold",
        "the same without a warm spare",
        Expected((Rung.NODE_REPLACE,)),
        faults=(_fault(DrillKind.NODE, 2),),
        without_replicas=_RESCHEDULED,
    ),
    Drill(
        "first-node-lost",
        "SIGKILL of everything on the node of rank 0, with the coordinator and the attempt's log",
        Expected((Rung.NODE_REPLACE,)),
        faults=(_fault(DrillKind.NODE, 0),),
        changes=_WARM,
        without_replicas=_RESCHEDULED,
    ),
    Drill(
        "two-nodes-lost",
        "SIGKILL of everything on two nodes of four at once, with two warm spares",
        Expected((Rung.NODE_REPLACE, Rung.NODE_REPLACE)),
        faults=(_fault(DrillKind.NODE, 2), _fault(DrillKind.NODE, 3)),
        changes={"engine": {"warm_spares": 2}},
        without_replicas=_RESCHEDULED,
        num_nodes=4,
    ),
    Drill(
        "node-rescheduled",
        "`node-lost` while node replacement is off",
        _RESCHEDULED,
        faults=(_fault(DrillKind.NODE, 2),),
        changes={"restart": {"node_replace": False}, **_WARM},
    ),
    Drill(
        "node-rescheduled-cold",
        "the same without a warm spare",
        _RESCHEDULED,
        faults=(_fault(DrillKind.NODE, 2),),
        changes={"restart": {"node_replace": False}},
    ),
    Drill(
        "node-lost-partner",
        "the same while a partner node holds copies of its memory",
        Expected((Rung.POD_RESCHEDULE,), steps_lost=_SINCE_THE_SAVE, num_fetched=0),
        faults=(_fault(DrillKind.NODE, 2, step=_AFTER_THE_COPY),),
        changes={"restart": {"node_replace": False}, "checkpoint": {"partner_copies": 1}},
    ),
    Drill(
        "node-isolated",
        "`node-rescheduled-cold` while pod rescheduling is off as well",
        Expected((Rung.JOB_RESCHEDULE_ISOLATED,), steps_lost=_WITHOUT_A_NODE),
        faults=(_fault(DrillKind.NODE, 2),),
        changes={"restart": {"pod_retries": 0, "node_replace": False}},
    ),
    Drill(
        "pause",
        "a pause request, withdrawn later",
        Expected(()),
        pauses_at=3,
    ),
)
