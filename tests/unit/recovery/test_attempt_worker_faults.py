"""The life of an attempt: reconnecting, damaged memory and abnormal steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from perdure.training.recovery.actions import AbnormalNorm
from perdure.training.recovery.protocol import (
    NewGeneration,
    Reconnect,
    Reconnected,
    WorkerFaultKind,
)
from perdure.training.recovery.ranks import END_NOTICE_S
from perdure.training.recovery.reactions import CONNECTION_SETTLE_S
from perdure.training.recovery.repair import Move, RepairMode, StepPhase
from perdure.training.recovery.rungs import Policy, Rung
from perdure.training.recovery.stages import Stage
from perdure.training.recovery.stimuli import ConnectionsRestored, RankDisconnected, StepRecorded
from tests.unit.recovery.attempts import (
    ALONE,
    HSDP,
    RECONNECT_LIMIT_S,
    REPAIR_LIMIT_S,
    STEP,
    AttemptHarness,
    is_plan,
)

# Operator retry.

RETRY = Policy(operator_retry=True)


def broken_connection(harness: AttemptHarness) -> None:
    """A connection is broken under operations that can be run again."""
    harness.worker_fault(2, WorkerFaultKind.CONNECTION, connection=0)
    harness.advance(CONNECTION_SETTLE_S)


@pytest.fixture
def reconnecting() -> AttemptHarness:
    harness = AttemptHarness.of(policy=RETRY)
    broken_connection(harness)
    return harness


def test_connections_are_re_established_in_the_same_generation_where_operations_can_be_run_again(
    reconnecting,
):
    assert reconnecting.stage() is Stage.RECONNECTING
    assert reconnecting.sent_to(0) == [Reconnect(generation=1, connection=1)]
    assert reconnecting.began()[0].decision.sub_healthy
    reconnecting.answer()
    (ended,) = reconnecting.ended()
    assert ended.succeeded
    assert (ended.generation, ended.replaced, ended.steps_lost) == (1, (), 0)
    assert (reconnecting.stage(), reconnecting.attempt.generation) == (Stage.TRAINING, 1)


def test_a_break_of_connections_that_were_re_established_since_is_ignored(reconnecting):
    broken_connection(reconnecting)
    reconnecting.answer()
    assert reconnecting.rungs() == [Rung.OPERATOR_RETRY]


def test_connections_that_cannot_be_re_established_climb_to_a_new_generation(reconnecting):
    report = Reconnected(generation=1, connection=1, problem="no route")
    reconnecting.handle(ConnectionsRestored(0, report))
    reconnecting.answer()
    assert reconnecting.rungs() == [Rung.OPERATOR_RETRY, Rung.STEP_RETRY]
    assert [event.succeeded for event in reconnecting.ended()] == [False, True]
    assert reconnecting.ended()[0].why == "rank 0: no route"


def test_connections_that_are_not_re_established_in_time_climb_to_a_new_generation(reconnecting):
    reconnecting.answer(silent={1, 3})
    assert reconnecting.advance(RECONNECT_LIMIT_S) == []
    reconnecting.advance(0.1)
    assert reconnecting.ended()[0].why == "ranks [1, 3] have no connections after 10 s"
    assert reconnecting.stage() is Stage.GATHERING


def test_reports_of_other_connections_do_not_count(reconnecting):
    for generation, connection in ((1, 0), (1, 2), (0, 1), (2, 1)):
        for rank in range(4):
            report = Reconnected(generation=generation, connection=connection)
            reconnecting.handle(ConnectionsRestored(rank, report))
    assert reconnecting.stage() is Stage.RECONNECTING


def test_connections_that_break_again_are_re_established_by_all_again(reconnecting):
    reconnecting.answer()
    reconnecting.handle(StepRecorded(STEP + 1))
    reconnecting.worker_fault(2, WorkerFaultKind.CONNECTION, connection=1)
    reconnecting.advance(CONNECTION_SETTLE_S)
    assert reconnecting.sent_to(0)[-1] == Reconnect(generation=1, connection=2)
    report = Reconnected(generation=1, connection=2)
    reconnecting.handle(ConnectionsRestored(0, report))
    assert reconnecting.stage() is Stage.RECONNECTING
    reconnecting.answer()
    assert reconnecting.stage() is Stage.TRAINING


def test_connections_of_a_new_generation_are_counted_from_the_beginning(reconnecting):
    reconnecting.answer()
    reconnecting.worker_fault(2, WorkerFaultKind.COLLECTIVE)
    reconnecting.answer()
    reconnecting.handle(StepRecorded(STEP + 1))
    broken_connection(reconnecting)
    assert reconnecting.sent_to(0)[-1] == Reconnect(generation=2, connection=1)


def test_a_death_while_ranks_reconnect_is_answered(reconnecting):
    reconnecting.kill(1)
    reconnecting.answer()
    assert reconnecting.rungs() == [Rung.OPERATOR_RETRY, Rung.PROCESS_REPLACE]
    assert reconnecting.stage() is Stage.TRAINING


@pytest.fixture
def broken_twice() -> AttemptHarness:
    """Rank 3 ends; before it has the state of another, a connection of those that train breaks."""
    harness = AttemptHarness.of(policy=RETRY)
    harness.kill(3)
    harness.answer(until=is_plan)
    for rank in range(3):
        harness.trains(rank)
    harness.skip_unanswered()
    broken_connection(harness)
    return harness


def reconnects(harness: AttemptHarness) -> None:
    """All ranks have re-established their connections."""
    generation, connection = harness.attempt.generation, harness.attempt.memory.round.connection
    report = Reconnected(generation=generation, connection=connection, operations=1)
    for rank in range(4):
        harness.handle(ConnectionsRestored(rank, report))
    harness.collect()


def test_reconnecting_in_the_middle_of_a_repair_do_not_end_it(broken_twice):
    assert broken_twice.stage() is Stage.RECONNECTING
    reconnects(broken_twice)
    assert (broken_twice.stage(), broken_twice.ended()) == (Stage.REPAIRING, [])
    broken_twice.advance(7.0)
    broken_twice.trains(3)
    broken_twice.collect()
    assert broken_twice.stage() is Stage.TRAINING
    assert [(event.step, event.succeeded) for event in broken_twice.ended()] == [(STEP, True)] * 2
    assert [event.replaced for event in broken_twice.ended()] == [(3,), ()]
    assert all(event.duration_s >= 7.0 for event in broken_twice.ended())


def test_a_repair_that_is_done_while_ranks_reconnect_ends_with_the_last_of_them(broken_twice):
    broken_twice.trains(3)
    assert (broken_twice.stage(), broken_twice.ended()) == (Stage.RECONNECTING, [])
    assert broken_twice.attempt.has_deadline, "reconnecting has a limit whichever ranks train"
    reconnects(broken_twice)
    assert broken_twice.stage() is Stage.TRAINING
    assert [event.succeeded for event in broken_twice.ended()] == [True, True]


def test_a_repair_that_goes_on_after_reconnecting_has_its_limit_again(broken_twice):
    reconnects(broken_twice)
    broken_twice.advance(REPAIR_LIMIT_S + 0.1)
    assert broken_twice.ended()[0].why == "ranks [3] did not come within 30 s"


def test_connections_that_break_before_there_is_a_plan_begin_another_generation():
    harness = AttemptHarness.of(policy=RETRY)
    harness.worker_fault(2, WorkerFaultKind.COLLECTIVE)
    assert harness.stage() is Stage.GATHERING
    broken_connection(harness)
    assert harness.rungs() == [Rung.STEP_RETRY, Rung.STEP_RETRY]


# A rank's memory.


def test_a_damaged_rank_gets_its_state_from_a_replica(sharded):
    sharded.memory_fault(0)
    sharded.answer()
    (ended,) = sharded.ended()
    assert (ended.succeeded, ended.replaced, ended.repaired) == (True, (), (0,))
    assert (sharded.rungs(), sharded.replaced()) == ([Rung.STEP_RETRY], [])


def test_damage_that_comes_back_at_the_same_step_costs_the_process_then_the_attempt(sharded):
    sharded.memory_fault(0)
    sharded.answer()
    sharded.memory_fault(0)
    assert sharded.rungs() == [Rung.STEP_RETRY, Rung.PROCESS_REPLACE]
    assert sharded.replaced() == [0]
    assert NewGeneration(number=3) not in sharded.sent_to(0), "the process before is to end"
    sharded.handle(RankDisconnected(0))  # its agent has ended it
    assert sharded.advance(END_NOTICE_S * 2) == []
    sharded.answer()
    assert sharded.stage() is Stage.TRAINING
    sharded.memory_fault(0)
    sharded.answer()
    assert len(sharded.rungs()) == 2
    assert (sharded.last_save().step, sharded.last_save().ranks) == (STEP, (1, 2))


# Abnormal steps.

TRE = Policy(numeric_retry=True)


def abnormal(harness: AttemptHarness, **changes: Any) -> None:
    """Every rank finds the same step abnormal."""
    generation = harness.attempt.generation
    for rank in range(4):
        harness.worker_fault(
            rank, WorkerFaultKind.NUMERIC, step=STEP, generation=generation, **changes
        )


@pytest.fixture
def rolling_back() -> AttemptHarness:
    """All ranks have found a step abnormal."""
    harness = AttemptHarness.of(policy=TRE)
    abnormal(harness)
    return harness


def test_an_abnormal_step_is_done_again_then_accepted_and_recorded_and_never_retried_a_third_time():
    harness = AttemptHarness.of(policy=TRE)
    abnormal(harness, grad_norm=900.0)
    harness.answer()
    assert (harness.plan().mode, harness.plan().step) == (RepairMode.ROLL_BACK, STEP - 2)
    assert harness.ended()[0].steps_lost == 2
    assert harness.attempt.step == STEP - 2
    accept_second_time(harness, grad_norm=901.0)
    assert harness.plan().mode is RepairMode.ACCEPT
    assert (harness.plan().step, harness.plan().applies) == (STEP + 1, (0, 1, 2, 3))
    assert [note.decision.accept_abnormal for note in harness.began()] == [False, True]
    recorded = [action for action in harness.actions if isinstance(action, AbnormalNorm)]
    assert recorded == [
        AbnormalNorm(STEP + 1, (900.0,)),
        AbnormalNorm(STEP + 1, (900.0, 901.0)),
    ]
    abnormal(harness)
    assert harness.stage() is Stage.GIVEN_UP
    assert "was accepted already" in harness.given_up()[0]


def accept_second_time(harness: AttemptHarness, **changes) -> None:
    harness.progress_to(STEP, StepPhase.PREPARED)
    abnormal(harness, **changes)
    harness.answer()


def test_a_step_that_is_not_finite_is_never_accepted():
    harness = AttemptHarness.of(policy=TRE)
    abnormal(harness, is_finite=False)
    harness.answer()
    assert harness.rungs() == [Rung.STEP_RETRY]
    abnormal(harness, is_finite=False)
    assert harness.stage() is Stage.GIVEN_UP
    assert harness.rungs() == [Rung.STEP_RETRY]
    assert "step_retry: the last one failed" in harness.given_up()[0]


def without_snapshot(harness: AttemptHarness, rank: int) -> None:
    own = harness.ranks[rank]
    own.report = own.report.model_copy(update={"snapshot_step": None})


def test_ranks_without_a_common_snapshot_do_not_roll_back():
    harness = AttemptHarness.of(ALONE, policy=TRE)
    without_snapshot(harness, 1)
    abnormal(harness)
    harness.answer()
    assert harness.ended()[0].why == "the ranks have no snapshot of one step"
    assert harness.stage() is Stage.GIVEN_UP


def test_a_rank_without_the_snapshot_gets_it_from_its_replica():
    harness = AttemptHarness.of(HSDP, policy=TRE)
    without_snapshot(harness, 1)
    abnormal(harness)
    harness.answer()
    (ended,) = harness.ended()
    assert (ended.succeeded, ended.repaired, ended.step) == (True, (1,), STEP - 2)


def test_a_loss_that_is_no_number_twice_costs_the_process_that_made_it():
    harness = AttemptHarness.of(HSDP, policy=TRE)
    for _ in range(2):
        abnormal(harness, is_finite=False, culprit=2)
        harness.answer()
    assert harness.rungs() == [Rung.STEP_RETRY, Rung.PROCESS_REPLACE]
    assert harness.began()[1].fault.rank == 2
    assert (harness.replaced(), harness.stage()) == ([2], Stage.TRAINING)
    assert (harness.plan().mode, harness.plan().step) == (RepairMode.ROLL_BACK, STEP - 2)
    assert harness.plan().moves == (Move(source=0, target=2),)
    abnormal(harness, is_finite=False, culprit=2)
    assert harness.stage() is Stage.GIVEN_UP


# Abnormal steps whose recovery another fault cuts short.


def collective_fails(harness: AttemptHarness) -> None:
    harness.worker_fault(1, WorkerFaultKind.COLLECTIVE, step=STEP)


def rank_ends(harness: AttemptHarness) -> None:
    harness.kill(2)


def cut_short(
    harness: AttemptHarness, stage: Stage, fault: Callable[[AttemptHarness], None]
) -> None:
    """A fault comes before all ranks have reported, or have done what was planned."""
    if stage is Stage.GATHERING:
        harness.answer(silent={3})
    else:
        harness.answer(until=is_plan)
        harness.ranks[0].carry_out(harness.plan())
    assert harness.stage() is stage
    harness.skip_unanswered()
    fault(harness)
    harness.answer()


CUTS = pytest.mark.parametrize(
    ("stage", "fault"),
    [
        (stage, fault)
        for stage in (Stage.GATHERING, Stage.REPAIRING)
        for fault in (collective_fails, rank_ends)
    ],
)


@CUTS
def test_a_roll_back_that_another_fault_cuts_short_is_carried_out_by_all_ranks_and_counts_once(
    rolling_back, stage, fault
):
    cut_short(rolling_back, stage, fault)
    assert (rolling_back.plan().mode, rolling_back.plan().step) == (RepairMode.ROLL_BACK, STEP - 2)
    moves = (Move(source=0, target=2),) if fault is rank_ends else ()
    assert (rolling_back.plan().rolls_back, rolling_back.plan().moves) == (True, moves)
    assert rolling_back.stage() is Stage.TRAINING
    assert [(event.succeeded, event.cut_short) for event in rolling_back.ended()] == [
        (True, False)
    ] * 2


@CUTS
def test_an_acceptance_that_another_fault_cuts_short_is_carried_out_by_all_ranks(
    rolling_back, stage, fault
):
    rolling_back.answer()
    rolling_back.progress_to(STEP, StepPhase.PREPARED)
    abnormal(rolling_back)
    cut_short(rolling_back, stage, fault)
    assert (rolling_back.plan().mode, rolling_back.plan().step) == (RepairMode.ACCEPT, STEP + 1)
    assert rolling_back.stage() is Stage.TRAINING
    assert [rank.report.step for rank in rolling_back.ranks.values()] == [STEP + 1] * 4


@CUTS
def test_what_comes_after_a_roll_back_is_recovered_where_it_is(rolling_back, stage, fault):
    cut_short(rolling_back, stage, fault)
    rolling_back.progress_to(STEP + 1, StepPhase.RUN)
    rolling_back.handle(StepRecorded(STEP + 1))
    rolling_back.kill(3)
    rolling_back.answer()
    assert (rolling_back.plan().mode, rolling_back.plan().step) == (RepairMode.TRAIN, STEP + 1)


def test_a_step_that_comes_out_abnormal_proves_that_all_ranks_train(rolling_back):
    rolling_back.answer(until=is_plan)
    for rank in range(3):  # the word of the last one takes longer
        rolling_back.trains(rank, step=STEP - 2)
    rolling_back.progress_to(STEP, StepPhase.PREPARED)
    rolling_back.skip_unanswered()
    abnormal(rolling_back)
    rolling_back.answer()
    assert (rolling_back.plan().mode, rolling_back.plan().step) == (RepairMode.ACCEPT, STEP + 1)
    assert rolling_back.stage() is Stage.TRAINING


def test_a_roll_back_that_comes_to_nothing_leaves_nothing_to_save_and_was_not_tried():
    harness = AttemptHarness.of(HSDP, policy=TRE)
    abnormal(harness)
    harness.answer(silent={3})
    harness.kill(0)
    harness.kill(2)
    harness.answer()
    assert harness.stage() is Stage.GIVEN_UP
    assert harness.last_save().why == "the ranks were going back to a snapshot"
    ended = [(event.succeeded, event.cut_short) for event in harness.ended()]
    assert ended == [(False, True), (False, False)]


def test_a_rank_that_has_left_its_step_needs_a_generation_and_no_new_connections():
    harness = AttemptHarness.of(policy=RETRY)
    harness.worker_fault(2, WorkerFaultKind.CONNECTION)
    harness.advance(CONNECTION_SETTLE_S)
    assert harness.rungs() == [Rung.STEP_RETRY]


def test_one_rank_that_has_left_its_step_has_all_get_a_new_generation():
    harness = AttemptHarness.of(policy=RETRY)
    harness.worker_fault(2, WorkerFaultKind.CONNECTION, connection=0)
    harness.worker_fault(1, WorkerFaultKind.CONNECTION)
    harness.advance(CONNECTION_SETTLE_S)
    assert harness.rungs() == [Rung.STEP_RETRY]


def test_a_rank_that_leaves_its_step_while_ranks_reconnect_is_not_left_waiting(reconnecting):
    assert reconnecting.stage() is Stage.RECONNECTING
    reconnecting.worker_fault(1, WorkerFaultKind.CONNECTION)
    reconnecting.advance(CONNECTION_SETTLE_S)
    assert isinstance(reconnecting.sent_to(1)[-1], NewGeneration)
