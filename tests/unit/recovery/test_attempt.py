"""The life of an attempt, events in and actions out: how faults are mended while it lives."""

from __future__ import annotations

import pytest

from tests.unit.recovery.attempts import (
    DDP,
    HSDP,
    REPAIR_LIMIT_S,
    STEP,
    RunOutcome,
)
from training.diagnosis.exits import EXIT_RESTART_ME
from training.recovery.actions import LogEvent, ToAgent, ToRank
from training.recovery.attempt import CONNECTION_SETTLE_S, Stage
from training.recovery.faults import FaultClass
from training.recovery.protocol import NewGeneration, Plan, ReplaceWorker, WorkerFaultKind
from training.recovery.ranks import END_NOTICE_S
from training.recovery.repair import Move, RankReport, StepPhase
from training.recovery.rungs import Rung


def test_training_begins_when_the_last_rank_trains():
    played = RunOutcome.of(is_training=False)
    for rank in (0, 1, 2):
        played.trains(rank)
        assert played.stage() is Stage.STARTING
    played.trains(3, step=12)
    assert (played.stage(), played.attempt.step) == (Stage.TRAINING, 12)


def test_a_rank_that_joins_is_told_the_generation():
    played = RunOutcome.of(is_training=False)
    assert played.collect() == [ToRank(rank, NewGeneration(number=1)) for rank in range(4)]


# A process that died.


def test_a_death_is_noted_then_the_rank_replaced_and_the_others_called_to_a_new_generation():
    played = RunOutcome.of()
    note, *rest = played.dies(1)
    assert isinstance(note, LogEvent)
    assert (played.began()[0].decision.rung, played.began()[0].generation) == (
        Rung.PROCESS_REPLACE,
        1,
    )
    fault = played.began()[0].fault
    assert (fault.fault_class, fault.rank, fault.node) == (FaultClass.NATIVE_CRASH, 1, "node-0")
    assert fault.step == STEP
    assert rest == [
        ToAgent(1, ReplaceWorker(rank=1, generation=2)),
        *(ToRank(rank, NewGeneration(number=2)) for rank in (0, 2, 3)),
    ]


def test_a_death_is_mended_when_every_rank_trains_in_the_new_generation():
    played = RunOutcome.of(HSDP)
    played.dies(1)
    played.now_s += 0.5
    played.answer()
    assert played.plan().moves == (Move(source=3, target=1),)
    (ended,) = played.ended()
    assert ended.succeeded
    assert (ended.number, ended.generation, ended.step) == (1, 2, STEP)
    assert (ended.replaced, ended.repaired, ended.duration_s) == ((1,), (), 0.5)
    assert (played.stage(), played.attempt.generation) == (Stage.TRAINING, 2)


def test_a_plan_waits_for_the_new_process():
    played = RunOutcome.of()
    played.dies(1)
    played.answer(silent={1})
    assert not any(isinstance(message, Plan) for message in played.told(0))
    played.starts(1)
    played.answer()
    assert played.stage() is Stage.TRAINING


def test_a_connection_that_closes_is_no_death_until_the_agent_tells_or_the_notice_is_over():
    played = RunOutcome.of()
    assert played.dies(1, told=False) == []
    assert played.passes(END_NOTICE_S) == []
    played.passes(0.1)
    (began,) = played.began()
    assert (began.fault.rank, began.decision.rung) == (1, Rung.PROCESS_REPLACE)
    assert "its agent did not report how it ended" in began.fault.evidence
    assert played.replaced() == [1]


def test_a_process_that_lost_its_line_gets_a_successor():
    played = RunOutcome.of()
    played.dies(1, exit_code=EXIT_RESTART_ME)
    assert played.replaced() == [1]
    played.answer()
    assert played.stage() is Stage.TRAINING


def test_two_deaths_at_once_are_mended_together():
    played = RunOutcome.of(HSDP)
    played.dies(1)
    played.dies(2)
    assert played.replaced() == [1, 2]
    played.answer()
    first, second = played.ended()
    assert (first.number, second.number) == (1, 2)
    assert (first.replaced, second.replaced) == ((1,), (2,))
    assert (first.generation, second.generation) == (3, 3)
    assert set(played.plan().moves) == {Move(source=3, target=1), Move(source=0, target=2)}


def test_a_rank_that_one_recovery_replaced_is_not_called_repaired_by_another():
    played = RunOutcome.of(HSDP)
    played.dies(1)
    played.damaged(2)
    played.answer()
    replaced, repaired = played.ended()
    assert (replaced.replaced, replaced.repaired) == ((1,), (2,))
    assert (repaired.replaced, repaired.repaired) == ((), (2,))


def test_a_new_process_that_dies_before_it_has_connected_is_started_again():
    played = RunOutcome.of()
    played.dies(1)
    played.attempt.step += 1  # or the ladder would say that it did not help
    played.dies(1)
    assert played.replaced() == [1, 1]
    played.answer()
    assert played.stage() is Stage.TRAINING


def test_a_new_process_whose_connection_closes_is_missed_as_any_other():
    played = RunOutcome.of()
    played.dies(1)
    played.answer()
    played.attempt.stepped(STEP + 1)
    played.dies(1, told=False)
    played.passes(END_NOTICE_S + 0.1)
    assert played.replaced() == [1, 1]


def test_a_death_while_reports_come_in_begins_anew():
    played = RunOutcome.of(HSDP)
    played.dies(1)
    played.reports(0)
    played.dies(2)
    assert played.attempt.generation == 3
    played.reports(3)  # of this generation; what rank 0 said was of the one before
    assert played.stage() is Stage.GATHERING
    played.answer()
    assert played.stage() is Stage.TRAINING


def test_reports_for_a_generation_before_do_not_count():
    played = RunOutcome.of(HSDP)
    played.dies(1)
    played.dies(2)
    for rank in range(4):
        report = RankReport(rank=rank, step=STEP)
        played.attempt.generation_report(2, report, now_s=played.now_s)
    assert played.stage() is Stage.GATHERING


def test_ranks_that_train_in_a_generation_before_do_not_count():
    played = RunOutcome.of()
    played.sees(2, WorkerFaultKind.COLLECTIVE)
    played.answer(until=lambda message: isinstance(message, Plan))
    for rank in range(4):
        played.trains(rank, generation=1)
    assert played.stage() is Stage.REPAIRING


def test_a_death_while_a_plan_is_carried_out_begins_anew():
    played = RunOutcome.of(HSDP)
    played.dies(1)
    played.answer(until=lambda message: isinstance(message, Plan))
    assert played.stage() is Stage.REPAIRING
    played.trains(0)
    played.dies(2)
    assert (played.stage(), played.attempt.generation) == (Stage.GATHERING, 3)
    played.answer()
    assert played.stage() is Stage.TRAINING
    assert [note.succeeded for note in played.ended()] == [True, True]


# A link, or a collective.


def test_a_broken_link_is_answered_when_no_death_explains_it():
    played = RunOutcome.of()
    assert played.sees(2, WorkerFaultKind.CONNECTION) == []
    assert played.passes(CONNECTION_SETTLE_S / 2) == []
    played.passes(CONNECTION_SETTLE_S)
    assert (played.rungs(), played.replaced()) == ([Rung.STEP_RETRY], [])
    assert played.began()[0].fault.fault_class is FaultClass.LINK_DOWN
    played.answer()
    assert played.stage() is Stage.TRAINING


def test_the_first_of_several_broken_links_is_answered_and_the_others_do_not_delay_it():
    played = RunOutcome.of()
    played.sees(2, WorkerFaultKind.CONNECTION)
    played.passes(CONNECTION_SETTLE_S * 0.6)
    played.sees(0, WorkerFaultKind.CONNECTION)
    played.passes(CONNECTION_SETTLE_S * 0.6)
    assert [note.fault.rank for note in played.began()] == [2]


def test_a_death_that_comes_explains_the_broken_links_of_the_others():
    played = RunOutcome.of()
    played.sees(2, WorkerFaultKind.CONNECTION)
    played.sees(0, WorkerFaultKind.CONNECTION)
    played.dies(1)
    played.passes(CONNECTION_SETTLE_S * 2)
    assert played.rungs() == [Rung.PROCESS_REPLACE]


def test_a_broken_link_waits_for_word_of_a_connection_that_closed_with_it():
    played = RunOutcome.of()
    played.sees(2, WorkerFaultKind.CONNECTION)
    played.dies(1, told=False)
    assert played.passes(CONNECTION_SETTLE_S * 2) == []
    played.dies(1)
    assert played.rungs() == [Rung.PROCESS_REPLACE]


def test_a_trouble_of_a_generation_before_is_old_news():
    played = RunOutcome.of()
    played.sees(2, WorkerFaultKind.COLLECTIVE)
    assert played.attempt.generation == 2
    assert played.sees(3, WorkerFaultKind.COLLECTIVE, generation=1) == []
    assert played.sees(3, WorkerFaultKind.MEMORY, generation=1) == []
    assert len(played.began()) == 1


def test_a_collective_that_failed_is_answered_at_once():
    played = RunOutcome.of()
    played.sees(2, WorkerFaultKind.COLLECTIVE, code="507057")
    (began,) = played.began()
    assert (began.decision.rung, began.fault.code) == (Rung.STEP_RETRY, "507057")
    assert (began.fault.rank, began.fault.device) == (2, 0)


def test_a_recovery_that_comes_to_grief_somewhere_begins_anew():
    played = RunOutcome.of()
    played.sees(2, WorkerFaultKind.COLLECTIVE)
    played.answer(until=lambda message: isinstance(message, Plan))
    played.sees(3, WorkerFaultKind.REPAIR)
    played.passes(CONNECTION_SETTLE_S)
    assert (played.stage(), played.attempt.generation) == (Stage.GATHERING, 3)
    played.answer()
    assert played.stage() is Stage.TRAINING


def test_a_fault_of_a_rank_that_trains_is_answered_though_others_are_still_starting():
    played = RunOutcome.of(is_training=False)
    for rank in (0, 1, 2):
        played.trains(rank)
    played.sees(1, WorkerFaultKind.COLLECTIVE)
    assert played.rungs() == []
    played.trains(3)
    played.collect()
    assert played.rungs() == [Rung.STEP_RETRY]
    played.answer()
    assert (played.stage(), played.attempt.generation) == (Stage.TRAINING, 2)


# Time.


def test_ranks_that_do_not_report_in_time_are_named_and_the_next_rung_is_asked():
    played = RunOutcome.of()
    played.damaged(0)
    played.answer(silent={2, 3})
    assert played.passes(REPAIR_LIMIT_S) == []
    played.passes(0.1)
    assert played.ended()[0].why == "ranks [2, 3] did not come within 30 s"
    assert played.rungs() == [Rung.STEP_RETRY, Rung.PROCESS_REPLACE]
    assert played.replaced() == [2], "who did not come, not who told of its memory"


def test_ranks_that_do_not_carry_the_plan_out_in_time_are_named():
    played = RunOutcome.of()
    played.damaged(0)
    played.answer(until=lambda message: isinstance(message, Plan))
    played.trains(0)
    played.trains(3)
    played.passes(REPAIR_LIMIT_S + 0.1)
    assert played.ended()[0].why == "ranks [1, 2] did not come within 30 s"


def test_a_recovery_in_time_leaves_no_deadline_behind():
    played = RunOutcome.of()
    played.damaged(0)
    played.answer()
    assert played.passes(10 * REPAIR_LIMIT_S) == []


def test_a_committed_checkpoint_makes_the_recoveries_before_it_free():
    played = RunOutcome.of()
    for step in range(STEP, STEP + 6):
        played.stand_at(step, StepPhase.RUN)
        played.sees(2, WorkerFaultKind.COLLECTIVE, step=step)
        played.answer()
        played.attempt.committed(step + 1)
    assert played.rungs() == [Rung.STEP_RETRY] * 6


@pytest.mark.parametrize("groups", [DDP, HSDP])
def test_recoveries_in_a_row_without_a_checkpoint_climb(groups):
    played = RunOutcome.of(groups)
    for step in range(STEP, STEP + 4):
        played.attempt.step = step
        played.sees(2, WorkerFaultKind.COLLECTIVE)
        played.answer()
    assert played.rungs() == [Rung.STEP_RETRY] * 3 + [Rung.PROCESS_REPLACE]


def test_a_second_death_in_one_step_climbs_though_its_record_came_late_at_the_first():
    played = RunOutcome.of()
    played.stand_at(STEP + 3, StepPhase.RUN)  # the records that are known end at STEP
    played.dies(2)
    played.answer()
    played.dies(2)
    assert played.rungs() == [Rung.PROCESS_REPLACE]
    assert played.stage() is Stage.GATHERING  # of the survivors' last save


def test_a_death_in_a_later_step_is_not_taken_for_the_same_one():
    played = RunOutcome.of()
    played.dies(2)
    played.answer()
    played.stand_at(STEP + 1, StepPhase.RUN)
    played.attempt.stepped(STEP + 1)
    played.dies(2)
    assert played.rungs() == [Rung.PROCESS_REPLACE] * 2
