"""What must hold of every answer of the ladder: one function for each of its rules, by its name.

Written from the rules' sentences and what the tables have on a rung or a class, without the
ladder's own helpers.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import Any

from perdure.training.recovery.chips import Severity
from perdure.training.recovery.faults import POD_PREEMPTED, TRAITS, Fault, FaultClass, RecoverableBy
from perdure.training.recovery.ladder import decide
from perdure.training.recovery.node_suspicion import COUNTED, ROWS
from perdure.training.recovery.rungs import (
    LADDER,
    RUNGS,
    Capacity,
    Decision,
    Policy,
    Recovery,
    Rung,
    Scope,
)

HOUR_S = 3600.0
CHIP_CODE = "80E01801"  # level RestartBusiness
RESET_CODE = "80E18404"  # level RestartNPU
SEPARATE_CODE = "80E18402"  # level SeparateNPU
USER_CODE = "80C98002"

ORDER = list(Rung)


def rungs_of(*scopes: Scope) -> tuple[Rung, ...]:
    return tuple(rung for rung, row in RUNGS.items() if row.scope in scopes)


IN_PROCESS = rungs_of(Scope.PROCESSES)
ON_CHIP = tuple(
    rung for rung in rungs_of(Scope.PROCESSES, Scope.CONTAINERS) if rung is not Rung.NODE_REPLACE
)
RESCHEDULING = rungs_of(Scope.PLACEMENT)
ISOLATING = tuple(rung for rung, row in RUNGS.items() if row.isolates)
HARDWARE = tuple(met for met, traits in TRAITS.items() if traits.hardware_fault)
# The ladder of a hang and of what is rescheduled without a fault has no restart in place.
NEVER_IN_PLACE = tuple(
    met
    for met, rungs in LADDER.items()
    if Rung.IN_PLACE_RESTART not in rungs and met is not FaultClass.DEVICE_LOST
)
FOR_THE_USER = tuple(met for met, rungs in LADDER.items() if rungs == (Rung.STOP,))
ALWAYS_THE_USERS = tuple(
    met for met, traits in TRAITS.items() if traits.recoverable_by is RecoverableBy.USER_FIX
)
NOT_SAVED = tuple(met for met, traits in TRAITS.items() if not traits.is_worth_saving)


@dataclass(frozen=True)
class Asked:
    """One question to the ladder and its answer."""

    fault: Fault
    now_s: float
    history: tuple[Recovery, ...]
    supported: frozenset[Rung]
    policy: Policy
    survivors: bool
    capacity: Capacity | None
    no_replica: str | None
    decision: Decision

    def again(self, **other: Any) -> Decision:
        """The answer to nearly the same question."""
        return self.of(self.fault, **other)

    def of(self, met: Fault, **other: Any) -> Decision:
        """The answer to another fault in the same place."""
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        del given["fault"], given["decision"]
        return decide(met, **{**given, **other})

    @property
    def row(self) -> tuple[Recovery, ...]:
        """Recoveries since the last progress, but for those that were cut short."""
        last = max((i for i, past in enumerate(self.history) if past.progressed), default=-1)
        return tuple(past for past in self.history[last + 1 :] if not past.cut_short)


def ask(met: Fault, history: tuple[Recovery, ...], **words: Any) -> Asked:
    """Ask the ladder and keep the question with its answer."""
    decision = decide(met, history=history, **words)
    return Asked(fault=met, history=history, decision=decision, **words)


def is_chip_code(code: str | None) -> bool:
    return code not in (None, "SIGKILL")


def place(one: Fault) -> tuple[object, ...]:
    return one.fault_class, one.node, one.device, one.code


def counted(asked: Asked) -> tuple[Recovery, ...]:
    """Recoveries that use up max_restarts and pod_retries."""
    if asked.policy.count == "without_progress":
        return asked.row
    return tuple(past for past in asked.history if not past.cut_short)


def rescheduled(asked: Asked) -> int:
    done = [p for p in counted(asked) if not p.failed or p.rung is Rung.JOB_RESCHEDULE]
    return sum(p.rung in RESCHEDULING for p in done)


def failed(asked: Asked, *rungs: Rung) -> bool:
    """Whether a rung failed for the node of the fault; one that failed for another is nothing."""
    return any(p.rung in rungs for p in failed_here(asked))


def failed_here(asked: Asked) -> list[Recovery]:
    return [p for p in asked.row if p.failed and p.fault.node == asked.fault.node]


def has_isolated(past: Recovery, policy: Policy) -> bool:
    """Whether a rung that moves took its node out: a container only made anew takes none."""
    anew = past.fault.fault_class is FaultClass.CONTAINER_LOST or ends_its_pod(past.fault, policy)
    return past.rung in ISOLATING and (not anew or is_hardware(past.fault))


def ends_its_pod(met: Fault, policy: Policy) -> bool:
    """With RSC: a process that ended, on a single node."""
    words = "native_crash host_oom operator_error collective_timeout dataloader_error device_oom"
    is_process = met.fault_class in {*words.split(), "unknown"}
    alone = met.node is not None and not met.num_other_nodes
    return policy.pod_before_in_place and is_process and alone


def is_the_drivers(one: Fault) -> bool:
    """Whether its severity, if it has one, is the driver's."""
    return is_chip_code(one.code) or one.fault_class in HARDWARE


def is_hardware(one: Fault) -> bool:
    if one.code == USER_CODE or (one.severity == Severity.HINT and is_the_drivers(one)):
        return False
    if is_chip_code(one.code) or (one.severity is not None and is_the_drivers(one)):
        return True
    if one.fault_class is FaultClass.LINK_DOWN:
        return one.hardware_fault is not False
    return one.fault_class in HARDWARE or one.hardware_fault is True


def is_of_software(one: Fault) -> bool:
    alone = one.node is not None and not one.num_other_nodes and one.code != USER_CODE
    return one.fault_class in COUNTED and alone and not is_hardware(one)


def came_on_one_node(asked: Asked) -> bool:
    """By the table: so many of the newest, each recovered from, on the node of this one."""
    met, capacity = asked.fault, asked.capacity
    if capacity is None or not is_of_software(met):
        return False
    softly = [p for p in asked.history if is_of_software(p.fault) and not p.failed]
    moving = [p.rung in ISOLATING and p.fault.fault_class is met.fault_class for p in softly]
    pods = [p.rung is Rung.POD_RESCHEDULE and asked.policy.pod_before_in_place for p in softly]
    if any(moved and not pod for moved, pod in zip(moving, pods, strict=True)):
        return False
    fits = [row for row in ROWS if capacity.needed >= row.nodes]
    if not fits:
        return False
    recent = [
        p.fault.node for p in softly if p.progressed and asked.now_s - p.fault.at_s <= 24 * HOUR_S
    ]
    newest = [*recent, met.node][-fits[-1].of :]
    return Counter(newest)[met.node] >= fits[-1].times


def may_isolate(asked: Asked) -> bool:
    often = came_thrice(asked) or came_too_often(asked)
    theirs = asked.fault.code == USER_CODE
    return (often and not theirs) or came_on_one_node(asked) or is_hardware(asked.fault)


def came_thrice(asked: Asked) -> bool:
    met = asked.fault
    if not is_chip_code(met.code) or met.node is None or met.device is None:
        return False
    if met.severity == Severity.HINT:
        return False
    # Of the chip's own history: what comes on others in between does not count.
    chip = [
        p.fault
        for p in asked.history
        if not p.failed
        and is_chip_code(p.fault.code)
        and (p.fault.node, p.fault.device) == (met.node, met.device)
    ]
    return len(chip) >= 2 and all(
        old.code == met.code and asked.now_s - old.at_s <= 24 * HOUR_S for old in chip[-2:]
    )


def came_too_often(asked: Asked) -> bool:
    """By MindCluster's number for CHIP_CODE: twice within a day, in a row or not."""
    met = asked.fault
    if not asked.policy.mindcluster_frequency or met.code != CHIP_CODE:
        return False
    if met.node is None or met.device is None or met.severity == Severity.HINT:
        return False
    times = [
        p.fault.at_s for p in asked.history if not p.failed and place(p.fault)[1:] == place(met)[1:]
    ]
    return any(
        late - early <= 24 * HOUR_S
        for early, late in itertools.pairwise(sorted([*times, asked.now_s]))
    )


def retries_of_step(asked: Asked) -> list[Recovery]:
    return [
        p
        for p in asked.row
        if p.rung is Rung.STEP_RETRY
        and p.fault.fault_class == "numeric_anomaly"
        and p.fault.step == asked.fault.step
    ]


def restarts_in_place_do_not_use_up_the_maximum_restart_count(asked: Asked) -> bool:
    counted = re.findall(r"max_restarts used (\d+) of", " ".join(asked.decision.skipped))
    return all(int(used) == rescheduled(asked) for used in counted)


def rescheduling_uses_up_the_maximum_restart_count(asked: Asked) -> bool:
    return asked.decision.rung not in RESCHEDULING or rescheduled(asked) < asked.policy.max_restarts


def a_hint_needs_no_recovery_by_itself(asked: Asked) -> bool:
    hint = asked.fault.severity == Severity.HINT and is_the_drivers(asked.fault)
    return not hint or asked.decision.isolate is None


def minor_and_major_chip_faults_are_healed_in_place(asked: Asked) -> bool:
    heals = (Severity.MINOR, Severity.MAJOR)
    if asked.fault.severity not in heals or not is_the_drivers(asked.fault):
        return True
    answers = [asked.of(replace(asked.fault, severity=severity)) for severity in heals]
    first = not asked.history and asked.policy.in_place and not asked.policy.pod_before_in_place
    if not first or asked.fault.code == SEPARATE_CODE or asked.fault.fault_class in NEVER_IN_PLACE:
        return answers[0] == answers[1]
    in_place = Rung.IN_PLACE_RESTART not in asked.supported or answers[0].rung in ON_CHIP
    return answers[0] == answers[1] and in_place


def a_critical_chip_fault_never_heals_in_place(asked: Asked) -> bool:
    critical = asked.fault.severity == Severity.CRITICAL and is_the_drivers(asked.fault)
    return not critical or asked.decision.rung not in ON_CHIP


def a_code_that_separates_its_chip_never_heals_in_place(asked: Asked) -> bool:
    inside = tuple(rung for rung in IN_PROCESS if rung in ON_CHIP)  # another node is another chip
    stays = {SEPARATE_CODE: ON_CHIP, RESET_CODE: inside}.get(asked.fault.code or "", ())
    hint = asked.fault.severity == Severity.HINT and stays == ON_CHIP
    return hint or asked.decision.rung not in stays


def when_healing_in_place_fails_the_node_is_isolated(asked: Asked) -> bool:
    met = asked.fault
    could = (
        may_isolate(asked)
        and met.node is not None
        and Rung.JOB_RESCHEDULE_ISOLATED in asked.supported
        and not failed(asked, *ISOLATING)
        and not any(
            p.rung is Rung.JOB_RESCHEDULE and place(p.fault) == place(met) for p in asked.row
        )
    )
    return not (could and asked.decision.rung is Rung.JOB_RESCHEDULE)


def what_software_did_isolates_no_node(asked: Asked) -> bool:
    return may_isolate(asked) or asked.decision.isolate is None


def a_container_that_was_taken_away_is_made_anew_and_no_node_is_isolated(asked: Asked) -> bool:
    met, policy = asked.fault, asked.policy
    if met.fault_class != "container_lost" or may_isolate(asked):
        return True
    is_first = not asked.history and met.node is not None and policy.max_restarts > 0
    could = is_first and policy.pod_retries > 0 and Rung.POD_RESCHEDULE in asked.supported
    return asked.decision.isolate is None and (
        not could or asked.decision.rung is Rung.POD_RESCHEDULE
    )


def a_node_that_takes_no_files_is_left(asked: Asked) -> bool:
    if asked.fault.code != "NODE_UNWRITABLE" or asked.fault.fault_class != "storage_error":
        return True
    return asked.decision.rung in (
        Rung.POD_RESCHEDULE,
        Rung.JOB_RESCHEDULE_ISOLATED,
        Rung.STOP,
    )


def the_same_node_again_and_again_is_taken_for_the_cause(asked: Asked) -> bool:
    return not came_on_one_node(asked) or asked.decision.rung not in ON_CHIP


def only_another_code_of_the_same_chip_breaks_the_row_of_three(asked: Asked) -> bool:
    chip = (asked.fault.node, asked.fault.device)
    own = tuple(p for p in asked.history if (p.fault.node, p.fault.device) == chip)
    return not came_thrice(replace(asked, history=own)) or asked.decision.rung not in ON_CHIP


def the_same_code_three_times_in_a_row_isolates_the_node(asked: Asked) -> bool:
    return not came_thrice(asked) or asked.decision.rung not in ON_CHIP


def a_code_may_have_a_limit_of_its_own(asked: Asked) -> bool:
    return not came_too_often(asked) or asked.decision.rung not in ON_CHIP


def a_code_that_the_program_caused_never_isolates_and_only_reschedules(asked: Asked) -> bool:
    return asked.fault.code != USER_CODE or asked.decision.isolate is None


def any_non_zero_exit_reschedules_when_unconditional_restart_is_on(asked: Asked) -> bool:
    return (
        asked.decision.rung is not Rung.JOB_RESCHEDULE
        or asked.policy.unconditional
        or asked.fault.code in {USER_CODE, POD_PREEMPTED}
        or any(
            p.failed and p.rung is Rung.POD_RESCHEDULE and place(p.fault) == place(asked.fault)
            for p in asked.row
        )
    )


def the_fourth_time_the_same_problem_comes_the_program_is_at_fault(asked: Asked) -> bool:
    met = asked.fault
    if may_isolate(asked) or met.fault_class == "preempted":
        return True
    since = list(itertools.takewhile(is_no_nodes, reversed(asked.row)))
    same = [p for p in since if (p.fault.fault_class, p.fault.code) == (met.fault_class, met.code)]
    done = sum(p.rung is Rung.JOB_RESCHEDULE and not p.failed for p in same)
    return done < 3 or asked.decision.rung is not Rung.JOB_RESCHEDULE


def is_no_nodes(past: Recovery) -> bool:
    """Whether neither a node nor a chip was at fault, as far as the ladder knew."""
    return not is_hardware(past.fault) and (past.rung not in ISOLATING or past.failed)


def three_hang_restarts_in_a_row_then_stop(asked: Asked) -> bool:
    # Nothing but another restart of the processes ends the row.
    row = itertools.takewhile(
        lambda p: p.rung is Rung.HANG_RESTART or p.rung in IN_PROCESS or p.failed,
        reversed(asked.row),
    )
    if sum(p.rung is Rung.HANG_RESTART for p in row) < 3:
        return True
    bare = asked.fault.fault_class == "hang" and not is_chip_code(asked.fault.code)
    return asked.decision.rung is (Rung.STOP if bare else asked.decision.rung) and (
        asked.decision.rung is not Rung.HANG_RESTART
    )


def a_pod_reschedule_that_fails_becomes_a_job_reschedule(asked: Asked) -> bool:
    pods = [p for p in failed_here(asked) if p.rung is Rung.POD_RESCHEDULE]
    isolated = any(has_isolated(p, asked.policy) for p in pods)
    return not isolated or asked.decision.rung not in ISOLATING


def a_rung_that_failed_for_one_node_is_open_for_another(asked: Asked) -> bool:
    claims = {text.partition(": ")[2] for text in asked.decision.skipped}
    of_spares = any(claim.startswith("no healthy spare was found") for claim in claims)
    if of_spares and not failed(asked, *ISOLATING):
        return False
    pods = [p for p in failed_here(asked) if p.rung is Rung.POD_RESCHEDULE]
    isolated = any(has_isolated(p, asked.policy) for p in pods)
    if "the node is isolated already" in claims and not isolated:
        return False
    # An isolation that failed uses nothing up: the answer is that of a run without it.
    others = tuple(
        p
        for p in asked.history
        if not (
            p.failed
            and p.rung is Rung.JOB_RESCHEDULE_ISOLATED
            and p.fault.node != asked.fault.node
            and p.fault.fault_class is not asked.fault.fault_class
            and not p.progressed
        )
    )
    return asked.again(history=others) == asked.decision


def an_isolation_without_a_healthy_spare_reports_it(asked: Asked) -> bool:
    capacity = asked.capacity
    lacking = (
        asked.decision.isolate is not None
        and capacity is not None
        and capacity.healthy is not None
        and capacity.healthy - 1 < capacity.needed
    )
    return ("no healthy spare: " in asked.decision.reason) == lacking


def without_a_spare_the_job_goes_back_only_if_the_policy_allows(asked: Asked) -> bool:
    return (
        asked.policy.allow_without_isolation
        or not failed(asked, Rung.JOB_RESCHEDULE_ISOLATED)
        or asked.decision.rung is not Rung.JOB_RESCHEDULE
    )


def a_device_memory_error_climbs_from_step_to_process_to_the_last_checkpoint(asked: Asked) -> bool:
    memory = asked.fault.fault_class == "device_memory_error"
    if not memory or asked.decision.rung is not Rung.PROCESS_REPLACE:
        return True
    possible = Rung.STEP_RETRY in asked.supported and asked.policy.memory_retry
    return not possible or any(p.rung in IN_PROCESS for p in asked.row)


def a_pod_is_replaced_before_a_restart_in_place_where_the_policy_has_it(asked: Asked) -> bool:
    if asked.decision.rung is not Rung.IN_PLACE_RESTART or not asked.policy.pod_before_in_place:
        return True
    passed = [text for text in asked.decision.skipped if text.startswith("pod_reschedule: ")]
    costs_pod = may_isolate(asked) or ends_its_pod(asked.fault, asked.policy)
    return bool(passed) or not costs_pod


def a_chip_that_had_a_fault_keeps_its_process_only_where_the_policy_has_it(asked: Asked) -> bool:
    met, replaced = asked.fault, asked.decision.rung is Rung.PROCESS_REPLACE
    of_chip = met.fault_class == "device_memory_error" or is_chip_code(met.code)
    return not (replaced and of_chip) or asked.policy.process_in_place


def a_node_that_is_lost_is_replaced_while_the_processes_of_the_others_live_on(
    asked: Asked,
) -> bool:
    if asked.decision.rung is not Rung.NODE_REPLACE:
        return True
    met = asked.fault
    is_nodes = may_isolate(asked) or met.fault_class is FaultClass.CONTAINER_LOST
    return asked.survivors and asked.policy.node_replace and met.node is not None and is_nodes


def survivors_save_before_processes_are_lost(asked: Asked) -> bool:
    due = (
        asked.survivors
        and asked.policy.end_of_life_checkpoint
        and asked.decision.rung not in IN_PROCESS
        and asked.fault.fault_class not in NOT_SAVED
    )
    return asked.decision.end_of_life_checkpoint == due


def an_abnormal_step_is_executed_again_from_the_last_good_snapshot(asked: Asked) -> bool:
    abnormal = asked.fault.fault_class == "numeric_anomaly"
    in_step = abnormal and asked.decision.rung is Rung.STEP_RETRY
    return not in_step or (asked.policy.numeric_retry and Rung.STEP_RETRY in asked.supported)


def the_same_step_abnormal_again_is_accepted_and_never_retried_a_third_time(asked: Asked) -> bool:
    decision, before = asked.decision, retries_of_step(asked)
    if decision.accept_abnormal:
        return decision.rung is Rung.STEP_RETRY and len(before) == 1 and not before[0].failed
    in_step = decision.rung is Rung.STEP_RETRY and asked.fault.fault_class == "numeric_anomaly"
    return not in_step or not before


def an_abnormal_step_that_cannot_be_accepted_costs_the_process_that_made_it(asked: Asked) -> bool:
    decision, met = asked.decision, asked.fault
    if met.fault_class != "numeric_anomaly" or decision.rung is not Rung.PROCESS_REPLACE:
        return True
    tried = any(text.startswith("step_retry: ") for text in decision.skipped)
    return tried and asked.policy.numeric_retry and met.rank is not None


def a_retry_that_another_fault_cut_short_was_not_made(asked: Asked) -> bool:
    carried_out = tuple(p for p in asked.history if p.progressed or not p.cut_short)
    # A chip's codes are counted whatever became of the recoveries.
    coded = is_chip_code(asked.fault.code)
    return coded or asked.again(history=carried_out) == asked.decision


def re_execution_of_abnormal_steps_and_data_skipping_exclude_each_other(asked: Asked) -> bool:
    return not (asked.policy.numeric_retry and asked.policy.data_skipping)


def an_operator_retry_that_fails_becomes_a_step_retry(asked: Asked) -> bool:
    tried = any(
        p.rung is Rung.OPERATOR_RETRY and p.failed and place(p.fault) == place(asked.fault)
        for p in asked.row
    )
    return not tried or asked.decision.rung is not Rung.OPERATOR_RETRY


def a_job_recovered_by_operator_retry_is_sub_healthy_and_goes_on(asked: Asked) -> bool:
    return asked.decision.sub_healthy == (asked.decision.rung is Rung.OPERATOR_RETRY)


def a_recovery_followed_by_progress_is_free(asked: Asked) -> bool:
    often = came_thrice(asked) or came_too_often(asked) or came_on_one_node(asked)
    for_ever = asked.policy.count == "ever"
    same_place = asked.fault.fault_class == "hang" and asked.fault.frame is not None
    return often or for_ever or same_place or asked.again(history=asked.row) == asked.decision


def counted_for_ever_a_rescheduling_is_never_free(asked: Asked) -> bool:
    if asked.policy.count != "ever" or asked.decision.rung not in RESCHEDULING:
        return True
    pods = sum(past.rung is Rung.POD_RESCHEDULE for past in counted(asked))
    of_pods = asked.decision.rung is Rung.POD_RESCHEDULE
    return rescheduled(asked) < asked.policy.max_restarts and not (
        of_pods and pods >= asked.policy.pod_retries
    )


def what_the_user_must_fix_stops_at_once(asked: Asked) -> bool:
    return asked.fault.fault_class not in FOR_THE_USER or asked.decision.rung is Rung.STOP


def a_device_out_of_memory_twice_at_the_same_step_stops(asked: Asked) -> bool:
    again = any(
        p.fault.fault_class == asked.fault.fault_class == "device_oom"
        and p.fault.step == asked.fault.step is not None
        for p in asked.row
    )
    return not again or asked.decision.rung is Rung.STOP


def a_hang_again_at_the_same_step_and_place_of_the_program_stops(asked: Asked) -> bool:
    met = asked.fault
    again = any(
        p.fault.fault_class == met.fault_class == "hang"
        and (p.fault.step, p.fault.rank, p.fault.frame) == (met.step, met.rank, met.frame)
        and not p.fault.code == met.code == "SLOW_START"
        for p in asked.row
    )
    return not (again and met.frame is not None) or asked.decision.rung is Rung.STOP


def what_the_evidence_leaves_to_the_user_is_tried_once(asked: Asked) -> bool:
    met = asked.fault
    theirs = met.recoverable_by == "user-fix" and met.fault_class not in ALWAYS_THE_USERS
    if met.fault_class == "native_crash" or is_chip_code(met.code):
        return True
    again = any(
        p.fault.fault_class == met.fault_class
        and p.fault.recoverable_by == "user-fix"
        and not p.failed
        for p in asked.row
    )
    return not (theirs and again) or asked.decision.rung is Rung.STOP


def a_full_store_is_not_filled_again(asked: Asked) -> bool:
    is_full = asked.fault.fault_class == "storage_error" and asked.fault.code == "STORE_FULL"
    return not is_full or asked.decision.rung is Rung.STOP


def a_job_that_a_person_cancelled_is_not_started_again(asked: Asked) -> bool:
    met = asked.fault
    is_cancelled = met.fault_class == "preempted" and met.recoverable_by == "user-fix"
    return not is_cancelled or asked.decision.rung is Rung.STOP


def an_unsupported_rung_is_skipped_and_the_decision_names_it(asked: Asked) -> bool:
    rung, skipped = asked.decision.rung, asked.decision.skipped
    named = [Rung(text.split(":")[0]) for text in skipped]
    unsupported = {Rung(text.split(":")[0]) for text in skipped if text.endswith(": unsupported")}
    return (
        (rung is Rung.STOP or rung in asked.supported)
        and unsupported == set(named) - asked.supported
        and (asked.policy.pod_before_in_place or _in_order(named, rung))
    )


def _in_order(named: list[Rung], rung: Rung) -> bool:
    cheaper = all(ORDER.index(passed) < ORDER.index(rung) for passed in named)
    return cheaper and named == sorted(named, key=ORDER.index)


def a_rung_that_copies_a_state_is_not_tried_without_a_replica(asked: Asked) -> bool:
    if asked.no_replica is None:
        return True
    copies = {Rung.PROCESS_REPLACE, Rung.NODE_REPLACE}
    if asked.fault.fault_class is FaultClass.DEVICE_MEMORY_ERROR:
        copies.add(Rung.STEP_RETRY)
    named = {text for rung in copies for text in asked.decision.skipped if text.startswith(rung)}
    reasons = {text.partition(": ")[2] for text in named}
    return asked.decision.rung not in copies and reasons <= {
        asked.no_replica,
        "unsupported",
        "switched off",
    }


def rungs_inside_the_processes_need_survivors_and_come_three_times_in_a_row(asked: Asked) -> bool:
    rung = asked.decision.rung
    if rung not in IN_PROCESS:
        return True
    used = sum(p.rung is rung for p in asked.row)
    return asked.survivors and (used < 3 or asked.decision.accept_abnormal)


def the_climb_never_goes_down_without_progress(asked: Asked) -> bool:
    before = [p for p in asked.row if place(p.fault) == place(asked.fault)]
    floor = max((ORDER.index(p.rung) for p in before), default=0)
    return ORDER.index(asked.decision.rung) >= floor or asked.decision.accept_abnormal


def without_a_maximum_restart_count_the_job_is_never_rescheduled(asked: Asked) -> bool:
    return asked.policy.max_restarts > 0 or asked.decision.rung not in RESCHEDULING


def a_restart_in_place_answers_only_where_the_policy_has_it(asked: Asked) -> bool:
    used = sum(p.rung is Rung.IN_PLACE_RESTART for p in asked.row)
    may = asked.policy.in_place and used < asked.policy.in_place_retries
    return may or asked.decision.rung is not Rung.IN_PLACE_RESTART


def only_what_moves_isolates_and_only_the_node_of_the_fault(asked: Asked) -> bool:
    isolated = asked.decision.isolate
    return isolated is None or (isolated == asked.fault.node and asked.decision.rung in ISOLATING)


def a_hang_is_restarted_only_where_the_policy_has_it(asked: Asked) -> bool:
    return asked.policy.hang or asked.decision.rung is not Rung.HANG_RESTART


def a_hang_alone_moves_nothing(asked: Asked) -> bool:
    met = asked.fault
    bare = met.fault_class == "hang" and not is_chip_code(met.code) and not may_isolate(asked)
    return not bare or asked.decision.rung in (Rung.HANG_RESTART, Rung.STOP)


def a_pod_is_rescheduled_as_often_as_the_policy_says(asked: Asked) -> bool:
    pods = sum(p.rung is Rung.POD_RESCHEDULE for p in counted(asked))
    return asked.decision.rung is not Rung.POD_RESCHEDULE or pods < asked.policy.pod_retries


def a_pod_comes_before_the_job_where_pods_may_be_rescheduled(asked: Asked) -> bool:
    passed = any(text.startswith("pod_reschedule: ") for text in asked.decision.skipped)
    return asked.decision.rung is not Rung.JOB_RESCHEDULE_ISOLATED or passed


def a_memory_error_repeats_its_step_only_where_the_policy_has_it(asked: Asked) -> bool:
    memory = asked.fault.fault_class == "device_memory_error"
    in_step = memory and asked.decision.rung is Rung.STEP_RETRY
    return not in_step or asked.policy.memory_retry


def a_failed_collective_repeats_its_step_only_where_the_policy_has_it(asked: Asked) -> bool:
    of_peers = asked.fault.fault_class in ("collective_timeout", "link_down")
    in_step = of_peers and asked.decision.rung is Rung.STEP_RETRY
    return not in_step or asked.policy.collective_retry


def a_process_is_replaced_only_where_the_policy_has_it_and_a_rank_is_to_blame(asked: Asked) -> bool:
    replaced = asked.decision.rung is Rung.PROCESS_REPLACE
    return not replaced or (asked.policy.process_replace and asked.fault.rank is not None)


def a_node_or_container_that_is_gone_gets_no_new_process(asked: Asked) -> bool:
    gone = asked.fault.fault_class in ("node_lost", "container_lost")
    return not gone or asked.decision.rung not in ON_CHIP


def a_device_that_is_gone_is_trained_on_again_only_where_its_code_allows_it(asked: Asked) -> bool:
    met = asked.fault
    lost = met.fault_class == "device_lost" and met.severity is None and not is_chip_code(met.code)
    bare = lost and met.hardware_fault is not False
    return not bare or asked.decision.rung not in ON_CHIP


def an_operator_retry_answers_broken_links_alone_and_where_it_is_enabled(asked: Asked) -> bool:
    is_link = asked.fault.fault_class is FaultClass.LINK_DOWN and asked.policy.operator_retry
    return is_link or asked.decision.rung is not Rung.OPERATOR_RETRY


def a_job_that_was_preempted_is_rescheduled_or_stops(asked: Asked) -> bool:
    met = asked.fault
    taken = met.fault_class is FaultClass.PREEMPTED and not may_isolate(asked)
    bare = taken and not is_chip_code(met.code)
    return not bare or asked.decision.rung in (Rung.JOB_RESCHEDULE, Rung.STOP)


def every_rung_that_was_passed_over_has_its_reason(asked: Asked) -> bool:
    met, decision = asked.fault, asked.decision
    reasons = dict(text.split(": ", 1) for text in decision.skipped)
    if len(reasons) != len(decision.skipped) or not all(reasons.values()):
        return False
    if decision.rung is Rung.STOP or decision.accept_abnormal:
        return True  # what ends the run at once asks no rung
    passed = LADDER[met.fault_class][: _place_on(LADDER[met.fault_class], decision.rung)]
    is_in_order = not asked.policy.pod_before_in_place  # else a pod may come before what is cheaper
    return not is_in_order or {r for r in passed if r not in ISOLATING} <= set(reasons)


def a_stop_isolates_and_accepts_nothing(asked: Asked) -> bool:
    decision = asked.decision
    left = (decision.isolate, decision.accept_abnormal, decision.sub_healthy)
    return decision.rung is not Rung.STOP or left == (None, False, False)


def _place_on(ladder: tuple[Rung, ...], rung: Rung) -> int:
    """How many rungs of a ladder are cheaper."""
    return sum(ORDER.index(other) < ORDER.index(rung) for other in ladder)
