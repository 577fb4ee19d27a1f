"""The rungs of the recovery ladder, what each costs, and which of them answer which fault.

Tables only. A rung's place in `Rung` is its cost: every ladder goes through them in that order
and ends in stop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from training.recovery.faults import FaultClass


class Rung(StrEnum):
    """Recovery actions, cheapest first."""

    OPERATOR_RETRY = "operator_retry"
    STEP_RETRY = "step_retry"
    PROCESS_REPLACE = "process_replace"
    IN_PLACE_RESTART = "in_place_restart"
    HANG_RESTART = "hang_restart"
    POD_RESCHEDULE = "pod_reschedule"
    JOB_RESCHEDULE_ISOLATED = "job_reschedule_isolated"
    JOB_RESCHEDULE = "job_reschedule"
    STOP = "stop"


COST: Mapping[Rung, int] = {rung: index for index, rung in enumerate(Rung)}


@dataclass(frozen=True, slots=True)
class RungFacts:
    """What a rung costs and who carries it out; the rows of the printed table."""

    source_name: str
    lost: str
    who_acts: str
    prefect_sees: str


RUNGS: Mapping[Rung, RungFacts] = {
    Rung.OPERATOR_RETRY: RungFacts(
        "operator-level online recovery (HCCL retransmission)", "nothing", "runtime", "event"
    ),
    Rung.STEP_RETRY: RungFacts(
        "UCE, HCCE, TRE: step-level recomputation", "one step", "runtime, coordinator", "event"
    ),
    Rung.PROCESS_REPLACE: RungFacts(
        "ARF: process-level rescheduling", "one step", "agent, coordinator", "event"
    ),
    Rung.IN_PLACE_RESTART: RungFacts(
        "in-place recovery (same containers)", "steps since checkpoint", "agent", "task retry"
    ),
    Rung.HANG_RESTART: RungFacts(
        "hang restart (same containers)", "steps since checkpoint", "agent", "task retry"
    ),
    Rung.POD_RESCHEDULE: RungFacts(
        "Pod rescheduling, RSC", "steps since checkpoint", "engine", "new task run"
    ),
    Rung.JOB_RESCHEDULE_ISOLATED: RungFacts(
        "isolated job-level rescheduling", "steps since checkpoint", "engine", "new task run"
    ),
    Rung.JOB_RESCHEDULE: RungFacts(
        "unconditional job-level rescheduling", "steps since checkpoint", "engine", "new task run"
    ),
    Rung.STOP: RungFacts("job failed", "-", "flow", "flow run Failed"),
}

IN_PROCESS = frozenset({Rung.OPERATOR_RETRY, Rung.STEP_RETRY, Rung.PROCESS_REPLACE})
RESTARTS_IN_PLACE = frozenset({Rung.IN_PLACE_RESTART, Rung.HANG_RESTART})
RESCHEDULES = frozenset({Rung.POD_RESCHEDULE, Rung.JOB_RESCHEDULE_ISOLATED, Rung.JOB_RESCHEDULE})
ISOLATES = frozenset({Rung.POD_RESCHEDULE, Rung.JOB_RESCHEDULE_ISOLATED})
STAYS_ON_CHIP = IN_PROCESS | RESTARTS_IN_PLACE

_ISOLATE = (Rung.POD_RESCHEDULE, Rung.JOB_RESCHEDULE_ISOLATED, Rung.JOB_RESCHEDULE, Rung.STOP)
_HEAL = (Rung.IN_PLACE_RESTART, *_ISOLATE)
_NOT_THE_NODE = (Rung.IN_PLACE_RESTART, Rung.JOB_RESCHEDULE, Rung.STOP)

# Rungs inside the processes answer what they can mend. One process that died is replaced; a
# link or collective that failed leaves the state whole, so the step is executed again; a
# program's own exception is never retried there. An abnormal step that came again and cannot be
# accepted may be one process's doing. A device that is lost is not met again by a
# process on the same node: its ladder begins with another node.
LADDER: Mapping[FaultClass, tuple[Rung, ...]] = {
    FaultClass.DEVICE_MEMORY_ERROR: (Rung.STEP_RETRY, Rung.PROCESS_REPLACE, *_HEAL),
    FaultClass.DEVICE_LOST: _ISOLATE,
    FaultClass.OPERATOR_ERROR: (Rung.PROCESS_REPLACE, *_HEAL),
    FaultClass.DEVICE_OOM: _NOT_THE_NODE,
    FaultClass.HOST_OOM: (Rung.PROCESS_REPLACE, *_HEAL),
    FaultClass.COLLECTIVE_TIMEOUT: (Rung.STEP_RETRY, Rung.PROCESS_REPLACE, *_HEAL),
    FaultClass.LINK_DOWN: (Rung.OPERATOR_RETRY, Rung.STEP_RETRY, *_HEAL),
    FaultClass.HANG: (Rung.HANG_RESTART, Rung.STOP),
    FaultClass.NODE_LOST: _ISOLATE,
    FaultClass.FAIL_SLOW: _ISOLATE,
    FaultClass.STORAGE_ERROR: _NOT_THE_NODE,
    FaultClass.CHECKPOINT_CORRUPT: _NOT_THE_NODE,
    FaultClass.DATALOADER_ERROR: _NOT_THE_NODE,
    FaultClass.NUMERIC_ANOMALY: (Rung.STEP_RETRY, Rung.PROCESS_REPLACE, *_NOT_THE_NODE),
    FaultClass.NATIVE_CRASH: (Rung.PROCESS_REPLACE, *_HEAL),
    FaultClass.PREEMPTED: (Rung.JOB_RESCHEDULE, Rung.STOP),
    FaultClass.USER_CODE_ERROR: (Rung.STOP,),
    FaultClass.LAUNCH_MISCONFIGURED: (Rung.STOP,),
    FaultClass.VERSION_MISMATCH: (Rung.STOP,),
    FaultClass.UNKNOWN: _NOT_THE_NODE,
}
