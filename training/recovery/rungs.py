"""The rungs of the recovery ladder, the policy that they read, and what is decided by them.

A rung is its row of `RUNGS`; its place in `Rung` is its cost: every ladder goes through them in
that order and ends in stop. Budgets are counts of recoveries in a row without progress, where
the policy has it so; progress is a checkpoint committed after the recovery.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Self

from pydantic import ConfigDict, Field, model_validator

from perdure.storage.frozen_model import SettingsModel
from perdure.training.recovery.faults import Fault, FaultClass


class RestartCount(StrEnum):
    """Which reschedulings use up max_restarts and pod_retries."""

    WITHOUT_PROGRESS = "without_progress"  # those in a row that nothing was committed after
    EVER = "ever"  # all since the run was started, as on ModelArts


class JobPolicy(SettingsModel):
    """The part of the restart policy that decisions depend on and a job's restart section sets."""

    max_restarts: int = Field(
        3,
        ge=0,
        le=128,
        description="number of reschedulings (job-retry-num), counted as `count` says; 0: no "
        "rescheduling",
    )
    count: RestartCount = Field(
        RestartCount.WITHOUT_PROGRESS, description="which reschedulings use up max_restarts and "
        "pod_retries; without_progress: those in a row without a committed checkpoint; ever: all "
        "since the run started, as on ModelArts"
    )  # fmt: skip
    in_place: bool = Field(
        True, description="restart processes in their containers when that is enough"
    )
    in_place_retries: int = Field(
        3, ge=1, le=128, description="number of in-place restarts in a row without a new checkpoint"
    )
    unconditional: bool = Field(
        True, description="reschedule on any non-zero exit (job-unconditional-retry)"
    )
    hang: bool = Field(True, description="detect hangs and restart after them (hang-retry)")
    pod_retries: int = Field(
        0,
        ge=0,
        le=128,
        description="number of times that only the broken node is replaced (pod-retry-num); on "
        "Kubernetes 3, unless the job or its platform sets a number of restarts",
    )
    allow_without_isolation: bool = Field(
        True,
        description="if no spare is available, let the job return to nodes that should be isolated",
    )
    pod_before_in_place: bool = Field(
        False, description="replace the container of a process that ended, or of a node at fault, "
        "before processes restart in place (RSC); requires pod_retries"
    )  # fmt: skip
    memory_retry: bool = Field(
        True, description="re-execute the step after a device memory error (UCE)"
    )
    collective_retry: bool = Field(
        True, description="re-execute a step whose collective or link failed (HCCE)"
    )
    process_replace: bool = Field(
        True, description="replace the process of a lost rank while the others live on (ARF)"
    )
    process_in_place: bool = Field(
        True, description="allow process_replace also on a chip that had a fault (recover-in-place)"
    )
    node_replace: bool = Field(
        True, description="replace a lost node while the processes of the other nodes live on "
        "(ARF node by node, recover)"
    )  # fmt: skip
    end_of_life_checkpoint: bool = Field(
        True, description="save the last completed step before processes are ended (TTP)"
    )
    numeric_retry: bool = Field(
        False, description="re-execute a step whose loss or gradient norm is abnormal (TRE)"
    )
    data_skipping: bool = Field(
        False, description="skip batches whose loss or gradient norm is abnormal, permanently "
        "(use_skip_data_by_global_norm); excludes numeric_retry"
    )  # fmt: skip
    mindcluster_frequency: bool = Field(
        False, description="also isolate a chip's node at MindCluster's own thresholds for each "
        "fault code (2, 3 or 5 times in 24 h), in addition to 3 in a row"
    )  # fmt: skip


class Policy(JobPolicy):
    """The restart policy that decisions depend on.

    Attributes:
        operator_retry: HCCL may re-execute a broken collective (hccl_op_retry); the job's comm
            section has the switch.
    """

    operator_retry: bool = False

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.numeric_retry and self.data_skipping:
            raise ValueError("numeric_retry=true and data_skipping=true exclude each other")
        return self


class Rung(StrEnum):
    """Recovery actions, cheapest first."""

    OPERATOR_RETRY = "operator_retry"
    STEP_RETRY = "step_retry"
    PROCESS_REPLACE = "process_replace"
    NODE_REPLACE = "node_replace"
    IN_PLACE_RESTART = "in_place_restart"
    HANG_RESTART = "hang_restart"
    POD_RESCHEDULE = "pod_reschedule"
    JOB_RESCHEDULE_ISOLATED = "job_reschedule_isolated"
    JOB_RESCHEDULE = "job_reschedule"
    STOP = "stop"

    @property
    def cost(self) -> int:
        """Its place on the ladder."""
        return list(Rung).index(self)


class Scope(StrEnum):
    """How much of a run a rung starts again, so who does it; the value is what Prefect sees."""

    PROCESSES = "event"  # they live on: needs survivors, stays on the chip
    CONTAINERS = "task retry"  # they live on with new processes: stays on the chip
    PLACEMENT = "new task run"  # new containers
    RUN = "flow run Failed"


@dataclass(frozen=True, slots=True)
class RungRow:
    """What there is to know about a rung.

    Attributes:
        scope: how much of the run it starts again.
        source_name: its mechanism where it comes from.
        who_acts: parts of Perdure that carry it out.
        spent_on: what the time that it takes is spent on.
        colour: of that time in pictures.
        is_on: whether the policy lets it answer faults of a class.
        budget: how many in a row; None: no number of its own.
        lost: what is trained again.
        state_name: of the Prefect state that it begins with; empty for a mere event.
        isolates: whether it keeps the node of the fault out of further placements.
    """

    scope: Scope
    source_name: str
    who_acts: str
    spent_on: str
    colour: str
    is_on: Callable[[Policy, FaultClass], bool] = lambda _policy, _class: True
    budget: Callable[[Policy], int] | None = None
    lost: str = "steps since checkpoint"
    state_name: str = ""
    isolates: bool = False


# Ours, the sources leave it open: more in a row without a commit is no passing fault.
IN_PROCESS_IN_A_ROW = 3
HANG_RESTARTS_IN_A_ROW = 3  # ModelArts, "Restart Upon Suspension"
_NUMERIC = FaultClass.NUMERIC_ANOMALY


def _step_is_retried(policy: Policy, fault_class: FaultClass) -> bool:
    """MindFormers' UCE and TRE; what else a step is executed again for is its HCCE."""
    if fault_class is FaultClass.DEVICE_MEMORY_ERROR:
        return policy.memory_retry
    return policy.numeric_retry if fault_class is _NUMERIC else policy.collective_retry


RUNGS: Mapping[Rung, RungRow] = {
    Rung.OPERATOR_RETRY: RungRow(
        Scope.PROCESSES,
        "operator-level online recovery (HCCL retransmission)",
        "runtime",
        "one operation of a collective again",
        "#ce93d8",
        is_on=lambda policy, _class: policy.operator_retry,
        budget=lambda _: IN_PROCESS_IN_A_ROW,
        lost="nothing",
    ),
    Rung.STEP_RETRY: RungRow(
        Scope.PROCESSES,
        "UCE, HCCE, TRE: step-level recomputation",
        "runtime, coordinator",
        "one step again",
        "#ba68c8",
        is_on=_step_is_retried,
        budget=lambda _: IN_PROCESS_IN_A_ROW,
        lost="one step",
    ),
    Rung.PROCESS_REPLACE: RungRow(
        Scope.PROCESSES,
        "ARF: process-level rescheduling",
        "agent, coordinator",
        "a new process for a rank",
        "#9c4dcc",
        # After an anomaly all go back to a snapshot: without the retry there is none.
        is_on=lambda policy, fault_class: (
            policy.process_replace and (policy.numeric_retry or fault_class is not _NUMERIC)
        ),
        budget=lambda _: IN_PROCESS_IN_A_ROW,
        lost="one step",
    ),
    Rung.NODE_REPLACE: RungRow(
        Scope.PROCESSES,
        "ARF node by node: process-level rescheduling",
        "engine (spare), coordinator",
        "another node for one that is lost",
        "#8a3ab9",
        is_on=lambda policy, _class: policy.node_replace,
        budget=lambda _: IN_PROCESS_IN_A_ROW,
        lost="one step",
        isolates=True,
    ),
    Rung.IN_PLACE_RESTART: RungRow(
        Scope.CONTAINERS,
        "in-place recovery (same containers)",
        "agent",
        "new processes in the same containers",
        "#7b1fa2",
        is_on=lambda policy, _class: policy.in_place,
        budget=lambda policy: policy.in_place_retries,
        state_name="RestartInPlace",
    ),
    Rung.HANG_RESTART: RungRow(
        Scope.CONTAINERS,
        "hang restart (same containers)",
        "agent",
        "new processes after a hang",
        "#6a1b9a",
        is_on=lambda policy, _class: policy.hang,
        budget=lambda _: HANG_RESTARTS_IN_A_ROW,
        state_name="RestartAfterHang",
    ),
    Rung.POD_RESCHEDULE: RungRow(
        Scope.PLACEMENT,
        "Pod rescheduling, RSC",
        "engine",
        "a new container for a member",
        "#5e35b1",
        is_on=lambda policy, _class: policy.pod_retries > 0,
        budget=lambda policy: policy.pod_retries,
        state_name="ReschedulePod",
        isolates=True,
    ),
    Rung.JOB_RESCHEDULE_ISOLATED: RungRow(
        Scope.PLACEMENT,
        "isolated job-level rescheduling",
        "engine",
        "new containers away from isolated nodes",
        "#4527a0",
        state_name="RescheduleIsolated",
        isolates=True,
    ),
    Rung.JOB_RESCHEDULE: RungRow(
        Scope.PLACEMENT,
        "unconditional job-level rescheduling",
        "engine",
        "new containers",
        "#311b92",
        state_name="RescheduleJob",
    ),
    Rung.STOP: RungRow(Scope.RUN, "job failed", "flow", "", "", lost="-", state_name="Stopped"),
}


def _of(*scopes: Scope) -> frozenset[Rung]:
    return frozenset(rung for rung, row in RUNGS.items() if row.scope in scopes)


IN_PROCESS = _of(Scope.PROCESSES)
RESTARTS_IN_PLACE = _of(Scope.CONTAINERS)
RESCHEDULES = _of(Scope.PLACEMENT)
STAYS_ON_CHIP = (IN_PROCESS - {Rung.NODE_REPLACE}) | RESTARTS_IN_PLACE
ISOLATES = frozenset(rung for rung, row in RUNGS.items() if row.isolates)


def restarts_in_a_row(policy: Policy) -> int:
    """How many restarts in place the policy allows at most without progress.

    Each restart for another fault ends a row of hangs, so that the next one is counted anew.
    """
    in_place = policy.in_place_retries if policy.in_place else 0
    return in_place + (HANG_RESTARTS_IN_A_ROW * (in_place + 1) if policy.hang else 0)


_MOVE = (Rung.POD_RESCHEDULE, Rung.JOB_RESCHEDULE_ISOLATED, Rung.JOB_RESCHEDULE, Rung.STOP)
_ISOLATE = (Rung.NODE_REPLACE, *_MOVE)
LEAVES_THE_NODE = (Rung.POD_RESCHEDULE, Rung.JOB_RESCHEDULE_ISOLATED, Rung.STOP)
_HEAL = (Rung.NODE_REPLACE, Rung.IN_PLACE_RESTART, *_MOVE)
_NOT_THE_NODE = (Rung.IN_PLACE_RESTART, Rung.JOB_RESCHEDULE, Rung.STOP)

# Rungs inside the processes answer what they can recover from. One process that died is replaced; a
# link or collective that failed leaves the state whole, so the step is executed again; a
# program's own exception is never retried there. What an earlier process left is gone in a new
# container. An abnormal step that came again and cannot be
# accepted may be one process's doing. A device that is lost is not met again by a
# process on the same node: its ladder begins with another node. What software does never isolates
# a node; on evidence that it is the node, the rungs that do are added (guards.rungs_for).
LADDER: Mapping[FaultClass, tuple[Rung, ...]] = {
    FaultClass.DEVICE_MEMORY_ERROR: (Rung.STEP_RETRY, Rung.PROCESS_REPLACE, *_HEAL),
    FaultClass.DEVICE_LOST: _ISOLATE,
    FaultClass.OPERATOR_ERROR: (Rung.PROCESS_REPLACE, *_NOT_THE_NODE),
    FaultClass.DEVICE_OOM: _NOT_THE_NODE,
    FaultClass.HOST_OOM: (Rung.PROCESS_REPLACE, *_NOT_THE_NODE),
    FaultClass.COLLECTIVE_TIMEOUT: (Rung.STEP_RETRY, Rung.PROCESS_REPLACE, *_NOT_THE_NODE),
    FaultClass.LINK_DOWN: (Rung.OPERATOR_RETRY, Rung.STEP_RETRY, *_HEAL),
    FaultClass.HANG: (Rung.HANG_RESTART, Rung.STOP),
    FaultClass.NODE_LOST: _ISOLATE,
    FaultClass.CONTAINER_LOST: (
        *(Rung.NODE_REPLACE, Rung.POD_RESCHEDULE, Rung.JOB_RESCHEDULE, Rung.STOP),
    ),
    FaultClass.FAIL_SLOW: _ISOLATE,
    FaultClass.STORAGE_ERROR: _NOT_THE_NODE,
    FaultClass.CHECKPOINT_CORRUPT: _NOT_THE_NODE,
    FaultClass.LEFTOVER: (Rung.POD_RESCHEDULE, Rung.JOB_RESCHEDULE, Rung.STOP),
    FaultClass.DATALOADER_ERROR: _NOT_THE_NODE,
    FaultClass.NUMERIC_ANOMALY: (Rung.STEP_RETRY, Rung.PROCESS_REPLACE, *_NOT_THE_NODE),
    FaultClass.NATIVE_CRASH: (Rung.PROCESS_REPLACE, *_NOT_THE_NODE),
    FaultClass.PREEMPTED: (Rung.JOB_RESCHEDULE, Rung.STOP),
    FaultClass.RESTART_REQUESTED: _NOT_THE_NODE,
    FaultClass.USER_CODE_ERROR: (Rung.STOP,),
    FaultClass.LAUNCH_MISCONFIGURED: (Rung.STOP,),
    FaultClass.VERSION_MISMATCH: (Rung.STOP,),
    FaultClass.UNKNOWN: _NOT_THE_NODE,
}


@dataclass(frozen=True, slots=True)
class Recovery:
    """One past recovery of the run; a start order carries it as it is.

    Attributes:
        fault: what it answered.
        rung: what was done.
        progressed: whether a new step was committed after it.
        failed: whether the rung itself could not be carried out (no spare, no container, no
            replica to repair from).
        cut_short: whether another fault came before the rung was carried out, and the processes
            ended over it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    fault: Fault
    rung: Rung
    progressed: bool
    failed: bool = False
    cut_short: bool = False


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many nodes there are for the job.

    Attributes:
        healthy: nodes that may take part, the one at fault counted; None: unknown.
        needed: nodes that the job runs on.
        is_estimate: whether the platform chooses nodes, and may have more.
    """

    healthy: int | None
    needed: int
    is_estimate: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do about a fault; records embed it as it is.

    Attributes:
        rung: the recovery action.
        isolate: node to keep out of further placements, None for no node.
        reason: stable text, shown in the UI and asserted in tests.
        skipped: rungs passed over, each with why.
        end_of_life_checkpoint: whether the survivors commit the last completed step before the
            rung starts (TTP), as far as they hold a complete set of replicas.
        accept_abnormal: the step that is abnormal again is taken as it is and recorded, instead
            of being executed once more; only with step_retry.
        sub_healthy: whether the job is marked sub-healthy once the rung has succeeded.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    rung: Rung
    isolate: str | None
    reason: str
    skipped: tuple[str, ...] = ()
    end_of_life_checkpoint: bool = False
    accept_abnormal: bool = False
    sub_healthy: bool = False
