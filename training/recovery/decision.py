"""What goes into a decision and what comes out of it: policy, past recoveries, capacity, answer.

Frozen records. Budgets are counts of recoveries in a row without progress; progress is a
checkpoint committed after the recovery.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

from training.recovery.faults import Fault
from training.recovery.rungs import Rung


@dataclass(frozen=True, slots=True)
class Policy:
    """The part of the restart policy that decisions depend on.

    Attributes:
        max_restarts: reschedulings in a row without progress (job-retry-num).
        in_place: whether processes may be restarted in their containers.
        in_place_retries: in-place restarts in a row without progress.
        unconditional: reschedule on any non-zero exit (job-unconditional-retry).
        hang: restart when no rank makes progress (hang-retry).
        pod_retries: single nodes replaced in a row without progress (pod-retry-num).
        allow_without_isolation: no spare: may the job go back to nodes that were to be isolated.
        operator_retry: HCCL may re-execute a broken collective (hccl_op_retry).
        step_retry: UCE and HCCE, re-execution of one step.
        process_replace: ARF, a new process for one rank.
        end_of_life_checkpoint: TTP, the survivors save before they are ended.
        numeric_retry: TRE, re-execution of a step whose loss or norm is abnormal.
        data_skipping: batches with abnormal loss are skipped; excludes numeric_retry.
        mindcluster_frequency: MindCluster's limits per code count beside ModelArts' for all.
    """

    max_restarts: int = 3
    in_place: bool = True
    in_place_retries: int = 3
    unconditional: bool = True
    hang: bool = True
    pod_retries: int = 0
    allow_without_isolation: bool = True
    operator_retry: bool = False
    step_retry: bool = True
    process_replace: bool = True
    end_of_life_checkpoint: bool = True
    numeric_retry: bool = False
    data_skipping: bool = False
    mindcluster_frequency: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be together."""
        if self.numeric_retry and self.data_skipping:
            raise ValueError("numeric_retry=true and data_skipping=true exclude each other")


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
        healthy: nodes that may take part, the one at fault counted.
        needed: nodes that the job stands on.
    """

    healthy: int
    needed: int


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
        sub_healthy: whether the job is marked sub-healthy once the rung has mended it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    rung: Rung
    isolate: str | None
    reason: str
    skipped: tuple[str, ...] = ()
    end_of_life_checkpoint: bool = False
    accept_abnormal: bool = False
    sub_healthy: bool = False
