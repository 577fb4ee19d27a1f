"""The life of an attempt, events in and actions out: recoveries while it lives."""

from __future__ import annotations

import pytest

from perdure.training.recovery.actions import LogEvent, ToAgent, ToRank
from perdure.training.recovery.faults import FaultClass
from perdure.training.recovery.protocol import NewGeneration, Plan, ReplaceWorker, WorkerFaultKind
from perdure.training.recovery.ranks import END_NOTICE_S
from perdure.training.recovery.reactions import CONNECTION_SETTLE_S
from perdure.training.recovery.repair import Move, RankReport, StepPhase
from perdure.training.recovery.replicas import ParallelLayout, RankOrder
from perdure.training.recovery.rungs import Rung
from perdure.training.recovery.stages import Stage
from perdure.training.recovery.stimuli import StateReported, StepCommitted, StepRecorded
from tests.unit.recovery.attempts import (
    ALONE,
    DDP,
    HSDP,
    REPAIR_LIMIT_S,
    STEP,
    AttemptHarness,
    is_plan,
)


def test_training_begins_when_the_last_rank_trains():
    harness = AttemptHarness.of(is_training=False)
    for rank in (0, 1, 2):
        harness.trains(rank)
        assert harness.stage() is Stage.STARTING
    harness.trains(3, step=12)
    assert (harness.stage(), harness.attempt.step) == (Stage.TRAINING, 12)


def test_a_rank_that_joins_receives_the_generation():
    harness = AttemptHarness.of(is_training=False)
    assert harness.collect() == [ToRank(rank, NewGeneration(number=1)) for rank in range(4)]


# A layout that the program knows only when it trains.


@pytest.mark.parametrize(
    ("layout", "replica"),
    [
        (ParallelLayout(dp=4), 0),
        (ParallelLayout(dp=2, tp=2), 3),
        (ParallelLayout(dp=2, pp=2), 0),
        (ParallelLayout(dp=4, optimizer_shards=2), 3),
        (ParallelLayout(dp=2, pp=2, order=RankOrder.DP_LAST), 3),
    ],
)
def test_a_dead_rank_has_its_state_from_a_replica_of_the_layout_that_its_program_reports(
    layout, replica
):
    harness = AttemptHarness.of(ALONE, is_training=False)
    for rank in range(4):
        harness.trains(rank, layout=layout)
    harness.kill(1)
    harness.answer()
    assert harness.plan().moves == (Move(source=replica, target=1),)


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(tp=4),
        ParallelLayout(tp=2, pp=2),
        ParallelLayout(dp=4, optimizer_shards=4),
        ParallelLayout(dp=2, tp=2, optimizer_shards=2),
    ],
)
def test_a_rank_is_not_replaced_where_the_layout_that_its_program_reports_has_one_copy(layout):
    harness = AttemptHarness.of(DDP, is_training=False)
    for rank in range(4):
        harness.trains(rank, layout=layout)
    harness.kill(1)
    harness.answer()
    assert harness.replaced() == []
    assert "no replica: no other rank has the state of rank 1" in harness.given_up()[0]


def test_a_layout_of_an_earlier_generation_changes_nothing():
    harness = AttemptHarness.of(DDP)
    harness.trains(1, generation=0, layout=ParallelLayout(tp=4))
    harness.kill(1)
    harness.answer()
    assert harness.plan().moves == (Move(source=0, target=1),)


# A process that died.


def test_a_death_is_recorded_then_the_rank_replaced_and_the_others_called_to_a_new_generation(
    harness,
):
    event, *rest = harness.kill(1)
    assert isinstance(event, LogEvent)
    assert (harness.began()[0].decision.rung, harness.began()[0].generation) == (
        Rung.PROCESS_REPLACE,
        1,
    )
    fault = harness.began()[0].fault
    assert (fault.fault_class, fault.rank, fault.node) == (FaultClass.NATIVE_CRASH, 1, "node-0")
    assert fault.step == STEP
    assert rest == [
        ToAgent(1, ReplaceWorker(rank=1, generation=2)),
        *(ToRank(rank, NewGeneration(number=2)) for rank in (0, 2, 3)),
    ]


def test_a_death_is_recovered_when_every_rank_trains_in_the_new_generation(sharded):
    sharded.kill(1)
    sharded.now_s += 0.5
    sharded.answer()
    assert sharded.plan().moves == (Move(source=3, target=1),)
    (ended,) = sharded.ended()
    assert ended.succeeded
    assert (ended.number, ended.generation, ended.step) == (1, 2, STEP)
    assert (ended.replaced, ended.repaired, ended.duration_s) == ((1,), (), 0.5)
    assert (sharded.stage(), sharded.attempt.generation) == (Stage.TRAINING, 2)


def test_a_plan_waits_for_the_new_process(harness):
    harness.kill(1)
    harness.answer(silent={1})
    assert not any(isinstance(message, Plan) for message in harness.sent_to(0))
    harness.start(1)
    harness.answer()
    assert harness.stage() is Stage.TRAINING


def test_a_connection_that_closes_is_no_death_until_the_agent_reports_it_or_the_notice_is_over(
    harness,
):
    assert harness.kill(1, is_reported=False) == []
    assert harness.advance(END_NOTICE_S) == []
    harness.advance(0.1)
    (began,) = harness.began()
    assert (began.fault.rank, began.decision.rung) == (1, Rung.PROCESS_REPLACE)
    assert "its agent did not report how it ended" in began.fault.evidence
    assert harness.replaced() == [1]


def test_two_deaths_at_once_are_recovered_together(sharded):
    sharded.kill(1)
    sharded.kill(2)
    assert sharded.replaced() == [1, 2]
    sharded.answer()
    first, second = sharded.ended()
    assert (first.number, second.number) == (1, 2)
    assert (first.replaced, second.replaced) == ((1,), (2,))
    assert (first.generation, second.generation) == (3, 3)
    assert set(sharded.plan().moves) == {Move(source=3, target=1), Move(source=0, target=2)}


def test_a_rank_that_one_recovery_replaced_is_not_called_repaired_by_another(sharded):
    sharded.kill(1)
    sharded.memory_fault(2)
    sharded.answer()
    replaced, repaired = sharded.ended()
    assert (replaced.replaced, replaced.repaired) == ((1,), (2,))
    assert (repaired.replaced, repaired.repaired) == ((), (2,))


def test_a_new_process_that_ends_before_it_has_connected_is_started_again(harness):
    harness.kill(1)
    harness.attempt.memory.step += 1  # or the ladder would find that it did not help
    harness.kill(1)
    assert harness.replaced() == [1, 1]
    harness.answer()
    assert harness.stage() is Stage.TRAINING


def test_a_new_process_whose_connection_closes_is_replaced_like_any_other(harness):
    harness.kill(1)
    harness.answer()
    harness.handle(StepRecorded(STEP + 1))
    harness.kill(1, is_reported=False)
    harness.advance(END_NOTICE_S + 0.1)
    assert harness.replaced() == [1, 1]


def test_a_death_while_reports_come_in_begins_again(sharded):
    sharded.kill(1)
    sharded.reports(0)
    sharded.kill(2)
    assert sharded.attempt.generation == 3
    sharded.reports(3)  # of this generation; what rank 0 reported was of the one before
    assert sharded.stage() is Stage.GATHERING
    sharded.answer()
    assert sharded.stage() is Stage.TRAINING


def test_reports_for_an_earlier_generation_do_not_count(sharded):
    sharded.kill(1)
    sharded.kill(2)
    for rank in range(4):
        report = RankReport(rank=rank, step=STEP)
        sharded.handle(StateReported(2, report))
    assert sharded.stage() is Stage.GATHERING


def test_ranks_that_train_in_an_earlier_generation_do_not_count(harness):
    harness.worker_fault(2, WorkerFaultKind.COLLECTIVE)
    harness.answer(until=is_plan)
    for rank in range(4):
        harness.trains(rank, generation=1)
    assert harness.stage() is Stage.REPAIRING


def test_a_death_while_a_plan_is_carried_out_begins_again(sharded):
    sharded.kill(1)
    sharded.answer(until=is_plan)
    assert sharded.stage() is Stage.REPAIRING
    sharded.trains(0)
    sharded.kill(2)
    assert (sharded.stage(), sharded.attempt.generation) == (Stage.GATHERING, 3)
    sharded.answer()
    assert sharded.stage() is Stage.TRAINING
    assert [event.succeeded for event in sharded.ended()] == [True, True]


# A connection, or a collective.


def test_a_broken_connection_is_answered_when_no_death_explains_it(harness):
    assert harness.worker_fault(2, WorkerFaultKind.CONNECTION) == []
    assert harness.advance(CONNECTION_SETTLE_S / 2) == []
    harness.advance(CONNECTION_SETTLE_S)
    assert (harness.rungs(), harness.replaced()) == ([Rung.STEP_RETRY], [])
    assert harness.began()[0].fault.fault_class is FaultClass.LINK_DOWN
    harness.answer()
    assert harness.stage() is Stage.TRAINING


def test_the_first_of_several_broken_connections_is_answered_and_the_others_do_not_delay_it(
    harness,
):
    harness.worker_fault(2, WorkerFaultKind.CONNECTION)
    harness.advance(CONNECTION_SETTLE_S * 0.6)
    harness.worker_fault(0, WorkerFaultKind.CONNECTION)
    harness.advance(CONNECTION_SETTLE_S * 0.6)
    assert [event.fault.rank for event in harness.began()] == [2]


def test_a_death_that_comes_explains_the_broken_connections_of_the_others(harness):
    harness.worker_fault(2, WorkerFaultKind.CONNECTION)
    harness.worker_fault(0, WorkerFaultKind.CONNECTION)
    harness.kill(1)
    harness.advance(CONNECTION_SETTLE_S * 2)
    assert harness.rungs() == [Rung.PROCESS_REPLACE]


def test_a_broken_connection_waits_for_the_end_of_a_process_that_closed_with_it(harness):
    harness.worker_fault(2, WorkerFaultKind.CONNECTION)
    harness.kill(1, is_reported=False)
    assert harness.advance(CONNECTION_SETTLE_S * 2) == []
    harness.kill(1)
    assert harness.rungs() == [Rung.PROCESS_REPLACE]


def test_a_worker_fault_of_a_generation_before_is_ignored(harness):
    harness.worker_fault(2, WorkerFaultKind.COLLECTIVE)
    assert harness.attempt.generation == 2
    assert harness.worker_fault(3, WorkerFaultKind.COLLECTIVE, generation=1) == []
    assert harness.worker_fault(3, WorkerFaultKind.MEMORY, generation=1) == []
    assert len(harness.began()) == 1


def test_a_collective_that_failed_is_answered_at_once(harness):
    harness.worker_fault(2, WorkerFaultKind.COLLECTIVE, code="507057")
    (began,) = harness.began()
    assert (began.decision.rung, began.fault.code) == (Rung.STEP_RETRY, "507057")
    assert (began.fault.rank, began.fault.device) == (2, 0)


def test_a_recovery_that_fails_on_one_rank_begins_again(harness):
    harness.worker_fault(2, WorkerFaultKind.COLLECTIVE)
    harness.answer(until=is_plan)
    harness.worker_fault(3, WorkerFaultKind.REPAIR)
    harness.advance(CONNECTION_SETTLE_S)
    assert (harness.stage(), harness.attempt.generation) == (Stage.GATHERING, 3)
    harness.answer()
    assert harness.stage() is Stage.TRAINING


def test_a_fault_of_a_rank_that_trains_is_answered_though_others_are_still_starting():
    harness = AttemptHarness.of(is_training=False)
    for rank in (0, 1, 2):
        harness.trains(rank)
    harness.worker_fault(1, WorkerFaultKind.COLLECTIVE)
    assert harness.rungs() == []
    harness.trains(3)
    harness.collect()
    assert harness.rungs() == [Rung.STEP_RETRY]
    harness.answer()
    assert (harness.stage(), harness.attempt.generation) == (Stage.TRAINING, 2)


# Time.


def test_ranks_that_do_not_report_in_time_are_named_and_the_next_rung_is_tried(harness):
    harness.memory_fault(0)
    harness.answer(silent={2, 3})
    assert harness.advance(REPAIR_LIMIT_S) == []
    harness.advance(0.1)
    assert harness.ended()[0].why == "ranks [2, 3] did not come within 30 s"
    assert harness.rungs() == [Rung.STEP_RETRY, Rung.PROCESS_REPLACE]
    assert harness.replaced() == [2], (
        "the rank that is missing, not the one that reported its memory"
    )


def test_ranks_that_do_not_carry_the_plan_out_in_time_are_named(harness):
    harness.memory_fault(0)
    harness.answer(until=is_plan)
    harness.trains(0)
    harness.trains(3)
    harness.advance(REPAIR_LIMIT_S + 0.1)
    assert harness.ended()[0].why == "ranks [1, 2] did not come within 30 s"


def test_a_recovery_in_time_leaves_no_deadline_behind(harness):
    harness.memory_fault(0)
    harness.answer()
    assert harness.advance(10 * REPAIR_LIMIT_S) == []


def test_a_committed_checkpoint_makes_the_recoveries_before_it_free(harness):
    for step in range(STEP, STEP + 6):
        harness.progress_to(step, StepPhase.RUN)
        harness.worker_fault(2, WorkerFaultKind.COLLECTIVE, step=step)
        harness.answer()
        harness.handle(StepCommitted(step + 1))
    assert harness.rungs() == [Rung.STEP_RETRY] * 6


@pytest.mark.parametrize("groups", [DDP, HSDP])
def test_recoveries_in_a_row_without_a_checkpoint_climb(groups):
    harness = AttemptHarness.of(groups)
    for step in range(STEP, STEP + 4):
        harness.attempt.memory.step = step
        harness.worker_fault(2, WorkerFaultKind.COLLECTIVE)
        harness.answer()
    assert harness.rungs() == [Rung.STEP_RETRY] * 3 + [Rung.PROCESS_REPLACE]


def test_a_second_death_in_one_step_climbs_though_its_record_came_late_at_the_first(harness):
    harness.progress_to(STEP + 3, StepPhase.RUN)  # the records that are known end at STEP
    harness.kill(2)
    harness.answer()
    harness.kill(2)
    assert harness.rungs() == [Rung.PROCESS_REPLACE]
    assert harness.stage() is Stage.GATHERING  # of the survivors' last save


def test_a_death_in_a_later_step_is_not_taken_for_the_same_one(harness):
    harness.kill(2)
    harness.answer()
    harness.progress_to(STEP + 1, StepPhase.RUN)
    harness.handle(StepRecorded(STEP + 1))
    harness.kill(2)
    assert harness.rungs() == [Rung.PROCESS_REPLACE] * 2
