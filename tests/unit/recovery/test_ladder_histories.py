"""Random runs and random histories: no rule of the ladder is ever broken.

One invariant per rule, written from the rule's sentence and without the ladder's own helpers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.recovery.ladder_cases import (
    CAPACITIES,
    CHIP_CODE,
    FAULTS,
    HOUR_S,
    POLICIES,
    RESET_CODE,
    SEPARATE_CODE,
    SEVERITIES,
    SUPPORTED,
    USER_CODE,
    Asked,
    any_question,
    ask,
    runs,
)
from training.recovery.chips import needs_recovery
from training.recovery.faults import Fault, FaultClass
from training.recovery.ladder import Policy, Recovery, Rung, Severity

ORDER = list(Rung)
IN_PROCESS = (Rung.OPERATOR_RETRY, Rung.STEP_RETRY, Rung.PROCESS_REPLACE)
ON_CHIP = (*IN_PROCESS, Rung.IN_PLACE_RESTART, Rung.HANG_RESTART)
ISOLATING = (Rung.POD_RESCHEDULE, Rung.JOB_RESCHEDULE_ISOLATED)
RESCHEDULING = (*ISOLATING, Rung.JOB_RESCHEDULE)
HARDWARE = ("device_memory_error", "device_lost", "link_down", "node_lost")
MAY_ISOLATE = (*HARDWARE, "operator_error", "host_oom", "collective_timeout", "native_crash")
FOR_THE_USER = ("user_code_error", "launch_misconfigured", "version_mismatch")
ALWAYS_THE_USERS = (*FOR_THE_USER, "device_oom", "host_oom", "numeric_anomaly")
NOT_SAVED = ("numeric_anomaly", "checkpoint_corrupt", "launch_misconfigured", "version_mismatch")


def is_chip_code(code: str | None) -> bool:
    return code not in (None, "SIGKILL")


def place(one: Fault) -> tuple[object, ...]:
    return one.fault_class, one.node, one.device, one.code


def rescheduled(asked: Asked) -> int:
    done = [p for p in asked.row if not p.failed or p.rung is Rung.JOB_RESCHEDULE]
    return sum(p.rung in RESCHEDULING for p in done)


def failed(asked: Asked, *rungs: Rung) -> bool:
    return any(p.failed and p.rung in rungs for p in asked.row)


def is_hardware(one: Fault) -> bool:
    coded = is_chip_code(one.code)
    return one.code != USER_CODE and (one.fault_class in HARDWARE or coded)


def came_thrice(asked: Asked) -> bool:
    met = asked.fault
    if not is_chip_code(met.code) or met.node is None or met.device is None:
        return False
    events = [p.fault for p in asked.history if not p.failed]
    return len(events) >= 2 and all(
        place(old)[1:] == place(met)[1:] and asked.now_s - old.at_s <= 24 * HOUR_S
        for old in events[-2:]
    )


def came_too_often(asked: Asked) -> bool:
    """By MindCluster's number for CHIP_CODE: twice within a day, in a row or not."""
    met = asked.fault
    if not asked.policy.mindcluster_frequency or met.code != CHIP_CODE:
        return False
    if met.node is None or met.device is None:
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


def leaves_the_budget_alone(asked: Asked) -> bool:
    told = re.findall(r"max_restarts used (\d+) of", " ".join(asked.decision.skipped))
    return all(int(used) == rescheduled(asked) for used in told)


def stays_in_the_budget(asked: Asked) -> bool:
    return asked.decision.rung not in RESCHEDULING or rescheduled(asked) < asked.policy.max_restarts


def ignores_hints(asked: Asked) -> bool:
    same = asked.again(severity=Severity.HINT) == asked.again(severity=None)
    return same and not needs_recovery(asked.fault.chip_code, severity=Severity.HINT)


def heals_minor_and_major(asked: Asked) -> bool:
    unsaid = asked.again(severity=None)
    return all(asked.again(severity=s) == unsaid for s in (Severity.MINOR, Severity.MAJOR))


def moves_away_from_critical(asked: Asked) -> bool:
    return asked.severity is not Severity.CRITICAL or asked.decision.rung not in ON_CHIP


def moves_away_from_separated(asked: Asked) -> bool:
    stays = {SEPARATE_CODE: ON_CHIP, RESET_CODE: IN_PROCESS}.get(asked.fault.code or "", ())
    return asked.decision.rung not in stays


def isolates_before_it_reschedules(asked: Asked) -> bool:
    met = asked.fault
    may = met.fault_class in MAY_ISOLATE or is_chip_code(met.code)
    could = (
        may
        and met.node is not None
        and met.code != USER_CODE
        and Rung.JOB_RESCHEDULE_ISOLATED in asked.supported
        and not failed(asked, *ISOLATING)
        and not any(
            p.rung is Rung.JOB_RESCHEDULE and place(p.fault) == place(met) for p in asked.row
        )
    )
    return not (could and asked.decision.rung is Rung.JOB_RESCHEDULE)


def moves_away_the_third_time(asked: Asked) -> bool:
    return not came_thrice(asked) or asked.decision.rung not in ON_CHIP


def heeds_the_limits_of_a_code(asked: Asked) -> bool:
    return not came_too_often(asked) or asked.decision.rung not in ON_CHIP


def spares_the_node_of_a_user_code(asked: Asked) -> bool:
    return asked.fault.code != USER_CODE or asked.decision.isolate is None


def reschedules_only_with_a_right(asked: Asked) -> bool:
    return (
        asked.decision.rung is not Rung.JOB_RESCHEDULE
        or asked.policy.unconditional
        or asked.fault.code == USER_CODE
        or any(
            p.failed and p.rung is Rung.POD_RESCHEDULE and place(p.fault) == place(asked.fault)
            for p in asked.row
        )
    )


def blames_the_program_the_fourth_time(asked: Asked) -> bool:
    met = asked.fault
    if is_hardware(met) or met.fault_class == "preempted":
        return True
    since = list(itertools.takewhile(lambda p: not is_hardware(p.fault), reversed(asked.row)))
    same = [p for p in since if (p.fault.fault_class, p.fault.code) == (met.fault_class, met.code)]
    done = sum(p.rung is Rung.JOB_RESCHEDULE and not p.failed for p in same)
    return done < 3 or asked.decision.rung is not Rung.JOB_RESCHEDULE


def stops_after_three_hang_restarts(asked: Asked) -> bool:
    if sum(p.rung is Rung.HANG_RESTART for p in asked.row) < 3:
        return True
    bare = asked.fault.fault_class == "hang" and not is_chip_code(asked.fault.code)
    return asked.decision.rung is (Rung.STOP if bare else asked.decision.rung) and (
        asked.decision.rung is not Rung.HANG_RESTART
    )


def isolates_once(asked: Asked) -> bool:
    return not failed(asked, Rung.POD_RESCHEDULE) or asked.decision.rung not in ISOLATING


def tells_of_a_missing_spare(asked: Asked) -> bool:
    capacity = asked.capacity
    lacking = (
        asked.decision.isolate is not None
        and capacity is not None
        and capacity.healthy - 1 < capacity.needed
    )
    return ("no healthy spare: " in asked.decision.reason) == lacking


def goes_back_only_if_allowed(asked: Asked) -> bool:
    return (
        asked.policy.allow_without_isolation
        or not failed(asked, Rung.JOB_RESCHEDULE_ISOLATED)
        or asked.decision.rung is not Rung.JOB_RESCHEDULE
    )


def tries_the_step_before_the_process(asked: Asked) -> bool:
    memory = asked.fault.fault_class == "device_memory_error"
    if not memory or asked.decision.rung is not Rung.PROCESS_REPLACE:
        return True
    possible = Rung.STEP_RETRY in asked.supported and asked.policy.step_retry
    return not possible or any(p.rung in IN_PROCESS for p in asked.row)


def saves_before_processes_are_lost(asked: Asked) -> bool:
    due = (
        asked.survivors
        and asked.policy.end_of_life_checkpoint
        and asked.decision.rung not in IN_PROCESS
        and asked.fault.fault_class not in NOT_SAVED
    )
    return asked.decision.end_of_life_checkpoint == due


def re_executes_only_when_asked_to(asked: Asked) -> bool:
    abnormal = asked.fault.fault_class == "numeric_anomaly"
    in_step = abnormal and asked.decision.rung is Rung.STEP_RETRY
    return not in_step or (asked.policy.numeric_retry and Rung.STEP_RETRY in asked.supported)


def asks_twice_at_most(asked: Asked) -> bool:
    decision, before = asked.decision, retries_of_step(asked)
    if decision.accept_abnormal:
        return decision.rung is Rung.STEP_RETRY and len(before) == 1 and not before[0].failed
    in_step = decision.rung is Rung.STEP_RETRY and asked.fault.fault_class == "numeric_anomaly"
    return not in_step or not before


def replaces_only_whoever_is_to_blame(asked: Asked) -> bool:
    decision, met = asked.decision, asked.fault
    if met.fault_class != "numeric_anomaly" or decision.rung is not Rung.PROCESS_REPLACE:
        return True
    tried = any(text.startswith("step_retry: ") for text in decision.skipped)
    return tried and asked.policy.numeric_retry and met.rank is not None


def counts_nothing_that_was_cut_short(asked: Asked) -> bool:
    carried_out = tuple(p for p in asked.history if p.progressed or not p.cut_short)
    # A chip's codes are counted whatever became of the recoveries.
    coded = is_chip_code(asked.fault.code)
    return coded or asked.again(history=carried_out) == asked.decision


def keeps_the_policies_apart(asked: Asked) -> bool:
    return not (asked.policy.numeric_retry and asked.policy.data_skipping)


def leaves_a_failed_operator_retry(asked: Asked) -> bool:
    tried = any(
        p.rung is Rung.OPERATOR_RETRY and p.failed and place(p.fault) == place(asked.fault)
        for p in asked.row
    )
    return not tried or asked.decision.rung is not Rung.OPERATOR_RETRY


def marks_what_an_operator_retry_mended(asked: Asked) -> bool:
    return asked.decision.sub_healthy == (asked.decision.rung is Rung.OPERATOR_RETRY)


def forgets_what_was_followed_by_progress(asked: Asked) -> bool:
    often = came_thrice(asked) or came_too_often(asked)
    return often or asked.again(history=asked.row) == asked.decision


def stops_for_the_user(asked: Asked) -> bool:
    return asked.fault.fault_class not in FOR_THE_USER or asked.decision.rung is Rung.STOP


def stops_when_out_of_memory_again(asked: Asked) -> bool:
    again = any(
        p.fault.fault_class == asked.fault.fault_class == "device_oom"
        and p.fault.step == asked.fault.step is not None
        for p in asked.row
    )
    return not again or asked.decision.rung is Rung.STOP


def tries_once_what_is_left_to_the_user(asked: Asked) -> bool:
    met = asked.fault
    theirs = met.recoverable_by == "user-fix" and met.fault_class not in ALWAYS_THE_USERS
    again = any(
        p.fault.fault_class == met.fault_class
        and p.fault.recoverable_by == "user-fix"
        and not p.failed
        for p in asked.row
    )
    return not (theirs and again) or asked.decision.rung is Rung.STOP


def takes_only_what_is_supported(asked: Asked) -> bool:
    rung, skipped = asked.decision.rung, asked.decision.skipped
    named = [Rung(text.split(":")[0]) for text in skipped]
    unsupported = {Rung(text.split(":")[0]) for text in skipped if text.endswith(": unsupported")}
    return (
        (rung is Rung.STOP or rung in asked.supported)
        and unsupported == set(named) - asked.supported
        and named == sorted(named, key=ORDER.index)
        and all(ORDER.index(passed) < ORDER.index(rung) for passed in named)
    )


def works_inside_only_with_survivors(asked: Asked) -> bool:
    rung = asked.decision.rung
    if rung not in IN_PROCESS:
        return True
    used = sum(p.rung is rung for p in asked.row)
    return asked.survivors and (used < 3 or asked.decision.accept_abnormal)


def never_climbs_down(asked: Asked) -> bool:
    before = [p for p in asked.row if place(p.fault) == place(asked.fault)]
    floor = max((ORDER.index(p.rung) for p in before), default=0)
    return ORDER.index(asked.decision.rung) >= floor or asked.decision.accept_abnormal


INVARIANTS: Mapping[str, Callable[[Asked], bool]] = {
    "restarts_in_place_do_not_use_up_the_maximum_restart_count": leaves_the_budget_alone,
    "rescheduling_uses_up_the_maximum_restart_count": stays_in_the_budget,
    "a_hint_needs_no_recovery_by_itself": ignores_hints,
    "minor_and_major_chip_faults_are_healed_in_place": heals_minor_and_major,
    "a_critical_chip_fault_never_heals_in_place": moves_away_from_critical,
    "a_code_that_separates_its_chip_never_heals_in_place": moves_away_from_separated,
    "when_healing_in_place_fails_the_node_is_isolated": isolates_before_it_reschedules,
    "the_same_code_three_times_in_a_row_isolates_the_node": moves_away_the_third_time,
    "a_code_may_have_a_limit_of_its_own": heeds_the_limits_of_a_code,
    "a_code_that_the_program_caused_never_isolates_and_only_reschedules": (
        spares_the_node_of_a_user_code
    ),
    "any_non_zero_exit_reschedules_when_unconditional_restart_is_on": (
        reschedules_only_with_a_right
    ),
    "the_fourth_time_the_same_problem_comes_the_program_is_at_fault": (
        blames_the_program_the_fourth_time
    ),
    "three_hang_restarts_in_a_row_then_stop": stops_after_three_hang_restarts,
    "a_pod_reschedule_that_fails_becomes_a_job_reschedule": isolates_once,
    "an_isolation_without_a_healthy_spare_says_so": tells_of_a_missing_spare,
    "without_a_spare_the_job_goes_back_only_if_the_policy_allows": goes_back_only_if_allowed,
    "a_device_memory_error_climbs_from_step_to_process_to_the_last_checkpoint": (
        tries_the_step_before_the_process
    ),
    "survivors_save_before_processes_are_lost": saves_before_processes_are_lost,
    "an_abnormal_step_is_executed_again_from_the_last_good_snapshot": (
        re_executes_only_when_asked_to
    ),
    "the_same_step_abnormal_again_is_accepted_and_never_retried_a_third_time": asks_twice_at_most,
    "an_abnormal_step_that_cannot_be_accepted_costs_the_process_that_made_it": (
        replaces_only_whoever_is_to_blame
    ),
    "a_retry_that_another_fault_cut_short_was_not_made": counts_nothing_that_was_cut_short,
    "re_execution_of_abnormal_steps_and_data_skipping_exclude_each_other": (
        keeps_the_policies_apart
    ),
    "an_operator_retry_that_fails_becomes_a_step_retry": leaves_a_failed_operator_retry,
    "a_job_mended_by_operator_retry_is_sub_healthy_and_goes_on": (
        marks_what_an_operator_retry_mended
    ),
    "a_recovery_followed_by_progress_is_free": forgets_what_was_followed_by_progress,
    "what_the_user_must_mend_stops_at_once": stops_for_the_user,
    "a_device_out_of_memory_twice_at_the_same_step_stops": stops_when_out_of_memory_again,
    "what_the_evidence_leaves_to_the_user_is_tried_once": tries_once_what_is_left_to_the_user,
    "an_unsupported_rung_is_skipped_and_the_decision_says_so": takes_only_what_is_supported,
    "rungs_inside_the_processes_need_survivors_and_come_three_times_in_a_row": (
        works_inside_only_with_survivors
    ),
    "the_climb_never_goes_down_without_progress": never_climbs_down,
}


@settings(max_examples=400)
@given(runs())
def test_no_run_breaks_a_rule(asked_in_a_run):
    for asked in asked_in_a_run:
        assert [name for name, holds in INVARIANTS.items() if not holds(asked)] == [], asked


@settings(max_examples=600)
@given(any_question())
def test_no_history_breaks_a_rule(asked):
    assert [name for name, holds in INVARIANTS.items() if not holds(asked)] == []


@given(st.data(), POLICIES, SUPPORTED)
def test_a_run_without_progress_always_stops_in_a_bounded_number_of_decisions(
    data, policy, supported
):
    history: tuple[Recovery, ...] = ()
    for count in itertools.count():
        asked = ask(
            data.draw(FAULTS),
            history,
            now_s=0.0,
            supported=supported,
            policy=policy,
            survivors=data.draw(st.booleans()),
            severity=data.draw(SEVERITIES),
            capacity=data.draw(CAPACITIES),
        )
        rung = asked.decision.rung
        if rung is Rung.STOP:
            break
        history += (Recovery(asked.fault, rung, False, failed=data.draw(st.booleans())),)
        assert count < most_decisions(policy)


@pytest.mark.parametrize("survivors", [False, True])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("fault_class", FaultClass)
def test_the_same_fault_again_and_again_stops_in_a_bounded_number_of_decisions(
    fault_class, fails, survivors
):
    policy = Policy(operator_retry=True, numeric_retry=True, pod_retries=9, max_restarts=9)
    met = Fault(fault_class, 0.0, "evidence", node="node-0", rank=0)
    history: tuple[Recovery, ...] = ()
    words = {"supported": frozenset(Rung), "policy": policy, "survivors": survivors}
    for _ in range(most_decisions(policy) + 1):
        asked = ask(met, history, now_s=0.0, severity=None, capacity=None, **words)
        if asked.decision.rung is Rung.STOP:
            return
        history += (Recovery(met, asked.decision.rung, False, failed=fails),)
    pytest.fail("it never stops")


def most_decisions(policy: Policy) -> int:
    """The longest row: every budget used up, and what may fail besides having failed once."""
    inside = 3 * 3 + 3  # an abnormal step may be accepted after each retry
    in_place = policy.in_place_retries + 1
    return inside + in_place + 3 + policy.max_restarts + 2


@given(any_question())
def test_the_same_question_has_the_same_answer(asked):
    assert asked.again() == asked.decision
