"""Why a rung does not answer a fault: one guard per rung, and those that concern several.

A guard looks at a `LadderInput` and gives its refusal as a few words, or None; ladder_rules.py
has the rules in words, rungs.py what the policy and the budgets allow. Pure functions; windows
are seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from perdure.training.recovery.blame import (
    answer_of,
    points_at_hardware,
    same_fault,
    severity_of,
)
from perdure.training.recovery.chips import (
    ChipAnswer,
    ChipLevel,
    Severity,
    chip_fact,
)
from perdure.training.recovery.faults import (
    POD_PREEMPTED,
    USER_CAUSED_CODES,
    Fault,
    FaultClass,
)
from perdure.training.recovery.node_suspicion import COUNTED
from perdure.training.recovery.rungs import (
    IN_PROCESS,
    ISOLATES,
    LADDER,
    LEAVES_THE_NODE,
    RESCHEDULES,
    RUNGS,
    STAYS_ON_CHIP,
    Policy,
    Recovery,
    RestartCount,
    Rung,
)

# ModelArts: for one problem with no node or chip at fault.
UNCONDITIONAL_RESCHEDULES_IN_A_ROW = 3

# Refusals that come from how the run is set up, not from what happened: not in the reason.
UNSUPPORTED = "unsupported"
SWITCHED_OFF = "switched off"
ENDED = "the processes have ended"
SETTINGS = frozenset({UNSUPPORTED, SWITCHED_OFF, ENDED})

# Classes of a process that ended by itself: MindSpore's RSC makes its container anew.
_OF_A_PROCESS = COUNTED | {
    FaultClass.COLLECTIVE_TIMEOUT,
    FaultClass.DATALOADER_ERROR,
    FaultClass.DEVICE_OOM,
    FaultClass.UNKNOWN,
}


@dataclass(frozen=True, slots=True)
class LadderInput:
    """Everything a guard may look at.

    Attributes:
        fault: what is to be answered.
        streak: recoveries in a row without progress, oldest first.
        charged: recoveries that use up max_restarts and pod_retries.
        policy: the job's restart policy.
        too_often: why the chip is not to be trusted after so many reports of the code, None
            while it is.
        node_suspicion: why a fault of software is taken for its node's, None when it is not.
        survivors: whether processes of the attempt live on.
        no_replica: why no other rank has the state of the one at fault, None when one may.
        no_replica_of_node: why no other node has the state of one of its node's ranks.
        hung_before: whether the rank hung at the same place of the program before.
    """

    fault: Fault
    streak: Sequence[Recovery]
    charged: Sequence[Recovery]
    policy: Policy
    too_often: str | None = None
    node_suspicion: str | None = None
    survivors: bool = False
    no_replica: str | None = None
    no_replica_of_node: str | None = None
    hung_before: bool = False

    @property
    def is_user_caused(self) -> bool:
        """Whether the code means that the program, not the chip, is at fault."""
        return self.fault.code in USER_CAUSED_CODES

    @property
    def may_isolate(self) -> bool:
        """Whether there is evidence that it is the node."""
        often = self.too_often is not None and not self.is_user_caused
        return (
            often
            or self.fault.is_of_unwritable_node
            or self.node_suspicion is not None
            or points_at_hardware(self.fault)
        )

    def used(self, *rungs: Rung) -> int:
        """Recoveries of the streak that were carried out; a last resort that failed counts too."""
        return _num_used(self.streak, *rungs)

    def failed(self, *rungs: Rung) -> bool:
        """Whether one of the rungs could not be carried out for the node in this streak.

        What failed for one node says nothing about another, which may have a spare by now.
        """
        return any(past.failed and past.rung in rungs for past in self.of_node)

    @property
    def of_node(self) -> Sequence[Recovery]:
        """Recoveries of the streak that answered a fault of the same node."""
        return [past for past in self.streak if past.fault.node == self.fault.node]


def rungs_for(case: LadderInput) -> tuple[Rung, ...]:
    """The rungs that may answer a case, cheapest first but for what the policy puts before.

    Those that isolate are among them on evidence that it is the node, whatever the class; without
    it, a container that was taken away, or with RSC that of a process that ended, is made anew and
    isolates nothing. A code that a chip reported allows the job to be rescheduled, too; and a
    device for which its code asks no more than a restart or a reset is not lost.
    """
    fault = case.fault
    ladder = LADDER[fault.fault_class]
    if ladder == (Rung.STOP,):
        return ladder
    if case.fault.is_of_unwritable_node:
        return LEAVES_THE_NODE
    allowed = set(ladder) - ISOLATES
    if fault.fault_class is FaultClass.CONTAINER_LOST:
        allowed |= {Rung.NODE_REPLACE, Rung.POD_RESCHEDULE}
    if _renews_pod(fault, case.policy):
        allowed.add(Rung.POD_RESCHEDULE)
    if case.may_isolate:
        allowed |= ISOLATES
    if case.may_isolate or fault.chip_code is not None:
        allowed.add(Rung.JOB_RESCHEDULE)
    if fault.fault_class is FaultClass.DEVICE_LOST and _may_be_there(fault):
        allowed.add(Rung.IN_PLACE_RESTART)
    rungs = tuple(rung for rung in Rung if rung in allowed)
    if not case.policy.pod_before_in_place or Rung.POD_RESCHEDULE not in rungs:
        return rungs
    later = [rung for rung in rungs if rung not in IN_PROCESS and rung is not Rung.POD_RESCHEDULE]
    return (*(rung for rung in rungs if rung in IN_PROCESS), Rung.POD_RESCHEDULE, *later)


def _renews_pod(fault: Fault, policy: Policy) -> bool:
    """Whether a process's end costs its container, with no evidence that it is the node."""
    is_alone = fault.node is not None and fault.num_other_nodes == 0
    return policy.pod_before_in_place and fault.fault_class in _OF_A_PROCESS and is_alone


def _may_be_there(fault: Fault) -> bool:
    """Whether a device that is taken for lost may serve new processes.

    Its code or severity says so, or software alone kept the last ones from it.
    """
    return answer_of(fault) is not None or fault.hardware_fault is False


def refusal(rung: Rung, case: LadderInput) -> str | None:
    """Why the rung does not answer the case, None when it does."""
    if not RUNGS[rung].is_on(case.policy, case.fault.fault_class):
        return SWITCHED_OFF
    # Before the end of the processes: it holds whatever lives on.
    lack = _lack_of_replica(rung, case)
    if lack is not None:
        return lack
    if rung in IN_PROCESS and not case.survivors:
        return ENDED
    return (
        _GUARDS[rung](rung, case)
        or _budget_refusal(rung, case)
        or chip_refusal(rung, case)
        or _climb_refusal(rung, case)
    )


def _lack_of_replica(rung: Rung, case: LadderInput) -> str | None:
    """Why what the rung copies is with no other rank, None where it is or nothing is copied."""
    is_lost = case.fault.fault_class is FaultClass.DEVICE_MEMORY_ERROR  # its process lives
    if rung is Rung.NODE_REPLACE:
        return case.no_replica_of_node or case.no_replica
    if rung is Rung.PROCESS_REPLACE or (rung is Rung.STEP_RETRY and is_lost):
        return case.no_replica
    return None


def chip_refusal(rung: Rung, case: LadderInput) -> str | None:
    """Why what stays on the chip does not help, None when it may or when the rung moves away."""
    code = case.fault.chip_code
    if rung not in STAYS_ON_CHIP:
        return None
    if case.too_often is not None or case.node_suspicion is not None:
        return case.too_often or case.node_suspicion
    if answer_of(case.fault) is ChipAnswer.SEPARATE:
        critical = severity_of(case.fault) is Severity.CRITICAL
        return "severity critical never heals" if critical else f"code {code} separates the chip"
    fact = chip_fact(code) if code is not None else None
    if rung in IN_PROCESS and fact is not None and fact.level is ChipLevel.RESET_NOW:
        return f"code {code} asks for a reset of the chip"
    return None


def is_accepted(case: LadderInput) -> bool:
    """Whether an abnormal step was executed again already and came out abnormal again."""
    retries = _numeric_retries(case)
    return (
        case.fault.fault_class is FaultClass.NUMERIC_ANOMALY
        and case.policy.numeric_retry
        and case.survivors
        and len(retries) == 1
        and not retries[0].failed
        and chip_refusal(Rung.STEP_RETRY, case) is None
    )


def _climb_refusal(rung: Rung, case: LadderInput) -> str | None:
    climbed = any(
        past.rung.cost > rung.cost and same_fault(past.fault, case.fault) for past in case.streak
    )
    return "a costlier rung already answered this fault" if climbed else None


def _budget_refusal(rung: Rung, case: LadderInput) -> str | None:
    budget, is_counted = RUNGS[rung].budget, rung in RESCHEDULES
    row = case.charged if is_counted else case.streak
    if rung is Rung.HANG_RESTART:
        # ModelArts: three consecutive times; another restart of the processes ends the row.
        row = [*takewhile(_continues_hangs, reversed(row))]
    asked = sum(past.rung is rung for past in row)
    if budget is not None and asked >= budget(case.policy):
        is_row = not is_counted or case.policy.count is RestartCount.WITHOUT_PROGRESS
        return f"used {asked} of {budget(case.policy)} in {'a row' if is_row else 'all'}"
    used, limit = _num_used(case.charged, *RESCHEDULES), case.policy.max_restarts
    return f"max_restarts used {used} of {limit}" if is_counted and used >= limit else None


def _continues_hangs(past: Recovery) -> bool:
    return past.rung is Rung.HANG_RESTART or past.rung in IN_PROCESS or past.failed


def _num_used(recoveries: Sequence[Recovery], *rungs: Rung) -> int:
    return sum(
        past.rung in rungs and (not past.failed or past.rung is Rung.JOB_RESCHEDULE)
        for past in recoveries
    )


def _in_process_refusal(rung: Rung, case: LadderInput) -> str | None:
    tries = [p for p in case.streak if p.rung is rung and same_fault(p.fault, case.fault)]
    if any(past.failed for past in tries):
        return "the last one failed"
    step = case.fault.step
    if step is not None and any(past.fault.step == step for past in tries):
        return f"it did not help at step {step}"
    return None


def _step_refusal(rung: Rung, case: LadderInput) -> str | None:
    retries = _numeric_retries(case)
    if any(past.failed for past in retries):
        return "the last one failed"
    if len(retries) > 1:
        return f"step {case.fault.step} was accepted already"
    return _in_process_refusal(rung, case)


def _numeric_retries(case: LadderInput) -> Sequence[Recovery]:
    """Re-executions of the step that is abnormal now, wherever it was noticed."""
    return [
        past
        for past in case.streak
        if past.rung is Rung.STEP_RETRY
        and past.fault.fault_class is case.fault.fault_class is FaultClass.NUMERIC_ANOMALY
        and past.fault.step == case.fault.step
    ]


def _process_refusal(rung: Rung, case: LadderInput) -> str | None:
    # MindCluster: recover moves the containers of a node at fault, recover-in-place does not.
    is_of_chip = case.fault.fault_class is FaultClass.DEVICE_MEMORY_ERROR or case.fault.chip_code
    if is_of_chip and not case.policy.process_in_place:
        return "process_in_place is off"
    return "no rank is to blame" if case.fault.rank is None else _in_process_refusal(rung, case)


def _node_refusal(rung: Rung, case: LadderInput) -> str | None:
    fault = case.fault
    if fault.node is None:
        return "no node is to blame"
    if case.failed(Rung.POD_RESCHEDULE, Rung.JOB_RESCHEDULE_ISOLATED):
        return "no healthy spare was found"
    stays = Rung.IN_PLACE_RESTART in rungs_for(case)
    if stays and chip_refusal(Rung.IN_PLACE_RESTART, case) is None:
        return "the node is there, and may serve new processes"
    return _in_process_refusal(rung, case)


def _failed_refusal(rung: Rung, case: LadderInput) -> str | None:
    return "the last one failed" if case.failed(rung) else None


def _pod_refusal(rung: Rung, case: LadderInput) -> str | None:
    return _failed_refusal(rung, case) or _isolation_refusal(case)


def _isolated_refusal(rung: Rung, case: LadderInput) -> str | None:
    if case.failed(rung):
        return "no healthy spare was found"
    if any(past.failed and _isolated_alone(past, case.policy) for past in case.of_node):
        return "the node is isolated already"
    return _isolation_refusal(case)


def _isolated_alone(past: Recovery, policy: Policy) -> bool:
    """Whether a pod_reschedule isolated its node; a container only made anew isolates none."""
    is_anew = past.fault.fault_class is FaultClass.CONTAINER_LOST or _renews_pod(past.fault, policy)
    return past.rung is Rung.POD_RESCHEDULE and (not is_anew or points_at_hardware(past.fault))


def _isolation_refusal(case: LadderInput) -> str | None:
    return "no node is to blame" if case.fault.node is None else None


def _job_refusal(_rung: Rung, case: LadderInput) -> str | None:
    follows_pod = any(
        past.failed and past.rung is Rung.POD_RESCHEDULE and same_fault(past.fault, case.fault)
        for past in case.streak
    )
    is_excused = case.is_user_caused or case.fault.code == POD_PREEMPTED
    if not (case.policy.unconditional or follows_pod or is_excused):
        return "unconditional restart is off"
    # After a failed pod_reschedule the node is isolated: the job may be placed once without it.
    no_spare = case.failed(Rung.JOB_RESCHEDULE_ISOLATED) or (
        case.failed(Rung.POD_RESCHEDULE) and case.failed(Rung.JOB_RESCHEDULE)
    )
    if no_spare and not case.policy.allow_without_isolation:
        return "no healthy spare was found and the policy forbids going back"
    unexplained = _unexplained_in_a_row(case)
    if unexplained >= UNCONDITIONAL_RESCHEDULES_IN_A_ROW:
        return (
            f"the same problem came back after {unexplained} reschedulings with no node or chip "
            "at fault: the program is to be fixed"
        )
    return None


def _unexplained_in_a_row(case: LadderInput) -> int:
    """Reschedulings for the same problem since a node or a chip was last at fault."""
    fault, count = case.fault, 0
    if case.may_isolate or fault.fault_class is FaultClass.PREEMPTED:
        return 0
    for past in reversed(case.streak):
        isolated = past.rung in ISOLATES and not past.failed
        if isolated or points_at_hardware(past.fault):
            break
        is_alike = (past.fault.fault_class, past.fault.code) == (fault.fault_class, fault.code)
        count += is_alike and past.rung is Rung.JOB_RESCHEDULE and not past.failed
    return count


_GUARDS: Mapping[Rung, Callable[[Rung, LadderInput], str | None]] = {
    Rung.OPERATOR_RETRY: _in_process_refusal,
    Rung.STEP_RETRY: _step_refusal,
    Rung.PROCESS_REPLACE: _process_refusal,
    Rung.NODE_REPLACE: _node_refusal,
    Rung.IN_PLACE_RESTART: _failed_refusal,
    Rung.HANG_RESTART: _failed_refusal,
    Rung.POD_RESCHEDULE: _pod_refusal,
    Rung.JOB_RESCHEDULE_ISOLATED: _isolated_refusal,
    Rung.JOB_RESCHEDULE: _job_refusal,
    Rung.STOP: lambda _rung, _case: None,
}
