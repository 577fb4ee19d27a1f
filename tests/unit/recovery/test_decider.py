"""What answers the end of a worker, and what a living one reports."""

from __future__ import annotations

import pytest

from perdure.training.diagnosis.exits import EXIT_ABOVE_PROCESS, EXIT_RESTART_ME, fault_of_end
from perdure.training.recovery.faults import FaultClass
from perdure.training.recovery.ladder import (
    CLASS_OF,
    InProcessDecider,
    device_of,
    fault_of_report,
)
from perdure.training.recovery.protocol import WorkerEnded, WorkerFault, WorkerFaultKind
from perdure.training.recovery.rungs import Policy, Recovery, Rung

NODES = {0: "node-0", 2: "node-1"}
REPLACE, STOP, IN_PLACE = Rung.PROCESS_REPLACE, Rung.STOP, Rung.IN_PLACE_RESTART


def ended(exit_code: int, *, error: str | None = None, is_oom: bool = False) -> WorkerEnded:
    return WorkerEnded(
        rank=2, device=0, exit_code=exit_code, error=error, is_oom=is_oom, at_s=100.0
    )


@pytest.mark.parametrize(
    ("end", "fault_class", "rung"),
    [
        (ended(-9), FaultClass.NATIVE_CRASH, REPLACE),
        (ended(-11), FaultClass.NATIVE_CRASH, REPLACE),
        (ended(-9, is_oom=True), FaultClass.HOST_OOM, REPLACE),
        (ended(EXIT_RESTART_ME), FaultClass.COLLECTIVE_TIMEOUT, REPLACE),
        (ended(-15), FaultClass.PREEMPTED, Rung.JOB_RESCHEDULE),
        (ended(127), FaultClass.LAUNCH_MISCONFIGURED, STOP),
        (ended(1, error="DeviceBeyondHealing: check_uce_in_memory gives 4"),
         FaultClass.DEVICE_MEMORY_ERROR, REPLACE),
        (ended(1, error="TypeError: no"), FaultClass.USER_CODE_ERROR, STOP),
        (ended(1, error="ValueError: no"), FaultClass.UNKNOWN, IN_PLACE),
        (ended(EXIT_ABOVE_PROCESS), FaultClass.DEVICE_LOST, Rung.NODE_REPLACE),
    ],
    ids=["killed", "crashed", "oom", "lost its connection", "terminated", "no command",
         "beyond healing", "exception", "unknown exception", "above"],
)  # fmt: skip
def test_a_process_that_ended_is_replaced_unless_the_program_or_the_container_is_to_blame(
    end, fault_class, rung
):
    fault = fault_of_end(end, node="node-1", step=7)
    assert (fault.fault_class, fault.rank, fault.step) == (fault_class, 2, 7)
    decider = InProcessDecider(Policy(operator_retry=True), frozenset(Rung))
    assert decider.decide(fault, now_s=101.0, is_dead=True).rung is rung


def test_a_checkpoint_makes_free_recoveries_before_it():
    decider = InProcessDecider(Policy(), frozenset(Rung))
    for step in range(3):
        fault = fault_of_end(ended(-9), node="node-1", step=step)
        assert decider.decide(fault, now_s=101.0, is_dead=True).rung is REPLACE
        decider.began(fault, REPLACE)
    fourth = fault_of_end(ended(-9), node="node-1", step=3)
    assert decider.decide(fourth, now_s=101.0, is_dead=True).rung is IN_PLACE
    decider.committed(4)
    assert decider.decide(fourth, now_s=103.0, is_dead=True).rung is REPLACE


def test_every_worker_fault_has_a_class_that_a_living_process_may_answer():
    assert set(CLASS_OF) == set(WorkerFaultKind)
    decider = InProcessDecider(Policy(operator_retry=True, numeric_retry=True), frozenset(Rung))
    for kind in WorkerFaultKind:
        report = WorkerFault(generation=1, kind=kind, text="x", step=7, at_s=100.0)
        fault = fault_of_report(report, reported_by=2, nodes=NODES)
        decided = decider.decide(fault, now_s=101.0).rung
        assert decided in (Rung.OPERATOR_RETRY, Rung.STEP_RETRY)


def test_the_fault_of_a_report_is_what_its_rank_reported():
    report = WorkerFault(
        generation=3, kind=WorkerFaultKind.MEMORY, text="UCE", step=7, at_s=100.0, code="507053"
    )
    fault = fault_of_report(report, reported_by=2, nodes=NODES)
    assert (fault.fault_class, fault.evidence) == (FaultClass.DEVICE_MEMORY_ERROR, "UCE")
    assert (fault.rank, fault.node, fault.device) == (2, "node-1", 0)
    assert (fault.code, fault.step, fault.at_s) == ("507053", 7, 100.0)


def test_the_end_of_a_process_shows_its_error_or_how_it_was_ended():
    fault = fault_of_end(ended(1, error="ValueError: no"), node="node-1", step=7)
    assert fault.evidence == "rank 2: ValueError: no"
    assert fault_of_end(ended(-9), node=None, step=7).evidence == "rank 2: killed by signal 9"
    assert fault_of_end(ended(3), node=None, step=7).evidence == "rank 2: exit code 3"


def test_an_abnormal_step_is_about_the_rank_that_made_it_alone():
    report = WorkerFault(generation=1, kind=WorkerFaultKind.NUMERIC, text="x", step=7, at_s=100.0)
    assert fault_of_report(report, reported_by=2, nodes=NODES).rank is None
    made = report.model_copy(update={"culprit": 0})
    assert fault_of_report(made, reported_by=2, nodes=NODES).rank == 0
    for kind in set(WorkerFaultKind) - {WorkerFaultKind.NUMERIC}:
        other = report.model_copy(update={"kind": kind, "culprit": 0})
        assert fault_of_report(other, reported_by=2, nodes=NODES).rank == 2


def test_a_checkpoint_of_a_step_from_before_the_fault_frees_nothing():
    decider = InProcessDecider(Policy(), frozenset(Rung))
    fault = fault_of_end(ended(-9), node="node-1", step=7)
    decider.began(fault, REPLACE)
    decider.committed(7)
    assert decider.decide(fault, now_s=101.0).rung is IN_PLACE


def test_any_checkpoint_is_new_to_recoveries_of_other_attempts():
    fault = fault_of_end(ended(-9), node="node-1", step=700)
    decider = InProcessDecider(
        Policy(), frozenset(Rung), [Recovery(fault, IN_PLACE, progressed=False)]
    )
    assert decider.decide(fault, now_s=101.0).rung is not REPLACE
    decider.committed(4)
    assert decider.decide(fault, now_s=101.0).rung is REPLACE


def test_a_device_is_the_place_of_a_rank_among_those_of_its_node():
    nodes = {0: "a", 2: "a", 1: "b", 3: "b"}
    assert [device_of(rank, nodes) for rank in range(4)] == [0, 0, 1, 1]
    assert device_of(9, nodes) is None
    assert device_of(None, nodes) is None
