"""Each rule of the ladder by example; the tests are named after the rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from perdure.training.diagnosis.rules import load_rules
from perdure.training.recovery.blame import SAME_CODE_WINDOW_S
from perdure.training.recovery.chips import BY_LEVEL, ChipAnswer, Severity, _facts
from perdure.training.recovery.faults import (
    NODE_UNWRITABLE,
    POD_PREEMPTED,
    USER_CAUSED_CODES,
    Fault,
    FaultClass,
    RecoverableBy,
)
from perdure.training.recovery.healing import Act, ActDone, found_at_fault
from perdure.training.recovery.node_suspicion import ROWS, Threshold, chance_of
from perdure.training.recovery.protocol import WorkerFaultKind
from perdure.training.recovery.rungs import (
    IN_PROCESS,
    LADDER,
    RESTARTS_IN_PLACE,
    Capacity,
    Decision,
    Policy,
    Recovery,
    RestartCount,
    Rung,
)
from tests.unit.recovery.diagnosed import (
    AICORE,
    ALL,
    FULL_DISK,
    FULL_STORE,
    OUT_OF_DEVICE_MEMORY,
    TIME_OUT,
    after,
    choose,
    climbed,
    end,
    failing,
    lost_node,
    of_code,
    of_exit,
    of_log,
    of_workers,
    out_of_host_memory,
    reported,
    silence,
)
from tests.unit.recovery.ladder_invariants import CHIP_CODE, RESET_CODE, SEPARATE_CODE


def retried(met: Fault, *history: Recovery, **policy: Any) -> Decision:
    """The decision about a living process where abnormal steps are executed again."""
    return choose(met, *history, survivors=True, numeric_retry=True, **policy)


CRASH = of_exit(-9)
NODE = lost_node()
HANG = silence()
UNKNOWN = of_exit(1, node="node-0", rank=0, device=0)
LINK = reported(WorkerFaultKind.CONNECTION)
UCE = reported(WorkerFaultKind.MEMORY, code=CHIP_CODE)
ABNORMAL = reported(WorkerFaultKind.NUMERIC, culprit=2)
CHIP = of_code(CHIP_CODE)
# Those of a chip: of a switch other forms are known.
CHIP_CODES = {f.code: f.level for f in _facts().values() if f.level and len(f.code) == 8}
OF_SOFTWARE = {
    "a crash": CRASH,
    "a time-out": of_log(TIME_OUT),
    "a kernel": of_log(AICORE),
    "host memory": out_of_host_memory(),
    "an unknown end": UNKNOWN,
    "a connection": LINK,
}


def example_of(fault_class: FaultClass) -> str:
    """A line of a log that the diagnosis takes for the class."""
    rules = (rule for rule in load_rules() if rule.spec.fault_class is fault_class)
    return next(rule.spec.example for rule in rules if rule.spec.example)


def test_restarts_in_place_do_not_use_up_the_maximum_restart_count():
    history = after(CRASH, Rung.IN_PLACE_RESTART, Rung.HANG_RESTART)
    assert choose(NODE, *history, max_restarts=1).rung is Rung.JOB_RESCHEDULE_ISOLATED


def test_rescheduling_uses_up_the_maximum_restart_count():
    for rung in (Rung.POD_RESCHEDULE, Rung.JOB_RESCHEDULE_ISOLATED, Rung.JOB_RESCHEDULE):
        decision = choose(NODE, *after(CRASH, rung), max_restarts=1)
        assert decision.rung is Rung.STOP
        assert "max_restarts used 1 of 1" in decision.reason


def test_a_rung_that_could_not_be_carried_out_uses_up_no_restart():
    failed = failing(NODE, Rung.JOB_RESCHEDULE_ISOLATED)
    assert choose(NODE, failed, max_restarts=1).rung is Rung.JOB_RESCHEDULE


def test_a_hint_needs_no_recovery_by_itself():
    hint = of_code(CHIP_CODE, severity=Severity.HINT)
    assert (hint.fault_class, hint.chip_code) == (FaultClass.UNKNOWN, None)
    crashed = (end(node="node-0", exit_code=-9),)
    beside = of_code(CHIP_CODE, severity=Severity.HINT, workers=crashed, step=40)
    alone = of_workers(*crashed)
    assert beside == alone
    for history in ((), after(alone, *[Rung.IN_PLACE_RESTART] * 3)):
        assert choose(beside, *history).isolate is None


@pytest.mark.parametrize("severity", [Severity.MINOR, Severity.MAJOR])
def test_minor_and_major_chip_faults_are_healed_in_place(severity):
    """Every code of the levels that ask for a restart or a reset, whatever its class."""
    codes = [one for one, level in CHIP_CODES.items() if BY_LEVEL[level] is ChipAnswer.HEAL]
    assert len(codes) > 200
    faults = [of_code(code, severity=severity) for code in codes]
    assert len({met.fault_class for met in faults}) > 2
    assert {choose(met).rung for met in faults} == {Rung.IN_PLACE_RESTART}


def test_a_critical_chip_fault_never_heals_in_place():
    met = of_code(CHIP_CODE, severity=Severity.CRITICAL, rank=2)
    decision = choose(met, survivors=True, node_replace=False)
    assert decision.rung is Rung.JOB_RESCHEDULE_ISOLATED
    assert decision.isolate == "node-0"
    assert "in_place_restart: severity critical never heals" in decision.reason
    assert choose(met, survivors=True).rung is Rung.NODE_REPLACE


def test_a_code_that_separates_its_chip_never_heals_in_place():
    for severity in (None, Severity.MINOR, Severity.MAJOR):
        met = of_code(SEPARATE_CODE, severity=severity, rank=2)
        assert choose(met, survivors=True).rung is Rung.NODE_REPLACE
        decision = choose(met, survivors=True, node_replace=False)
        assert decision.rung is Rung.JOB_RESCHEDULE_ISOLATED
        assert f"in_place_restart: code {SEPARATE_CODE} separates the chip" in decision.skipped
    reset = choose(of_code(RESET_CODE, rank=2), survivors=True)
    assert reset.rung is Rung.IN_PLACE_RESTART
    assert f"step_retry: code {RESET_CODE} asks for a reset of the chip" in reset.skipped


def test_when_healing_in_place_fails_the_node_is_isolated():
    ill = (ActDone(Act.CHECK, is_good=False, seen="device 1: wrong product"),)
    for met in (CHIP, found_at_fault(CRASH, ill)):
        for history in (
            after(met, *[Rung.IN_PLACE_RESTART] * 3),
            (failing(met, Rung.IN_PLACE_RESTART),),
        ):
            assert choose(met, *history).rung is Rung.JOB_RESCHEDULE_ISOLATED
            assert choose(met, *history).isolate == met.node
            assert choose(met, *history, pod_retries=1).rung is Rung.POD_RESCHEDULE


def test_a_critical_code_isolates_the_node_whatever_its_class():
    known = [code for code in CHIP_CODES if code not in USER_CAUSED_CODES]
    faults = [of_code(code, severity=Severity.CRITICAL) for code in known]
    assert len({met.fault_class for met in faults}) > 2
    assert {choose(met).isolate for met in faults} == {"node-0"}


@pytest.mark.parametrize("name", OF_SOFTWARE)
def test_what_software_did_isolates_no_node(name):
    met = OF_SOFTWARE[name]
    rungs = climbed(met, max_restarts=20, pod_retries=5)
    assert rungs[-1] is Rung.STOP
    assert set(rungs) <= {Rung.IN_PLACE_RESTART, Rung.JOB_RESCHEDULE, Rung.STOP}
    assert rungs.count(Rung.IN_PLACE_RESTART) == 3
    assert rungs.count(Rung.JOB_RESCHEDULE) == 3


def test_a_container_that_was_taken_away_is_made_anew_and_no_node_is_isolated():
    met = Fault(FaultClass.CONTAINER_LOST, 0.0, "evicted", node="node-0", code="POD_EVICTED")
    decision = choose(met, pod_retries=1)
    assert (decision.rung, decision.isolate) == (Rung.POD_RESCHEDULE, None)
    assert choose(met, pod_retries=0).rung is Rung.JOB_RESCHEDULE
    full = Capacity(healthy=2, needed=2)
    assert "no healthy spare" not in choose(met, pod_retries=1, capacity=full).reason


FULL_NODE = Fault(
    FaultClass.STORAGE_ERROR,
    0.0,
    "node-0 takes no files: No space left on device: /scratch",
    node="node-0",
    code=NODE_UNWRITABLE,
)


def test_a_node_that_takes_no_files_is_left():
    spare = Capacity(healthy=3, needed=2)
    decision = choose(FULL_NODE, capacity=spare)
    assert (decision.rung, decision.isolate) == (Rung.JOB_RESCHEDULE_ISOLATED, "node-0")
    moved = choose(FULL_NODE, pod_retries=1, capacity=spare)
    assert (moved.rung, moved.isolate) == (Rung.POD_RESCHEDULE, "node-0")


def test_a_node_that_takes_no_files_ends_the_run_where_no_other_is_free():
    decision = choose(FULL_NODE, capacity=Capacity(healthy=1, needed=1))
    assert (decision.rung, decision.isolate) == (Rung.STOP, None)
    assert "No space left on device: /scratch, and no other node is free" in decision.reason
    assert decision.reason.endswith("then start the run again")
    assert choose(FULL_NODE, capacity=None).rung is Rung.JOB_RESCHEDULE_ISOLATED
    unknown = Capacity(healthy=1, needed=1, is_estimate=True)
    assert choose(FULL_NODE, capacity=unknown).rung is Rung.JOB_RESCHEDULE_ISOLATED


def test_a_node_that_takes_no_files_uses_up_the_budget():
    spare = Capacity(healthy=9, needed=1)
    past = [Recovery(FULL_NODE, Rung.JOB_RESCHEDULE_ISOLATED, progressed=False)] * 3
    decision = choose(FULL_NODE, *past, capacity=spare)
    assert decision.rung is Rung.STOP
    assert "max_restarts used 3 of 3" in decision.reason
    assert choose(FULL_NODE, max_restarts=0, capacity=spare).rung is Rung.STOP


def crashes(*nodes: str, rung: Rung = Rung.IN_PLACE_RESTART) -> tuple[Recovery, ...]:
    """One crash after the other, each recovered from."""
    return tuple(Recovery(of_exit(-11, node=node), rung, progressed=True) for node in nodes)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.nodes} nodes")
def test_the_same_node_again_and_again_is_taken_for_the_cause(row):
    there = Capacity(healthy=row.nodes + 1, needed=row.nodes)
    met = of_exit(-11, node="node-0")
    others = crashes(*["node-1"] * (row.of - row.times))
    times = crashes(*["node-0"] * (row.times - 1))
    decision = choose(met, *others, *times, capacity=there)
    assert (decision.rung, decision.isolate) == (Rung.JOB_RESCHEDULE_ISOLATED, "node-0")
    assert "the same node again and again" in decision.reason
    assert choose(met, *others, *times[1:], capacity=there).isolate is None
    assert choose(met, *others, *times).isolate is None, "with how many others is not known"
    spread = crashes(*[f"node-{number % row.nodes}" for number in range(30)])
    assert choose(met, *spread, capacity=there).isolate is None
    # It came again on another node: it had not been the first one.
    moved = crashes("node-0", rung=Rung.JOB_RESCHEDULE_ISOLATED)
    back = crashes(*["node-1"] * row.of)
    again = choose(of_exit(-11, node="node-1"), *moved, *back, capacity=there)
    assert again.isolate is None


def test_chance_alone_isolates_a_healthy_node_in_fewer_than_one_of_a_hundred_cases():
    for row in ROWS:
        assert chance_of(row) < 0.01
        assert chance_of(Threshold(row.nodes, row.times - 1, row.of)) >= 0.01, "fewer would not do"


@pytest.mark.parametrize("survivors", [False, True])
def test_the_same_code_three_times_in_a_row_isolates_the_node(survivors):
    history = after(CHIP, Rung.IN_PLACE_RESTART, Rung.IN_PLACE_RESTART, progressed=True)
    assert choose(CHIP, *history[:1]).rung is Rung.IN_PLACE_RESTART
    decision = choose(CHIP, *history, survivors=survivors)
    assert decision.rung is (Rung.NODE_REPLACE if survivors else Rung.JOB_RESCHEDULE_ISOLATED)
    assert decision.isolate == "node-0"
    late = choose(CHIP, *history, now_s=SAME_CODE_WINDOW_S + 1)
    assert late.rung is Rung.IN_PLACE_RESTART


def test_only_another_code_of_the_same_chip_breaks_the_row_of_three():
    """In a large cluster a fault of something else always comes in between."""
    once = after(CHIP, Rung.IN_PLACE_RESTART, progressed=True)
    for other in (CRASH, of_code(CHIP_CODE, device=3), of_code(CHIP_CODE, node="node-1")):
        history = (*once, *after(other, Rung.IN_PLACE_RESTART, progressed=True), *once)
        assert choose(CHIP, *history).rung is Rung.JOB_RESCHEDULE_ISOLATED
    broken = (*once, *after(of_code(RESET_CODE), Rung.IN_PLACE_RESTART, progressed=True), *once)
    assert choose(CHIP, *broken).rung is Rung.IN_PLACE_RESTART


def test_a_second_answer_to_one_event_is_not_a_second_event():
    history = (*after(CHIP, Rung.IN_PLACE_RESTART), failing(CHIP, Rung.STEP_RETRY))
    assert choose(CHIP, *history).rung is Rung.IN_PLACE_RESTART


def test_a_signal_is_no_chip_code():
    history = after(CRASH, Rung.IN_PLACE_RESTART, Rung.IN_PLACE_RESTART, progressed=True)
    assert choose(CRASH, *history).rung is Rung.IN_PLACE_RESTART


def test_a_code_may_have_a_limit_of_its_own():
    once = after(CHIP, Rung.IN_PLACE_RESTART, progressed=True)
    between = after(CRASH, Rung.IN_PLACE_RESTART, progressed=True)
    assert choose(CHIP, *once, *between).rung is Rung.IN_PLACE_RESTART
    moved = choose(CHIP, *once, *between, mindcluster_frequency=True)
    assert (moved.rung, moved.isolate) == (Rung.JOB_RESCHEDULE_ISOLATED, CHIP.node)
    assert "as often as MindCluster separates its chip for" in moved.reason
    late = choose(CHIP, *once, now_s=SAME_CODE_WINDOW_S + 1, mindcluster_frequency=True)
    assert late.rung is Rung.IN_PLACE_RESTART


@pytest.mark.parametrize("code", ["80C98002", "80CB8002"])
@pytest.mark.parametrize("severity", [None, *Severity])
def test_a_code_that_the_program_caused_never_isolates_and_only_reschedules(code, severity):
    chip = of_code(code, severity=severity)
    in_place = after(chip, Rung.IN_PLACE_RESTART, Rung.IN_PLACE_RESTART)
    asked: dict[str, Any] = {"pod_retries": 1, "unconditional": False}
    first = choose(chip, **asked)
    assert first.isolate is None
    if severity in {None, Severity.MINOR, Severity.MAJOR}:
        assert first.rung is choose(chip, *in_place[:1], **asked).rung is Rung.IN_PLACE_RESTART
        assert choose(chip, *in_place, **asked).rung is Rung.JOB_RESCHEDULE
    assert choose(chip, *in_place, **asked).isolate is None


def test_any_non_zero_exit_reschedules_when_unconditional_restart_is_on():
    history = after(UNKNOWN, *[Rung.IN_PLACE_RESTART] * 3)
    assert choose(UNKNOWN, *history).rung is Rung.JOB_RESCHEDULE
    off = choose(UNKNOWN, *history, unconditional=False)
    assert off.rung is Rung.STOP
    assert "job_reschedule: unconditional restart is off" in off.skipped


@pytest.mark.parametrize("name", OF_SOFTWARE)
def test_the_fourth_time_the_same_problem_comes_the_program_is_at_fault(name):
    met = OF_SOFTWARE[name]
    history = after(met, *[Rung.IN_PLACE_RESTART] * 3, *[Rung.JOB_RESCHEDULE] * 3)
    decision = choose(met, *history, max_restarts=100)
    assert decision.rung is Rung.STOP
    assert "the program is to be fixed" in decision.reason
    assert choose(met, *history[:-1], max_restarts=100).rung is Rung.JOB_RESCHEDULE
    # Also where the first one was answered by another rung.
    replaced = after(met, Rung.PROCESS_REPLACE, *[Rung.JOB_RESCHEDULE] * 3)
    assert choose(met, *replaced, max_restarts=100, in_place=False).rung is Rung.STOP


@pytest.mark.parametrize("answer", [Rung.JOB_RESCHEDULE, Rung.POD_RESCHEDULE])
@pytest.mark.parametrize("between", [NODE, CHIP])
def test_a_node_or_chip_fault_in_between_restarts_the_count(answer, between):
    history = (
        *after(UNKNOWN, *[Rung.IN_PLACE_RESTART] * 3, *[Rung.JOB_RESCHEDULE] * 2),
        *after(between, answer),
        *after(UNKNOWN, Rung.JOB_RESCHEDULE),
    )
    assert choose(UNKNOWN, *history, max_restarts=100).rung is Rung.JOB_RESCHEDULE


def test_another_problem_is_not_the_same_problem():
    history = (
        *after(UNKNOWN, *[Rung.IN_PLACE_RESTART] * 3, *[Rung.JOB_RESCHEDULE] * 2),
        *after(CRASH, Rung.JOB_RESCHEDULE),
    )
    assert choose(UNKNOWN, *history, max_restarts=100).rung is Rung.JOB_RESCHEDULE


def test_three_hang_restarts_in_a_row_then_stop():
    assert choose(HANG, *after(HANG, *[Rung.HANG_RESTART] * 2)).rung is Rung.HANG_RESTART
    assert choose(HANG, *after(HANG, *[Rung.HANG_RESTART] * 3)).rung is Rung.STOP
    assert choose(HANG, *[failing(HANG, Rung.HANG_RESTART)] * 3).rung is Rung.STOP
    row = after(HANG, *[Rung.HANG_RESTART] * 2)
    for other in (Rung.IN_PLACE_RESTART, Rung.POD_RESCHEDULE, Rung.JOB_RESCHEDULE):
        begun = (*row, *after(CRASH, other), *row)
        assert choose(HANG, *begun).rung is Rung.HANG_RESTART, "another fault ends the row"
        assert choose(HANG, *begun, *after(HANG, Rung.HANG_RESTART)).rung is Rung.STOP
    for between in (after(CRASH, Rung.PROCESS_REPLACE), (failing(CRASH, Rung.IN_PLACE_RESTART),)):
        assert choose(HANG, *row, *between, *row).rung is Rung.STOP, "the same processes live on"


def test_a_pod_reschedule_that_fails_becomes_a_job_reschedule():
    failed = failing(NODE, Rung.POD_RESCHEDULE)
    for decision in (
        choose(NODE, failed, pod_retries=2),
        choose(NODE, failed, pod_retries=2, allow_without_isolation=False),
        choose(NODE, failed, pod_retries=2, unconditional=False),
    ):
        assert decision.rung is Rung.JOB_RESCHEDULE
        assert "job_reschedule_isolated: the node is isolated already" in decision.skipped


def test_a_rung_that_failed_for_one_node_is_open_for_another():
    other = replace(NODE, node="node-2")
    pod = failing(NODE, Rung.POD_RESCHEDULE)
    policies: list[dict[str, Any]] = [
        {},
        {"unconditional": False},
        {"allow_without_isolation": False},
    ]
    for policy in policies:
        assert choose(other, pod, pod_retries=2, **policy).rung is Rung.POD_RESCHEDULE
        decision = choose(other, pod, pod_retries=1, **policy)
        assert (decision.rung, decision.isolate) == (Rung.JOB_RESCHEDULE_ISOLATED, "node-2")
        isolated = failing(NODE, Rung.JOB_RESCHEDULE_ISOLATED)
        assert choose(other, isolated, **policy).rung is Rung.JOB_RESCHEDULE_ISOLATED
        assert choose(other, isolated, survivors=True, **policy).rung is Rung.NODE_REPLACE


def test_processes_that_could_not_be_started_on_one_node_are_started_on_another():
    failed = failing(CHIP, Rung.IN_PLACE_RESTART)
    assert choose(replace(CHIP, node="node-2"), failed).rung is Rung.IN_PLACE_RESTART
    assert choose(replace(CHIP, device=1), failed).rung is Rung.JOB_RESCHEDULE_ISOLATED
    hung = failing(HANG, Rung.HANG_RESTART)
    assert choose(replace(HANG, node="node-2"), hung).rung is Rung.HANG_RESTART


def test_a_container_for_which_there_was_no_room_leaves_its_node_to_be_isolated_later():
    taken = Fault(FaultClass.CONTAINER_LOST, 0.0, "pod was deleted", node="node-1")
    no_room = failing(taken, Rung.POD_RESCHEDULE)
    for unconditional in (True, False):
        decision = choose(NODE, no_room, pod_retries=1, unconditional=unconditional)
        assert (decision.rung, decision.isolate) == (Rung.JOB_RESCHEDULE_ISOLATED, "node-1")


def test_an_isolation_without_a_healthy_spare_reports_it():
    decision = choose(NODE, capacity=Capacity(healthy=2, needed=2))
    assert (decision.rung, decision.isolate) == (Rung.JOB_RESCHEDULE_ISOLATED, "node-1")
    assert decision.reason.endswith("; no healthy spare: 1 of 2 nodes left without it")
    assert "spare" not in choose(NODE, capacity=Capacity(healthy=3, needed=2)).reason
    assert "spare" not in choose(CRASH, capacity=Capacity(healthy=2, needed=2)).reason


def test_without_a_spare_the_job_goes_back_only_if_the_policy_allows():
    failed = failing(NODE, Rung.JOB_RESCHEDULE_ISOLATED)
    assert choose(NODE, failed).rung is Rung.JOB_RESCHEDULE
    assert choose(NODE, failed, unconditional=False).rung is Rung.STOP
    assert choose(NODE, failed, allow_without_isolation=False).rung is Rung.STOP
    pod_then_job = (failing(NODE, Rung.POD_RESCHEDULE), failing(NODE, Rung.JOB_RESCHEDULE))
    assert choose(NODE, *pod_then_job, allow_without_isolation=False).rung is Rung.STOP


def test_a_device_memory_error_climbs_from_step_to_process_to_the_last_checkpoint():
    first = choose(UCE, survivors=True)
    assert (first.rung, first.end_of_life_checkpoint) == (Rung.STEP_RETRY, False)
    for answered in (failing(UCE, Rung.STEP_RETRY), *after(UCE, Rung.STEP_RETRY)):
        second = choose(UCE, answered, survivors=True)
        assert (second.rung, second.end_of_life_checkpoint) == (Rung.PROCESS_REPLACE, False)
    failed = (failing(UCE, Rung.STEP_RETRY), failing(UCE, Rung.PROCESS_REPLACE))
    third = choose(UCE, *failed, survivors=True)
    assert (third.rung, third.end_of_life_checkpoint) == (Rung.IN_PLACE_RESTART, True)


def test_a_pod_is_replaced_before_a_restart_in_place_where_the_policy_has_it():
    chip = CHIP
    asked: dict[str, Any] = {"pod_retries": 1, "pod_before_in_place": True}
    assert choose(chip, pod_retries=1).rung is Rung.IN_PLACE_RESTART
    assert choose(chip, **asked).rung is Rung.POD_RESCHEDULE
    assert choose(chip, **asked, supported=ALL - {Rung.POD_RESCHEDULE}).rung is (
        Rung.IN_PLACE_RESTART
    )
    for ended in (CRASH, UNKNOWN, of_log(AICORE)):
        again = choose(ended, **asked)
        assert (again.rung, again.isolate) == (Rung.POD_RESCHEDULE, None), "it is not the node"
        assert choose(ended, failing(ended, Rung.POD_RESCHEDULE), **asked).rung is (
            Rung.JOB_RESCHEDULE
        )
        everywhere = replace(ended, num_other_nodes=1)
        assert choose(everywhere, **asked).rung is Rung.IN_PLACE_RESTART, "no single pod's"
    assert choose(of_log(FULL_DISK), **asked).rung is not Rung.POD_RESCHEDULE
    assert choose(chip, failing(chip, Rung.POD_RESCHEDULE), **asked).rung is Rung.JOB_RESCHEDULE


def test_a_chip_that_had_a_fault_keeps_its_process_only_where_the_policy_has_it():
    asked: dict[str, Any] = {"survivors": True, "memory_retry": False}
    assert choose(UCE, **asked).rung is Rung.PROCESS_REPLACE
    off = choose(UCE, **asked, process_in_place=False)
    assert off.rung is Rung.IN_PLACE_RESTART
    assert "process_replace: process_in_place is off" in off.skipped
    assert choose(CRASH, survivors=True, process_in_place=False).rung is Rung.PROCESS_REPLACE


def test_a_node_that_is_lost_is_replaced_while_the_processes_of_the_others_live_on():
    lost = choose(NODE, survivors=True)
    assert (lost.rung, lost.isolate) == (Rung.NODE_REPLACE, "node-1")
    assert choose(NODE).rung is Rung.JOB_RESCHEDULE_ISOLATED, "nothing lives on"
    assert choose(NODE, survivors=True, node_replace=False).rung is Rung.JOB_RESCHEDULE_ISOLATED
    failed = choose(NODE, failing(NODE, Rung.NODE_REPLACE), survivors=True, pod_retries=1)
    assert failed.rung is Rung.POD_RESCHEDULE
    assert "node_replace: the last one failed" in failed.skipped
    alone = choose(NODE, survivors=True, no_replica_of_node="no replica of rank 2 is left")
    assert alone.rung is Rung.JOB_RESCHEDULE_ISOLATED
    assert "node_replace: no replica of rank 2 is left" in alone.reason
    heals = choose(CHIP, survivors=True, memory_retry=False, process_replace=False)
    assert heals.rung is Rung.IN_PLACE_RESTART
    assert "node_replace: the node is there, and may serve new processes" in heals.skipped


def test_survivors_save_before_processes_are_lost():
    assert choose(NODE, survivors=True, node_replace=False).end_of_life_checkpoint
    assert not choose(NODE, survivors=True).end_of_life_checkpoint, "their processes live on"
    assert choose(HANG, *after(HANG, *[Rung.HANG_RESTART] * 3), survivors=True) == replace(
        choose(HANG, *after(HANG, *[Rung.HANG_RESTART] * 3)), end_of_life_checkpoint=True
    )
    assert not choose(NODE).end_of_life_checkpoint
    unsaved = choose(NODE, survivors=True, end_of_life_checkpoint=False, node_replace=False)
    assert not unsaved.end_of_life_checkpoint
    for senseless in (ABNORMAL, of_log(example_of(FaultClass.CHECKPOINT_CORRUPT))):
        assert not choose(senseless, survivors=True).end_of_life_checkpoint


def test_an_abnormal_step_is_executed_again_from_the_last_good_snapshot():
    decision = retried(ABNORMAL)
    assert (decision.rung, decision.accept_abnormal) == (Rung.STEP_RETRY, False)
    off = choose(ABNORMAL, survivors=True)
    assert off.rung is Rung.IN_PLACE_RESTART
    assert off.skipped == ("step_retry: switched off", "process_replace: switched off")


def test_the_same_step_abnormal_again_is_accepted_and_never_retried_a_third_time():
    moved = replace(ABNORMAL, node="node-9")
    once = after(ABNORMAL, Rung.STEP_RETRY)
    assert retried(moved, *once) == Decision(
        Rung.STEP_RETRY,
        None,
        "numeric_anomaly: step 40 is abnormal again, accepted and recorded",
        accept_abnormal=True,
    )
    third = retried(moved, *once, *once)
    assert third.rung is Rung.PROCESS_REPLACE
    assert "step_retry: step 40 was accepted already" in third.skipped
    elsewhere = after(replace(ABNORMAL, step=39), Rung.STEP_RETRY)
    assert not retried(moved, *elsewhere).accept_abnormal
    assert retried(moved, failing(ABNORMAL, Rung.STEP_RETRY)).rung is Rung.PROCESS_REPLACE
    assert choose(ABNORMAL, *once, survivors=True).rung is Rung.IN_PLACE_RESTART, "switched off"


def test_an_abnormal_step_that_cannot_be_accepted_costs_the_process_that_made_it():
    no_number = (*after(ABNORMAL, Rung.STEP_RETRY), failing(ABNORMAL, Rung.STEP_RETRY))
    for history in (no_number, after(ABNORMAL, *[Rung.STEP_RETRY] * 2)):
        assert retried(ABNORMAL, *history).rung is Rung.PROCESS_REPLACE
        unknown = retried(replace(ABNORMAL, rank=None, node=None), *history)
        assert unknown.rung is Rung.IN_PLACE_RESTART
        assert "process_replace: no rank is to blame" in unknown.skipped
        assert retried(ABNORMAL, *history, process_replace=False).rung is Rung.IN_PLACE_RESTART
        replaced = (*history, *after(ABNORMAL, Rung.PROCESS_REPLACE))
        last = retried(ABNORMAL, *replaced)
        assert (last.rung, last.end_of_life_checkpoint) == (Rung.IN_PLACE_RESTART, False)
        assert "process_replace: it did not help at step 40" in last.skipped


def test_a_retry_that_another_fault_cut_short_was_not_made():
    cut = replace(failing(ABNORMAL, Rung.STEP_RETRY), cut_short=True)
    assert retried(ABNORMAL, cut) == retried(ABNORMAL)
    once = after(ABNORMAL, Rung.STEP_RETRY)
    assert retried(ABNORMAL, *once, cut) == retried(ABNORMAL, *once)
    assert retried(ABNORMAL, *once, cut).accept_abnormal


def test_re_execution_of_abnormal_steps_and_data_skipping_exclude_each_other():
    with pytest.raises(ValueError, match="numeric_retry=true and data_skipping=true"):
        Policy(numeric_retry=True, data_skipping=True)


def test_an_operator_retry_that_fails_becomes_a_step_retry():
    assert choose(LINK, survivors=True, operator_retry=True).rung is Rung.OPERATOR_RETRY
    assert choose(LINK, survivors=True).rung is Rung.STEP_RETRY
    elsewhere = failing(replace(LINK, step=39), Rung.OPERATOR_RETRY)
    for answered in (elsewhere, *after(LINK, Rung.OPERATOR_RETRY)):
        decision = choose(LINK, answered, survivors=True, operator_retry=True)
        assert decision.rung is Rung.STEP_RETRY


def test_a_job_recovered_by_operator_retry_is_sub_healthy_and_goes_on():
    recovered = choose(LINK, survivors=True, operator_retry=True)
    assert recovered.sub_healthy
    assert (recovered.isolate, recovered.end_of_life_checkpoint) == (None, False)
    assert not choose(LINK, survivors=True).sub_healthy


def test_a_recovery_followed_by_progress_is_free():
    history = after(CRASH, *[Rung.IN_PLACE_RESTART] * 50, progressed=True)
    assert choose(CRASH, *history).rung is Rung.IN_PLACE_RESTART
    spent = after(NODE, *[Rung.JOB_RESCHEDULE] * 3)
    assert choose(NODE, *spent).rung is Rung.STOP
    assert choose(NODE, *spent, *history[:1]).rung is Rung.JOB_RESCHEDULE_ISOLATED


def test_counted_for_ever_a_rescheduling_is_never_free():
    fine = after(NODE, *[Rung.JOB_RESCHEDULE] * 3, progressed=True)
    assert choose(NODE, *fine).rung is Rung.JOB_RESCHEDULE_ISOLATED
    spent = choose(NODE, *fine, count=RestartCount.EVER)
    assert spent.rung is Rung.STOP
    assert "job_reschedule_isolated: max_restarts used 3 of 3" in spent.skipped
    assert choose(NODE, *fine[1:], count=RestartCount.EVER).rung is Rung.JOB_RESCHEDULE_ISOLATED
    pods = after(NODE, *[Rung.POD_RESCHEDULE] * 2, progressed=True)
    again = choose(NODE, *pods, pod_retries=2, count=RestartCount.EVER)
    assert again.rung is Rung.JOB_RESCHEDULE_ISOLATED
    assert "pod_reschedule: used 2 of 2 in all" in again.skipped
    # What is counted in a row on ModelArts, too, or not at all, stays free.
    hung = after(HANG, *[Rung.HANG_RESTART] * 9, progressed=True)
    assert choose(HANG, *hung, count=RestartCount.EVER).rung is Rung.HANG_RESTART
    crashed = after(CRASH, *[Rung.IN_PLACE_RESTART] * 9, progressed=True)
    assert choose(CRASH, *crashed, count=RestartCount.EVER).rung is Rung.IN_PLACE_RESTART


@pytest.mark.parametrize(
    "fault_class",
    [FaultClass.USER_CODE_ERROR, FaultClass.LAUNCH_MISCONFIGURED, FaultClass.VERSION_MISMATCH],
)
def test_what_the_user_must_fix_stops_at_once(fault_class):
    met = of_log(example_of(fault_class))
    assert met.fault_class is fault_class
    for one in (met, replace(met, code=CHIP_CODE)):
        decision = choose(one, survivors=True)
        assert decision.rung is Rung.STOP
        assert decision.reason == f"{fault_class} is for the user to fix"


def test_a_device_out_of_memory_twice_at_the_same_step_stops():
    oom = of_log(OUT_OF_DEVICE_MEMORY, step=7)
    assert choose(oom).rung is Rung.IN_PLACE_RESTART
    again = choose(oom, *after(oom, Rung.IN_PLACE_RESTART))
    assert again.rung is Rung.STOP
    assert again.reason == "device_oom again at step 7 is for the user to fix"
    elsewhere = replace(oom, step=900)
    assert choose(elsewhere, *after(oom, Rung.IN_PLACE_RESTART)).rung is Rung.IN_PLACE_RESTART


IN_EVALUATE = "main (train.py) > evaluate (train.py)"


def test_a_hang_again_at_the_same_step_and_place_of_the_program_stops():
    action = "Put it inside `with session.evaluation():`."
    met = replace(HANG, step=20, rank=0, frame=IN_EVALUATE, action=action)
    assert choose(met).rung is Rung.HANG_RESTART
    again = choose(met, *after(met, Rung.HANG_RESTART))
    assert again.rung is Rung.STOP
    assert again.reason == (
        f"hang again at step 20 of rank 0 in {IN_EVALUATE} is for the user to fix: {action}"
    )
    # A checkpoint that was committed in between does not lead past the step.
    assert choose(met, *after(met, Rung.HANG_RESTART, progressed=True)).rung is Rung.STOP


@pytest.mark.parametrize(
    "other",
    [{"step": 21}, {"rank": 1}, {"frame": "main (train.py) > train (train.py)"}, {"frame": None}],
)
def test_a_hang_at_another_place_is_restarted_as_any_other(other):
    met = replace(HANG, step=20, rank=0, frame=IN_EVALUATE)
    elsewhere = replace(met, **other)
    assert choose(elsewhere, *after(met, Rung.HANG_RESTART)).rung is Rung.HANG_RESTART


def test_a_start_that_computes_is_the_same_hang_only_as_one_that_was_no_slow_start():
    hang = replace(HANG, step=20, rank=0, frame=IN_EVALUATE)
    slow, idle = replace(hang, code="SLOW_START"), replace(hang, code="IDLE_START")
    assert choose(slow, *after(slow, Rung.HANG_RESTART)).rung is Rung.HANG_RESTART
    assert choose(slow, *after(hang, Rung.HANG_RESTART)).rung is Rung.STOP
    assert choose(idle, *after(slow, Rung.HANG_RESTART)).rung is Rung.STOP


def test_hangs_at_unknown_steps_are_the_same_only_without_progress_in_between():
    met = replace(HANG, step=None, rank=None, frame=IN_EVALUATE)
    assert choose(met, *after(met, Rung.HANG_RESTART)).rung is Rung.STOP
    progressed = after(met, Rung.HANG_RESTART, progressed=True)
    assert choose(met, *progressed).rung is Rung.HANG_RESTART


def test_what_the_evidence_leaves_to_the_user_is_tried_once():
    full = of_log(FULL_DISK)
    assert choose(full).rung is Rung.IN_PLACE_RESTART
    again = choose(full, *after(full, Rung.IN_PLACE_RESTART))
    assert again.rung is Rung.STOP
    assert again.reason == "storage_error again, and its evidence is for the user to fix"
    recovered = after(full, Rung.IN_PLACE_RESTART, progressed=True)
    assert choose(full, *recovered).rung is Rung.IN_PLACE_RESTART
    slow = replace(full, recoverable_by=RecoverableBy.RETRY)
    assert choose(slow, *after(full, Rung.IN_PLACE_RESTART)).rung is Rung.IN_PLACE_RESTART
    host = out_of_host_memory()
    assert choose(host, *after(host, Rung.IN_PLACE_RESTART)).rung is Rung.IN_PLACE_RESTART


def test_a_full_store_is_not_filled_again():
    decision = choose(of_log(FULL_STORE))
    assert (decision.rung, decision.isolate) == (Rung.STOP, None)
    assert "the run's store is full; make room, then start the run again" in decision.reason


@pytest.mark.parametrize(
    "line",
    [
        "slurmstepd: error: *** JOB 77 ON n1 CANCELLED AT 2026-02-03T10:00:10 ***",
        "TERM_OWNER: job killed by owner.",
        "Gracefully stopping... (press Ctrl+C again to force)",
    ],
)
def test_a_job_that_a_person_cancelled_is_not_started_again(line):
    decision = choose(of_log(line))
    assert (decision.rung, decision.isolate) == (Rung.STOP, None)
    assert "ended by a person, who may start it again" in decision.reason


def test_a_job_that_reached_its_time_limit_is_no_job_that_a_person_cancelled():
    line = "slurmstepd: error: *** JOB 77 ON n1 CANCELLED AT 2026-02-03T10:00:10 DUE TO TIME LIMIT"
    assert choose(of_log(line)).rung is Rung.JOB_RESCHEDULE


def test_an_unsupported_rung_is_skipped_and_the_decision_names_it():
    decision = choose(CRASH, supported=ALL - {Rung.IN_PLACE_RESTART})
    assert decision.rung is Rung.JOB_RESCHEDULE
    assert "in_place_restart: unsupported" in decision.skipped
    assert "in_place_restart: unsupported" in decision.reason
    once = after(ABNORMAL, Rung.STEP_RETRY)
    outside = retried(ABNORMAL, *once, supported=ALL - IN_PROCESS)
    assert outside.rung is Rung.IN_PLACE_RESTART, "no process there could accept the step either"


def test_a_rung_that_copies_a_state_is_not_tried_without_a_replica():
    why = "no replica: 4 / 4 = 1"
    for survivors in (True, False):
        crash = choose(CRASH, survivors=survivors, no_replica=why)
        assert crash.rung is Rung.IN_PLACE_RESTART
        assert crash.skipped == (f"process_replace: {why}",)
        assert f"process_replace: {why}" in crash.reason
    damaged = choose(UCE, survivors=True, no_replica=why)
    assert damaged.rung is Rung.IN_PLACE_RESTART
    copies = ("step_retry", "process_replace", "node_replace")
    assert damaged.skipped == tuple(f"{rung}: {why}" for rung in copies)
    assert choose(NODE, survivors=True, no_replica=why).rung is Rung.JOB_RESCHEDULE_ISOLATED
    whole = choose(LINK, survivors=True, no_replica=why)
    assert whole.rung is Rung.STEP_RETRY, "its state is whole: nothing is copied"


def test_rungs_inside_the_processes_that_are_not_there_stay_out_of_the_reason():
    decision = choose(UCE, supported=ALL - IN_PROCESS, survivors=True)
    passed = ("step_retry", "process_replace", "node_replace")
    assert decision.skipped == tuple(f"{rung}: unsupported" for rung in passed)
    assert decision.reason == "device_memory_error at rank 2 on node-0: in_place_restart"


def test_rungs_inside_the_processes_need_survivors_and_come_three_times_in_a_row():
    assert choose(CRASH, survivors=True).rung is Rung.PROCESS_REPLACE
    ended = choose(CRASH)
    assert ended.rung in RESTARTS_IN_PLACE
    assert ended.skipped == ("process_replace: the processes have ended",)
    others = [after(replace(CRASH, node=name), Rung.PROCESS_REPLACE)[0] for name in "abc"]
    assert choose(CRASH, *others[:2], survivors=True).rung is Rung.PROCESS_REPLACE
    assert choose(CRASH, *others, survivors=True).rung is Rung.IN_PLACE_RESTART


def test_the_climb_never_goes_down_without_progress():
    answered = after(CHIP, Rung.JOB_RESCHEDULE_ISOLATED)
    decision = choose(CHIP, *answered)
    assert decision.rung is Rung.JOB_RESCHEDULE_ISOLATED
    assert "in_place_restart: a costlier rung already answered this fault" in decision.skipped
    other = of_code(CHIP_CODE, node="node-1")
    assert choose(other, *answered).rung is Rung.IN_PLACE_RESTART
    progressed = after(CHIP, Rung.JOB_RESCHEDULE_ISOLATED, progressed=True)
    assert choose(CHIP, *progressed).rung is Rung.IN_PLACE_RESTART


def test_without_a_maximum_restart_count_the_job_is_never_rescheduled():
    for met in (NODE, CHIP, CRASH, UNKNOWN):
        rungs = climbed(met, max_restarts=0, pod_retries=3)
        assert set(rungs) <= {Rung.IN_PLACE_RESTART, Rung.STOP}
        assert rungs[-1] is Rung.STOP


def test_a_restart_in_place_answers_only_where_the_policy_has_it():
    assert choose(CRASH, in_place=False).rung is Rung.JOB_RESCHEDULE
    assert choose(CHIP, in_place=False).rung is Rung.JOB_RESCHEDULE_ISOLATED
    once = after(CRASH, Rung.IN_PLACE_RESTART)
    assert choose(CRASH, *once, in_place_retries=2).rung is Rung.IN_PLACE_RESTART
    assert choose(CRASH, *once, in_place_retries=1).rung is Rung.JOB_RESCHEDULE


def test_only_what_moves_isolates_and_only_the_node_of_the_fault():
    assert choose(NODE).isolate == NODE.node
    assert choose(NODE, survivors=True).isolate == NODE.node
    spent = (failing(NODE, Rung.JOB_RESCHEDULE_ISOLATED),)
    back = choose(NODE, *spent)
    assert (back.rung, back.isolate) == (Rung.JOB_RESCHEDULE, None)
    nowhere = choose(replace(NODE, node=None))
    assert (nowhere.rung, nowhere.isolate) == (Rung.JOB_RESCHEDULE, None)


def test_a_hang_is_restarted_only_where_the_policy_has_it():
    assert choose(HANG).rung is Rung.HANG_RESTART
    off = choose(HANG, hang=False)
    assert off.rung is Rung.STOP
    assert "hang_restart: switched off" in off.skipped


def test_a_hang_alone_moves_nothing():
    assert climbed(HANG, pod_retries=5) == [*[Rung.HANG_RESTART] * 3, Rung.STOP]
    for history in (after(CRASH, Rung.JOB_RESCHEDULE), (failing(NODE, Rung.POD_RESCHEDULE),)):
        assert choose(HANG, *history).rung is Rung.HANG_RESTART
    chips = replace(HANG, code=CHIP_CODE, device=2)
    assert choose(chips, hang=False).rung is Rung.JOB_RESCHEDULE_ISOLATED


def test_a_pod_is_rescheduled_as_often_as_the_policy_says():
    assert choose(NODE, pod_retries=0).rung is Rung.JOB_RESCHEDULE_ISOLATED
    spent = after(lost_node("node-7"), *[Rung.POD_RESCHEDULE] * 2)
    assert choose(NODE, *spent, pod_retries=3).rung is Rung.POD_RESCHEDULE
    last = choose(NODE, *spent, pod_retries=2)
    assert last.rung is Rung.JOB_RESCHEDULE_ISOLATED
    assert "pod_reschedule: used 2 of 2 in a row" in last.skipped


def test_a_pod_comes_before_the_job_where_pods_may_be_rescheduled():
    assert choose(NODE, pod_retries=1).rung is Rung.POD_RESCHEDULE
    assert choose(NODE, pod_retries=1).isolate == "node-1"
    job = choose(NODE)
    assert job.rung is Rung.JOB_RESCHEDULE_ISOLATED
    assert "pod_reschedule: switched off" in job.skipped


def test_a_memory_error_repeats_its_step_only_where_the_policy_has_it():
    assert choose(UCE, survivors=True).rung is Rung.STEP_RETRY
    assert choose(UCE, survivors=True, collective_retry=False).rung is Rung.STEP_RETRY
    off = choose(UCE, survivors=True, memory_retry=False)
    assert off.rung is Rung.PROCESS_REPLACE
    assert "step_retry: switched off" in off.skipped


def test_a_failed_collective_repeats_its_step_only_where_the_policy_has_it():
    for kind in (WorkerFaultKind.COLLECTIVE, WorkerFaultKind.LINK):
        met = reported(kind)
        assert choose(met, survivors=True, memory_retry=False).rung is Rung.STEP_RETRY
        assert choose(met, survivors=True, collective_retry=False).rung is not Rung.STEP_RETRY


def test_a_process_is_replaced_only_where_the_policy_has_it_and_a_rank_is_to_blame():
    assert choose(CRASH, survivors=True).rung is Rung.PROCESS_REPLACE
    assert choose(CRASH, survivors=True, process_replace=False).rung is Rung.IN_PLACE_RESTART
    nobody = choose(replace(CRASH, rank=None), survivors=True)
    assert nobody.rung is Rung.IN_PLACE_RESTART
    assert "process_replace: no rank is to blame" in nobody.skipped


def test_a_node_or_container_that_is_gone_gets_no_new_process():
    taken = Fault(FaultClass.CONTAINER_LOST, 0.0, "evicted", node="node-0", code="POD_EVICTED")
    for met in (NODE, taken):
        for living in (False, True):
            rungs = climbed(met, survivors=living, pod_retries=2)
            assert set(rungs).isdisjoint({Rung.PROCESS_REPLACE, Rung.IN_PLACE_RESTART})


def test_a_device_that_is_gone_is_trained_on_again_only_where_its_code_allows_it():
    bare = of_log("RuntimeError: Device disconnected", node="node-1")
    assert bare.fault_class is FaultClass.DEVICE_LOST
    assert choose(bare).rung is Rung.JOB_RESCHEDULE_ISOLATED
    assert choose(replace(bare, hardware_fault=False)).rung is Rung.IN_PLACE_RESTART
    heals = replace(bare, device=0, severity=Severity.MINOR)
    assert choose(heals).rung is Rung.IN_PLACE_RESTART


def test_an_operator_retry_answers_broken_links_alone_and_where_it_is_enabled():
    assert choose(LINK, survivors=True).rung is Rung.STEP_RETRY
    assert choose(LINK, survivors=True, operator_retry=True).rung is Rung.OPERATOR_RETRY
    for met in (UCE, CRASH, reported(WorkerFaultKind.COLLECTIVE)):
        assert choose(met, survivors=True, operator_retry=True).rung is not Rung.OPERATOR_RETRY


def test_a_job_that_was_preempted_is_rescheduled_or_stops():
    met = of_log(example_of(FaultClass.PREEMPTED))
    assert met.fault_class is FaultClass.PREEMPTED
    assert choose(met, survivors=True).rung is Rung.JOB_RESCHEDULE
    assert choose(met, unconditional=False).rung is Rung.STOP


@pytest.mark.parametrize("pod_retries", [0, 3])
@pytest.mark.parametrize("times", [0, 1, 4])
def test_a_run_whose_pod_was_preempted_waits_for_room_without_unconditional_restart(
    pod_retries, times
):
    met = Fault(FaultClass.PREEMPTED, 0.0, "Preempted", node="node-1", code=POD_PREEMPTED)
    again = after(met, *[Rung.JOB_RESCHEDULE] * times, progressed=True)
    decision = choose(met, *again, unconditional=False, pod_retries=pod_retries)
    assert decision.rung is Rung.JOB_RESCHEDULE, decision.reason


def test_every_rung_that_was_passed_over_has_its_reason():
    decision = choose(CRASH, *after(CRASH, *[Rung.IN_PLACE_RESTART] * 3))
    assert decision.rung is Rung.JOB_RESCHEDULE
    assert decision.skipped == (
        "process_replace: the processes have ended",
        "in_place_restart: used 3 of 3 in a row",
    )
    memory = choose(UCE, in_place=False)
    passed = LADDER[FaultClass.DEVICE_MEMORY_ERROR][:5]
    assert [text.split(": ")[0] for text in memory.skipped] == list(passed)


def test_a_stop_isolates_and_accepts_nothing():
    for met in (NODE, CHIP, CRASH, UCE, ABNORMAL, HANG):
        decision = choose(met, supported=frozenset(), survivors=True, numeric_retry=True)
        assert decision.rung is Rung.STOP
        assert (decision.isolate, decision.accept_abnormal) == (None, False)
