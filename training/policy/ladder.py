"""The recovery ladder: which rung answers a fault, and when to climb to the next.

Pure functions over frozen records: no clock, no I/O, no torch. The flow and the simulator
call the same `decide`. Times are seconds, budgets are counts of recoveries in a row without
progress; progress is a checkpoint committed after the recovery.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from training.policy.faults import (
    NODE_OR_CHIP,
    USER_CAUSED_CODES,
    USER_MUST_MEND,
    Fault,
    FaultClass,
)


class Rung(StrEnum):
    """Recovery actions, cheapest first."""

    IN_PLACE_RESTART = "in_place_restart"
    HANG_RESTART = "hang_restart"
    POD_RESCHEDULE = "pod_reschedule"
    JOB_RESCHEDULE_ISOLATED = "job_reschedule_isolated"
    JOB_RESCHEDULE = "job_reschedule"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class RungFacts:
    """What a rung costs and who carries it out; the rows of the printed table."""

    source_name: str
    lost: str
    who_acts: str
    prefect_sees: str


RUNGS: Mapping[Rung, RungFacts] = {
    Rung.IN_PLACE_RESTART: RungFacts(
        "in-place recovery (same containers)", "steps since checkpoint", "agent", "task retry"
    ),
    Rung.HANG_RESTART: RungFacts(
        "hang restart (same containers)", "steps since checkpoint", "agent", "task retry"
    ),
    Rung.POD_RESCHEDULE: RungFacts(
        "Pod rescheduling", "steps since checkpoint", "engine", "new task run"
    ),
    Rung.JOB_RESCHEDULE_ISOLATED: RungFacts(
        "isolated job-level rescheduling", "steps since checkpoint", "engine", "new task run"
    ),
    Rung.JOB_RESCHEDULE: RungFacts(
        "unconditional job-level rescheduling", "steps since checkpoint", "engine", "new task run"
    ),
    Rung.STOP: RungFacts("job failed", "-", "flow", "flow run Failed"),
}

RESTARTS_IN_PLACE = frozenset({Rung.IN_PLACE_RESTART, Rung.HANG_RESTART})
RESCHEDULES = frozenset({Rung.POD_RESCHEDULE, Rung.JOB_RESCHEDULE_ISOLATED, Rung.JOB_RESCHEDULE})
ISOLATES = frozenset({Rung.POD_RESCHEDULE, Rung.JOB_RESCHEDULE_ISOLATED})

_IN_PLACE = (
    Rung.IN_PLACE_RESTART,
    Rung.POD_RESCHEDULE,
    Rung.JOB_RESCHEDULE_ISOLATED,
    Rung.JOB_RESCHEDULE,
    Rung.STOP,
)
_BROKEN_NODE = (
    Rung.POD_RESCHEDULE,
    Rung.JOB_RESCHEDULE_ISOLATED,
    Rung.JOB_RESCHEDULE,
    Rung.STOP,
)
_NOT_THE_NODE = (Rung.IN_PLACE_RESTART, Rung.JOB_RESCHEDULE, Rung.STOP)

LADDER: Mapping[FaultClass, tuple[Rung, ...]] = {
    FaultClass.DEVICE_MEMORY_ERROR: _IN_PLACE,
    FaultClass.DEVICE_LOST: _BROKEN_NODE,
    FaultClass.OPERATOR_ERROR: _IN_PLACE,
    FaultClass.DEVICE_OOM: _NOT_THE_NODE,
    FaultClass.HOST_OOM: _IN_PLACE,
    FaultClass.COLLECTIVE_TIMEOUT: _IN_PLACE,
    FaultClass.LINK_DOWN: _IN_PLACE,
    FaultClass.HANG: (Rung.HANG_RESTART, Rung.STOP),
    FaultClass.NODE_LOST: _BROKEN_NODE,
    FaultClass.STORAGE_ERROR: _NOT_THE_NODE,
    FaultClass.CHECKPOINT_CORRUPT: _NOT_THE_NODE,
    FaultClass.DATALOADER_ERROR: _NOT_THE_NODE,
    FaultClass.NUMERIC_ANOMALY: _NOT_THE_NODE,
    FaultClass.NATIVE_CRASH: _IN_PLACE,
    FaultClass.PREEMPTED: (Rung.JOB_RESCHEDULE, Rung.STOP),
    FaultClass.USER_CODE_ERROR: (Rung.STOP,),
    FaultClass.LAUNCH_MISCONFIGURED: (Rung.STOP,),
    FaultClass.VERSION_MISMATCH: (Rung.STOP,),
    FaultClass.UNKNOWN: _NOT_THE_NODE,
}

HANG_RESTARTS_IN_A_ROW = 3
UNCONDITIONAL_RESCHEDULES_IN_A_ROW = 3
SAME_CODE_TIMES = 3
SAME_CODE_WINDOW_S = 24 * 3600.0


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

    def __post_init__(self) -> None:
        """Refuse what cannot be together."""
        if self.numeric_retry and self.data_skipping:
            raise ValueError("numeric_retry=true and data_skipping=true exclude each other")


@dataclass(frozen=True, slots=True)
class Recovery:
    """One past recovery of the run.

    Attributes:
        fault: what it answered.
        rung: what was done.
        progressed: whether a new step was committed after it.
        failed: whether the rung itself could not be carried out (no spare, no container).
    """

    fault: Fault
    rung: Rung
    progressed: bool
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do about a fault.

    Attributes:
        rung: the recovery action.
        isolate: node to keep out of further placements, None for no node.
        reason: stable text, shown in the UI and asserted in tests.
        skipped: rungs passed over, each with why.
    """

    rung: Rung
    isolate: str | None
    reason: str
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Case:
    """Everything a rung's guard may look at."""

    fault: Fault
    row: Sequence[Recovery]  # recoveries in a row without progress, oldest first
    policy: Policy
    isolation_due: bool

    def used(self, *rungs: Rung) -> int:
        """Recoveries of the row that were carried out; a last resort that failed counts too."""
        return sum(
            past.rung in rungs and (not past.failed or past.rung is Rung.JOB_RESCHEDULE)
            for past in self.row
        )


def _in_place_refusal(case: _Case) -> str | None:
    if not case.policy.in_place:
        return "switched off"
    if case.isolation_due:
        return f"code {case.fault.code} came {SAME_CODE_TIMES} times in 24 h"
    if any(past.failed and past.rung is Rung.IN_PLACE_RESTART for past in case.row):
        return "the last one failed"
    used = case.used(Rung.IN_PLACE_RESTART)
    if used >= case.policy.in_place_retries:
        return f"used {used} of {case.policy.in_place_retries} in a row"
    if case.used(*RESCHEDULES) and _same_fault(case.row[-1].fault, case.fault):
        return "a costlier rung already answered this fault"
    return None


def _hang_refusal(case: _Case) -> str | None:
    if not case.policy.hang:
        return "switched off"
    used = case.used(Rung.HANG_RESTART)
    if used >= HANG_RESTARTS_IN_A_ROW:
        return f"used {used} of {HANG_RESTARTS_IN_A_ROW} in a row"
    return None


def _budget_refusal(case: _Case) -> str | None:
    used = case.used(*RESCHEDULES)
    if used >= case.policy.max_restarts:
        return f"max_restarts used {used} of {case.policy.max_restarts}"
    return None


def _pod_refusal(case: _Case) -> str | None:
    used = case.used(Rung.POD_RESCHEDULE)
    if used >= case.policy.pod_retries:
        return f"pod_retries used {used} of {case.policy.pod_retries}"
    if any(past.failed and past.rung is Rung.POD_RESCHEDULE for past in case.row):
        return "the last one failed"
    return _isolation_refusal(case)


def _isolation_refusal(case: _Case) -> str | None:
    if case.fault.node is None:
        return "no node is to blame"
    if case.fault.code in USER_CAUSED_CODES:
        return f"code {case.fault.code} is caused by the program, not by the node"
    return _budget_refusal(case)


def _isolated_refusal(case: _Case) -> str | None:
    if any(past.failed and past.rung in ISOLATES for past in case.row):
        return "no healthy spare was found"
    return _isolation_refusal(case)


def _job_refusal(case: _Case) -> str | None:
    if not case.policy.unconditional:
        return "unconditional restart is off"
    no_spare = any(past.failed and past.rung in ISOLATES for past in case.row)
    if no_spare and not case.policy.allow_without_isolation:
        return "no healthy spare was found and the policy forbids going back"
    unexplained = _unexplained_in_a_row(case.row)
    if (
        case.fault.fault_class not in NODE_OR_CHIP
        and unexplained >= UNCONDITIONAL_RESCHEDULES_IN_A_ROW
    ):
        return (
            f"the same problem came back after {unexplained} reschedulings with no node or chip "
            "at fault: the program is to be mended"
        )
    return _budget_refusal(case)


def _unexplained_in_a_row(row: Sequence[Recovery]) -> int:
    count = 0
    for past in reversed(row):
        if past.fault.fault_class in NODE_OR_CHIP:
            break
        count += past.rung is Rung.JOB_RESCHEDULE
    return count


def _never_refused(_case: _Case) -> str | None:
    return None


_REFUSAL: Mapping[Rung, Callable[[_Case], str | None]] = {
    Rung.IN_PLACE_RESTART: _in_place_refusal,
    Rung.HANG_RESTART: _hang_refusal,
    Rung.POD_RESCHEDULE: _pod_refusal,
    Rung.JOB_RESCHEDULE_ISOLATED: _isolated_refusal,
    Rung.JOB_RESCHEDULE: _job_refusal,
    Rung.STOP: _never_refused,
}


def decide(
    fault: Fault,
    *,
    now_s: float,
    history: Sequence[Recovery],
    supported: frozenset[Rung],
    policy: Policy,
) -> Decision:
    """Choose the cheapest rung that is supported and within its budget.

    Args:
        fault: what is to be answered.
        now_s: seconds since the epoch, for rules with a window.
        history: every past recovery of the run, oldest first.
        supported: rungs that the engine and the run's depth can do; STOP always counts as one.
        policy: the job's restart policy.
    """
    row = _row_without_progress(history)
    case = _Case(fault, row, policy, _isolation_due(fault, now_s=now_s, history=history))
    skipped: list[str] = []
    for rung in _ladder_of(fault, row):
        refusal = _REFUSAL[rung](case) if rung in supported or rung is Rung.STOP else "unsupported"
        if refusal is not None:
            skipped.append(f"{rung}: {refusal}")
            continue
        isolate = fault.node if rung in ISOLATES else None
        return Decision(rung, isolate, _reason(rung, case, skipped), tuple(skipped))
    raise AssertionError(f"the ladder of {fault.fault_class} does not end in stop")


def _ladder_of(fault: Fault, row: Sequence[Recovery]) -> tuple[Rung, ...]:
    """The rungs for this fault: the class's own, or straight to stop.

    A device out of memory twice at the same step will be so a third time: the program's
    sizes are to be changed.
    """
    if fault.fault_class is FaultClass.DEVICE_OOM and any(
        past.fault.fault_class is FaultClass.DEVICE_OOM and past.fault.step == fault.step
        for past in row
    ):
        return (Rung.STOP,)
    return LADDER[fault.fault_class]


def _row_without_progress(history: Sequence[Recovery]) -> Sequence[Recovery]:
    """The tail of `history` after the last recovery that was followed by progress."""
    for index in range(len(history) - 1, -1, -1):
        if history[index].progressed:
            return history[index + 1 :]
    return history


def _isolation_due(fault: Fault, *, now_s: float, history: Sequence[Recovery]) -> bool:
    """Whether the same chip reported the same code for the third time in a row within 24 h."""
    if fault.chip_code is None or fault.device is None or fault.node is None:
        return False
    same = 1
    for past in reversed(history):
        if past.failed:
            continue  # a second answer to a fault that is counted already
        if not _same_fault(past.fault, fault) or now_s - past.fault.at_s > SAME_CODE_WINDOW_S:
            break
        same += 1
    return same >= SAME_CODE_TIMES


def _same_fault(one: Fault, other: Fault) -> bool:
    return (one.fault_class, one.node, one.device, one.code) == (
        other.fault_class,
        other.node,
        other.device,
        other.code,
    )


def _reason(rung: Rung, case: _Case, skipped: Sequence[str]) -> str:
    fault = case.fault
    if rung is Rung.STOP and fault.fault_class in USER_MUST_MEND:
        return f"{fault.fault_class} is for the user to mend"
    why = f" ({'; '.join(skipped)})" if skipped else ""
    return f"{fault.fault_class} at {fault.where}: {rung}{why}"


def ladder_markdown() -> str:
    """The ladder as two Markdown tables: the rungs, and the classes with their rungs."""
    lines = [
        "| rung | source name | what is lost | who acts | Prefect sees |",
        "|---|---|---|---|---|",
    ]
    for rung, facts in RUNGS.items():
        lines.append(
            f"| `{rung}` | {facts.source_name} | {facts.lost} | {facts.who_acts} "
            f"| {facts.prefect_sees} |"
        )
    lines += ["", "| fault class | rungs, in order |", "|---|---|"]
    for fault_class, rungs in LADDER.items():
        lines.append(f"| `{fault_class}` | {' -> '.join(f'`{rung}`' for rung in rungs)} |")
    return "\n".join(lines)
