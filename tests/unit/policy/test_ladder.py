"""The ladder: each rule of the recovery table is a test named after it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.policy.faults import Fault, FaultClass
from training.policy.ladder import (
    LADDER,
    RESCHEDULES,
    RUNGS,
    SAME_CODE_WINDOW_S,
    Decision,
    Policy,
    Recovery,
    Rung,
    decide,
    ladder_markdown,
)

ALL = frozenset(Rung)
CHIP_CODE = "80E01801"


def fault(fault_class: FaultClass, *, at_s: float = 0.0, **where) -> Fault:
    return Fault(fault_class, at_s, "evidence", **where)


def choose(given_fault: Fault, *history: Recovery, supported=ALL, now_s=0.0, **policy) -> Decision:
    return decide(
        given_fault, now_s=now_s, history=history, supported=supported, policy=Policy(**policy)
    )


def after(given_fault: Fault, *rungs: Rung, progressed: bool = False) -> tuple[Recovery, ...]:
    return tuple(Recovery(given_fault, rung, progressed=progressed) for rung in rungs)


CRASH = fault(FaultClass.NATIVE_CRASH, node="node-1", rank=3, device=1, code="SIGKILL", step=40)
NODE = fault(FaultClass.NODE_LOST, node="node-1", code="NODE_LOST")
HANG = fault(FaultClass.HANG, node="node-0", rank=0)
UNKNOWN = fault(FaultClass.UNKNOWN, node="node-0", rank=0)


@pytest.mark.parametrize("fault_class", FaultClass)
def test_every_class_has_a_ladder_that_gets_costlier_and_ends_in_stop(fault_class):
    order = list(Rung)
    costs = [order.index(rung) for rung in LADDER[fault_class]]
    assert costs == sorted(set(costs))
    assert LADDER[fault_class][-1] is Rung.STOP


def test_a_crashed_process_is_restarted_in_place_first():
    assert choose(CRASH) == Decision(
        Rung.IN_PLACE_RESTART, None, "native_crash at rank 3 on node-1: in_place_restart"
    )


def test_in_place_restarts_do_not_use_up_the_maximum_restart_count():
    history = after(CRASH, Rung.IN_PLACE_RESTART, Rung.IN_PLACE_RESTART)
    assert choose(NODE, *history, max_restarts=1).rung is Rung.JOB_RESCHEDULE_ISOLATED


def test_rescheduling_uses_up_the_maximum_restart_count():
    history = after(NODE, Rung.JOB_RESCHEDULE_ISOLATED)
    decision = choose(NODE, *history, max_restarts=1)
    assert decision.rung is Rung.STOP
    assert "max_restarts used 1 of 1" in decision.reason


def test_when_in_place_restarts_do_not_heal_the_node_is_isolated():
    history = after(CRASH, *[Rung.IN_PLACE_RESTART] * 3)
    decision = choose(CRASH, *history)
    assert decision.rung is Rung.JOB_RESCHEDULE_ISOLATED
    assert decision.isolate == "node-1"


def test_pod_reschedule_comes_before_the_job_level_when_it_is_enabled():
    assert choose(NODE, pod_retries=1).rung is Rung.POD_RESCHEDULE
    assert choose(NODE, pod_retries=1).isolate == "node-1"
    assert choose(NODE).rung is Rung.JOB_RESCHEDULE_ISOLATED


def test_a_pod_reschedule_that_fails_becomes_a_job_reschedule():
    failed = Recovery(NODE, Rung.POD_RESCHEDULE, progressed=False, failed=True)
    assert choose(NODE, failed, pod_retries=2).rung is Rung.JOB_RESCHEDULE


def test_without_a_spare_the_job_goes_back_only_if_the_policy_allows():
    failed = Recovery(NODE, Rung.JOB_RESCHEDULE_ISOLATED, progressed=False, failed=True)
    assert choose(NODE, failed).rung is Rung.JOB_RESCHEDULE
    assert choose(NODE, failed, allow_without_isolation=False).rung is Rung.STOP


def test_the_same_chip_code_three_times_in_24_hours_isolates_the_node():
    chip = fault(FaultClass.DEVICE_MEMORY_ERROR, node="node-0", device=2, code=CHIP_CODE)
    history = after(chip, Rung.IN_PLACE_RESTART, Rung.IN_PLACE_RESTART, progressed=True)
    decision = choose(chip, *history)
    assert decision.rung is Rung.JOB_RESCHEDULE_ISOLATED
    assert decision.isolate == "node-0"
    late = choose(chip, *history, now_s=SAME_CODE_WINDOW_S + 1)
    assert late.rung is Rung.IN_PLACE_RESTART


def test_another_code_in_between_breaks_the_row_of_three():
    chip = fault(FaultClass.DEVICE_MEMORY_ERROR, node="node-0", device=2, code=CHIP_CODE)
    history = (
        *after(chip, Rung.IN_PLACE_RESTART, progressed=True),
        *after(CRASH, Rung.IN_PLACE_RESTART, progressed=True),
        *after(chip, Rung.IN_PLACE_RESTART, progressed=True),
    )
    assert choose(chip, *history).rung is Rung.IN_PLACE_RESTART


@pytest.mark.parametrize("code", ["80C98002", "80CB8002"])
def test_a_code_that_the_program_caused_does_not_isolate_the_node(code):
    chip = fault(FaultClass.OPERATOR_ERROR, node="node-0", device=2, code=code)
    history = after(chip, Rung.IN_PLACE_RESTART, Rung.IN_PLACE_RESTART)
    decision = choose(chip, *history, pod_retries=1)
    assert decision.rung is Rung.JOB_RESCHEDULE
    assert decision.isolate is None


def test_a_signal_is_no_chip_code():
    history = after(CRASH, Rung.IN_PLACE_RESTART, Rung.IN_PLACE_RESTART, progressed=True)
    assert choose(CRASH, *history).rung is Rung.IN_PLACE_RESTART


def test_three_hang_restarts_in_a_row_then_stop():
    assert choose(HANG, *after(HANG, *[Rung.HANG_RESTART] * 2)).rung is Rung.HANG_RESTART
    assert choose(HANG, *after(HANG, *[Rung.HANG_RESTART] * 3)).rung is Rung.STOP


def test_unconditional_reschedules_stop_at_the_fourth_time_without_node_or_chip_fault():
    history = after(UNKNOWN, *[Rung.IN_PLACE_RESTART] * 3, *[Rung.JOB_RESCHEDULE] * 3)
    decision = choose(UNKNOWN, *history, max_restarts=100)
    assert decision.rung is Rung.STOP
    assert "the program is to be mended" in decision.reason


def test_a_node_fault_in_between_starts_the_count_of_unconditional_reschedules_anew():
    history = (
        *after(UNKNOWN, *[Rung.IN_PLACE_RESTART] * 3, *[Rung.JOB_RESCHEDULE] * 2),
        *after(NODE, Rung.JOB_RESCHEDULE),
        *after(UNKNOWN, Rung.JOB_RESCHEDULE),
    )
    assert choose(UNKNOWN, *history, max_restarts=100).rung is Rung.JOB_RESCHEDULE


def test_a_node_fault_answered_by_pod_rescheduling_starts_the_count_anew_as_well():
    history = (
        *after(UNKNOWN, *[Rung.IN_PLACE_RESTART] * 3, *[Rung.JOB_RESCHEDULE] * 2),
        *after(NODE, Rung.POD_RESCHEDULE),
        *after(UNKNOWN, Rung.JOB_RESCHEDULE),
    )
    assert choose(UNKNOWN, *history, max_restarts=100).rung is Rung.JOB_RESCHEDULE


def test_a_rung_that_could_not_be_carried_out_uses_up_no_restart():
    failed = Recovery(NODE, Rung.JOB_RESCHEDULE_ISOLATED, progressed=False, failed=True)
    assert choose(NODE, failed, max_restarts=1).rung is Rung.JOB_RESCHEDULE


def test_without_unconditional_restart_an_unknown_exit_stops_after_the_in_place_restarts():
    history = after(UNKNOWN, *[Rung.IN_PLACE_RESTART] * 3)
    assert choose(UNKNOWN, *history, unconditional=False).rung is Rung.STOP


@pytest.mark.parametrize(
    "fault_class",
    [FaultClass.USER_CODE_ERROR, FaultClass.LAUNCH_MISCONFIGURED, FaultClass.VERSION_MISMATCH],
)
def test_what_the_user_must_mend_stops_at_once(fault_class):
    assert choose(fault(fault_class)).rung is Rung.STOP


def test_a_device_out_of_memory_twice_at_the_same_step_stops():
    oom = fault(FaultClass.DEVICE_OOM, node="node-0", step=7)
    assert choose(oom).rung is Rung.IN_PLACE_RESTART
    assert choose(oom, *after(oom, Rung.IN_PLACE_RESTART)).rung is Rung.STOP
    elsewhere = fault(FaultClass.DEVICE_OOM, node="node-0", step=900)
    assert choose(elsewhere, *after(oom, Rung.IN_PLACE_RESTART)).rung is Rung.IN_PLACE_RESTART


def test_a_recovery_followed_by_progress_is_free():
    history = after(CRASH, *[Rung.IN_PLACE_RESTART] * 50, progressed=True)
    assert choose(CRASH, *history).rung is Rung.IN_PLACE_RESTART


def test_an_unsupported_rung_is_skipped_and_the_decision_says_so():
    decision = choose(CRASH, supported=ALL - {Rung.IN_PLACE_RESTART})
    assert decision.rung is Rung.JOB_RESCHEDULE_ISOLATED
    assert "in_place_restart: unsupported" in decision.skipped


def test_a_restart_in_place_that_is_switched_off_is_not_chosen():
    assert choose(CRASH, in_place=False).rung is Rung.JOB_RESCHEDULE_ISOLATED


FAULTS = st.builds(
    Fault,
    st.sampled_from(FaultClass),
    st.just(0.0),
    st.just("evidence"),
    node=st.sampled_from([None, "node-0", "node-1"]),
    device=st.sampled_from([None, 0, 1]),
    code=st.sampled_from([None, "SIGKILL", CHIP_CODE, "80C98002"]),
    step=st.sampled_from([None, 10, 20]),
)
POLICIES = st.builds(
    Policy,
    max_restarts=st.integers(1, 6),
    in_place=st.booleans(),
    in_place_retries=st.integers(1, 4),
    unconditional=st.booleans(),
    hang=st.booleans(),
    pod_retries=st.integers(0, 3),
    allow_without_isolation=st.booleans(),
)


@given(st.data(), POLICIES, st.sets(st.sampled_from(Rung)).map(frozenset))
def test_a_run_without_progress_always_stops_in_a_bounded_number_of_decisions(
    data, policy, supported
):
    history: list[Recovery] = []
    for count in itertools.count():
        met = data.draw(FAULTS)
        decision = decide(met, now_s=0.0, history=history, supported=supported, policy=policy)
        assert decision.rung is Rung.STOP or decision.rung in supported
        if decision.rung is Rung.STOP:
            break
        history.append(
            Recovery(met, decision.rung, progressed=False, failed=data.draw(st.booleans()))
        )
        assert count <= policy.max_restarts + policy.in_place_retries + 3


@given(FAULTS, st.lists(st.tuples(FAULTS, st.sampled_from(Rung), st.booleans())), POLICIES)
def test_only_rungs_that_isolate_name_a_node_and_only_the_one_at_fault(met, past, policy):
    history = [Recovery(f, rung, progressed=done) for f, rung, done in past]
    decision = decide(met, now_s=0.0, history=history, supported=ALL, policy=policy)
    isolates = decision.rung in (Rung.POD_RESCHEDULE, Rung.JOB_RESCHEDULE_ISOLATED)
    assert decision.isolate == (met.node if isolates else None)
    assert decision.rung in LADDER[met.fault_class]
    assert decision.rung not in RESCHEDULES or policy.max_restarts > 0


def test_the_printed_ladder_names_every_rung_and_every_class():
    text = ladder_markdown()
    assert all(f"`{rung}`" in text for rung in Rung)
    assert all(f"`{fault_class}`" in text for fault_class in FaultClass)
    assert set(RUNGS) == set(Rung)
