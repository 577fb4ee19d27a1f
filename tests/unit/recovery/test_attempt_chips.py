"""A chip reports a fault while its process lives: what the coordinator does about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.protocol import AttemptGivenUp
from perdure.training.recovery.repair import StepPhase
from perdure.training.recovery.rungs import Policy, Rung
from perdure.training.recovery.stages import Stage
from perdure.training.recovery.stimuli import ChipFailed
from tests.unit.recovery.attempts import ALONE, DDP, STEP, AttemptHarness
from tests.unit.recovery.ladder_invariants import CHIP_CODE, RESET_CODE, SEPARATE_CODE


def report(harness: AttemptHarness, code: str, *, no_other_node: str | None = None) -> None:
    """Device 1 of node-0, that of rank 1, reports a code."""
    fault = Fault(
        FaultClass.DEVICE_MEMORY_ERROR,
        harness.now_s,
        f"fault_code: {code}",
        node="node-0",
        device=1,
        code=code,
    )
    harness.handle(ChipFailed(fault, no_other_node))
    harness.collect()


def test_the_process_on_a_chip_whose_code_asks_for_a_restart_is_replaced_without_a_step_retry():
    harness = AttemptHarness.of(DDP)
    report(harness, CHIP_CODE)
    (began,) = harness.began()
    assert (began.fault.rank, began.fault.step) == (1, STEP)
    assert began.decision.rung is Rung.PROCESS_REPLACE
    assert harness.replaced() == [1]
    (check,) = harness.checks()
    assert check is not None
    assert (check.code, check.devices) == (CHIP_CODE, (1,))
    harness.answer()
    assert harness.stage() is Stage.TRAINING
    (ended,) = harness.ended()
    assert (ended.succeeded, ended.steps_lost) == (True, 0)


def test_the_state_of_a_process_on_such_a_chip_is_not_trusted():
    harness = AttemptHarness.of(ALONE)
    report(harness, CHIP_CODE)
    assert harness.began() == []
    (end,) = harness.events(AttemptGivenUp)
    assert (end.fault.code, end.fault.device) == (CHIP_CODE, 1)


def test_the_node_of_a_chip_that_is_taken_out_is_replaced_with_all_its_ranks():
    harness = AttemptHarness.of(DDP)
    report(harness, SEPARATE_CODE)
    (began,) = harness.began()
    assert (began.decision.rung, began.moved) == (Rung.NODE_REPLACE, (0, 1))
    assert began.decision.isolate == "node-0"
    assert harness.replaced() == [], "the supervisor starts them on another node"
    assert harness.attempt.memory.ranks.starting == {0, 1}
    for rank in (0, 1):
        harness.start(rank)
    harness.answer()
    assert harness.stage() is Stage.TRAINING


@pytest.mark.parametrize(
    ("code", "policy", "words"),
    [
        (SEPARATE_CODE, Policy(), "node_replace: no room"),
        (SEPARATE_CODE, Policy(node_replace=False), "job_reschedule_isolated"),
        (RESET_CODE, Policy(), f"process_replace: code {RESET_CODE} asks for a reset"),
        (CHIP_CODE, Policy(process_replace=False), "in_place_restart"),
        (CHIP_CODE, Policy(process_in_place=False), "process_replace: process_in_place is off"),
    ],
)
def test_where_nothing_inside_helps_the_others_save_and_the_fault_is_on_record(code, policy, words):
    harness = AttemptHarness.of(DDP, policy=policy)
    report(harness, code, no_other_node="no room")
    (end,) = harness.events(AttemptGivenUp)
    assert (end.fault.code, end.fault.node, end.fault.rank) == (code, "node-0", 1)
    assert words in end.why
    harness.answer()
    assert harness.last_save().step == STEP
    assert harness.stage() is Stage.GIVEN_UP


def test_a_report_while_ranks_recover_or_end_waits_for_its_repetition():
    harness = AttemptHarness.of(DDP)
    harness.kill(3)
    report(harness, CHIP_CODE)
    assert harness.rungs() == [Rung.PROCESS_REPLACE]
    harness.answer()
    report(harness, CHIP_CODE)
    assert harness.replaced() == [3, 1]


def test_a_report_before_all_ranks_train_ends_the_attempt():
    harness = AttemptHarness.of(DDP, is_training=False)
    report(harness, CHIP_CODE)
    assert harness.stage() is Stage.GIVEN_UP
    (end,) = harness.events(AttemptGivenUp)
    assert end.fault.code == CHIP_CODE


def test_a_chip_that_no_rank_computes_on_costs_nothing():
    for is_training in (True, False):
        harness = AttemptHarness.of(DDP, is_training=is_training)
        fault = Fault(FaultClass.DEVICE_MEMORY_ERROR, 0.0, "", device=0, code=SEPARATE_CODE)
        harness.handle(ChipFailed(replace(fault, node="node-7")))
        harness.handle(ChipFailed(replace(fault, node="node-0", device=2)))
        harness.collect()
        assert (harness.began(), harness.given_up()) == ([], [])


def test_ranks_in_the_middle_of_a_step_do_it_again_with_the_new_process():
    harness = AttemptHarness.of(DDP)
    harness.progress_to(STEP, StepPhase.PREPARED)
    report(harness, CHIP_CODE)
    harness.answer()
    assert (harness.stage(), harness.plan().step) == (Stage.TRAINING, STEP)
