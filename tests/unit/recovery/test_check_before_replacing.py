"""The check of a chip before a rank of a living attempt gets a new process: what is ordered."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.training.recovery.faults import USER_CAUSED_CODES, FaultClass
from perdure.training.recovery.healing import (
    Act,
    ActDone,
    HealPlan,
    NextAct,
    check_before_replacing,
    is_healed,
    next_act,
)
from perdure.training.recovery.protocol import (
    AttemptGivenUp,
    RecoveryEnded,
    WorkerFaultKind,
)
from perdure.training.recovery.repair import RepairMode
from perdure.training.recovery.rungs import Policy, Rung
from perdure.training.recovery.stages import Stage
from perdure.training.recovery.stimuli import StepRecorded
from tests.unit.recovery.attempts import HSDP, REPAIR_LIMIT_S, STEP, AttemptHarness
from tests.unit.recovery.diagnosed import of_code, of_exit, of_log, out_of_host_memory, reported

CODE = "80E01801"  # uncorrectable errors of HBM; level RestartBusiness
RESET_NOW = "80E18404"
BEYOND: dict[str, Any] = {"exit_code": 1, "error": "DeviceBeyondHealing: not recoverable"}
ILL = ActDone(Act.CHECK, is_good=False, seen="device 1: Alarm", codes=(RESET_NOW,))
WELL = ActDone(Act.CHECK, is_good=True, seen="computes right")
AT_RANK_1 = HealPlan(None, (1,), may_reset=False, wait_s=0.0)


@pytest.mark.parametrize("code", [CODE, RESET_NOW])
def test_a_fault_of_a_chip_is_checked_for_at_its_place(code):
    plan = check_before_replacing(of_code(code, device=2))
    assert plan == HealPlan(code, (2,), may_reset=False, wait_s=0.0)


def test_damaged_memory_without_a_code_has_its_device_checked():
    plan = check_before_replacing(reported(WorkerFaultKind.MEMORY, rank=2))
    assert plan == HealPlan(None, (2,), may_reset=False, wait_s=0.0)


@pytest.mark.parametrize(
    "fault",
    [
        of_exit(-9),
        of_exit(-11),
        of_log("ValueError: own"),
        out_of_host_memory(),
        reported(WorkerFaultKind.COLLECTIVE),
        reported(WorkerFaultKind.NUMERIC, culprit=2),
        *(of_code(code) for code in sorted(USER_CAUSED_CODES)),
    ],
    ids=lambda fault: fault.code or fault.fault_class.value,
)
def test_what_software_did_costs_no_check(fault):
    assert check_before_replacing(fault) is None


@pytest.mark.parametrize("code", [CODE, RESET_NOW, None])
@pytest.mark.parametrize("found", [ILL, WELL], ids=["ill", "well"])
def test_the_check_is_all_that_is_done_and_does_not_wait(code, found):
    plan = HealPlan(code, (1,), may_reset=False, wait_s=0.0)
    assert next_act(plan, []) == NextAct(Act.CHECK, 0.0)
    assert next_act(plan, [found]) is None
    assert is_healed([found]) is found.is_good


# In an attempt.


def test_the_order_to_replace_a_process_that_its_chip_ended_has_the_plan():
    harness = AttemptHarness.of()
    harness.kill(1, **BEYOND)
    (began,) = harness.began()
    assert began.fault.fault_class is FaultClass.DEVICE_MEMORY_ERROR
    assert harness.rungs() == [Rung.PROCESS_REPLACE]
    assert harness.checks() == [AT_RANK_1]


def test_the_order_to_replace_a_process_that_lives_on_an_ill_chip_has_the_plan_and_its_code():
    harness = AttemptHarness.of(policy=Policy(memory_retry=False))
    harness.worker_fault(1, WorkerFaultKind.MEMORY, code=CODE)
    assert harness.rungs() == [Rung.PROCESS_REPLACE]
    assert harness.checks() == [HealPlan(CODE, (1,), may_reset=False, wait_s=0.0)]


@pytest.mark.parametrize(
    "end",
    [{}, {"exit_code": -11}, {"is_oom": True}, {"exit_code": 75}],
    ids=["killed", "crashed", "out of memory", "lost its connection"],
)
def test_a_process_that_software_ended_is_replaced_without_a_check(end):
    harness = AttemptHarness.of()
    harness.kill(1, **end)
    assert harness.rungs() == [Rung.PROCESS_REPLACE]
    assert harness.checks() == [None]


def test_a_job_that_does_not_want_its_chips_checked_has_processes_replaced_at_once():
    harness = AttemptHarness.of(checks_chips=False)
    harness.kill(1, **BEYOND)
    assert harness.rungs() == [Rung.PROCESS_REPLACE]
    assert harness.checks() == [None]


def test_a_process_on_a_chip_that_is_well_trains_like_any_other(sharded):
    sharded.kill(1, **BEYOND)
    sharded.answer()
    assert sharded.stage() is Stage.TRAINING
    assert [event.succeeded for event in sharded.ended()] == [True]


def test_a_check_is_owed_until_the_new_process_is_there():
    harness = AttemptHarness.of()
    harness.kill(1, **BEYOND)
    harness.kill(2)
    harness.answer(silent={1})
    harness.advance(REPAIR_LIMIT_S + 1)  # the place is asked for again, for what rank 2 died of
    assert [rank for rank in harness.replaced() if rank == 1] == [1, 1]
    assert [plan for plan in harness.checks() if plan is not None] == [AT_RANK_1, AT_RANK_1]


def test_a_rank_that_was_replaced_once_after_a_check_has_none_for_what_software_does_then():
    harness = AttemptHarness.of()
    harness.kill(1, **BEYOND)
    harness.answer()
    harness.handle(StepRecorded(STEP + 1))
    harness.kill(1)
    assert harness.checks() == [AT_RANK_1, None]


def test_a_failed_check_is_a_failed_recovery_and_the_survivors_save_before_the_next_rung():
    harness = AttemptHarness.of(HSDP)
    harness.kill(1, **BEYOND)
    harness.now_s += 2.0
    harness.answer(silent={1})
    harness.not_replaced(1)
    harness.answer()
    (ended,) = harness.events(RecoveryEnded)
    assert (ended.succeeded, ended.cut_short, ended.duration_s) == (False, False, 2.0)
    assert ended.why == "rank 1 is not replaced: device 1: Alarm"
    (given_up,) = harness.events(AttemptGivenUp)
    assert given_up.fault.fault_class is FaultClass.DEVICE_MEMORY_ERROR
    assert (given_up.fault.node, given_up.fault.device) == ("node-0", 1)
    assert "in_place_restart (" in given_up.why
    assert "process_replace: the last one failed" in given_up.why
    assert harness.plan().mode is RepairMode.LAST_SAVE
    assert harness.last_save().step == STEP
    assert harness.stage() is Stage.GIVEN_UP


def test_of_two_ranks_that_are_replaced_the_one_that_cannot_be_is_the_one_that_failed():
    harness = AttemptHarness.of(HSDP)
    harness.kill(1, **BEYOND)
    harness.kill(2)
    harness.answer(silent={1})
    harness.not_replaced(1)
    ended = {event.replaced: event.cut_short for event in harness.ended()}
    assert ended == {(1,): False, (2,): True}
    failed = [past.fault.rank for past in harness.attempt.decider.past if past.failed]
    assert failed == [1]
    (given_up,) = harness.events(AttemptGivenUp)
    assert given_up.fault.rank == 1
    assert harness.replaced() == [1, 2], "and is not started without a check"


def test_a_check_that_fails_while_the_survivors_save_changes_nothing():
    harness = AttemptHarness.of(HSDP)
    harness.kill(1, **BEYOND)
    harness.kill(2, exit_code=1)  # an exception of its own ends the attempt
    assert harness.attempt.generation == 3
    harness.not_replaced(1)
    harness.answer()
    assert len(harness.events(AttemptGivenUp)) == 1
    assert harness.last_save().step == STEP
    assert harness.stage() is Stage.GIVEN_UP
