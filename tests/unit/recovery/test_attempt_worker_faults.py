"""The life of an attempt: links that are made anew, damaged memory and abnormal steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.recovery.attempts import (
    ALONE,
    HSDP,
    LINK_LIMIT_S,
    REPAIR_LIMIT_S,
    STEP,
    RunOutcome,
)
from training.recovery.actions import NormAccepted
from training.recovery.attempt import CONNECTION_SETTLE_S, Stage
from training.recovery.protocol import (
    CoordinatorMessage,
    NewGeneration,
    Plan,
    Reconnect,
    Reconnected,
    WorkerFaultKind,
)
from training.recovery.ranks import END_NOTICE_S
from training.recovery.repair import Move, RepairMode, StepPhase
from training.recovery.rungs import Policy, Rung

# Operator retry.

RETRY = Policy(operator_retry=True)


def broken_link(played: RunOutcome, **changes) -> None:
    """A link is broken under operations that can be run again."""
    played.sees(2, WorkerFaultKind.CONNECTION, connection=0, **changes)
    played.passes(CONNECTION_SETTLE_S)


def test_new_links_are_made_in_the_same_generation_where_operations_can_be_run_again():
    played = RunOutcome.of(policy=RETRY)
    broken_link(played)
    assert played.stage() is Stage.RECONNECTING
    assert played.told(0) == [Reconnect(generation=1, connection=1)]
    assert played.began()[0].decision.sub_healthy
    played.answer()
    (ended,) = played.ended()
    assert ended.succeeded
    assert (ended.generation, ended.replaced, ended.steps_lost) == (1, (), 0)
    assert (played.stage(), played.attempt.generation) == (Stage.TRAINING, 1)


def test_a_break_of_links_that_were_made_anew_since_is_old_news():
    played = RunOutcome.of(policy=RETRY)
    broken_link(played)
    broken_link(played)
    played.answer()
    assert played.rungs() == [Rung.OPERATOR_RETRY]


def test_links_that_cannot_be_made_climb_to_a_new_generation():
    played = RunOutcome.of(policy=RETRY)
    broken_link(played)
    told = Reconnected(generation=1, connection=1, problem="no route")
    played.attempt.reconnected(0, told, now_s=played.now_s)
    played.answer()
    assert played.rungs() == [Rung.OPERATOR_RETRY, Rung.STEP_RETRY]
    assert [note.succeeded for note in played.ended()] == [False, True]
    assert played.ended()[0].why == "rank 0: no route"


def test_links_that_are_not_made_in_time_climb_to_a_new_generation():
    played = RunOutcome.of(policy=RETRY)
    broken_link(played)
    played.answer(silent={1, 3})
    assert played.passes(LINK_LIMIT_S) == []
    played.passes(0.1)
    assert played.ended()[0].why == "ranks [1, 3] have no connections after 10 s"
    assert played.stage() is Stage.GATHERING


def test_word_of_links_of_another_time_does_not_count():
    played = RunOutcome.of(policy=RETRY)
    broken_link(played)
    for generation, link in ((1, 0), (1, 2), (0, 1), (2, 1)):
        for rank in range(4):
            told = Reconnected(generation=generation, connection=link)
            played.attempt.reconnected(rank, told, now_s=played.now_s)
    assert played.stage() is Stage.RECONNECTING


def test_links_that_break_again_are_made_anew_by_all_again():
    played = RunOutcome.of(policy=RETRY)
    broken_link(played)
    played.answer()
    played.attempt.stepped(STEP + 1)
    played.sees(2, WorkerFaultKind.CONNECTION, connection=1)
    played.passes(CONNECTION_SETTLE_S)
    assert played.told(0)[-1] == Reconnect(generation=1, connection=2)
    told = Reconnected(generation=1, connection=2)
    played.attempt.reconnected(0, told, now_s=played.now_s)
    assert played.stage() is Stage.RECONNECTING
    played.answer()
    assert played.stage() is Stage.TRAINING


def test_links_of_a_new_generation_are_counted_from_the_beginning():
    played = RunOutcome.of(policy=RETRY)
    broken_link(played)
    played.answer()
    played.sees(2, WorkerFaultKind.COLLECTIVE)
    played.answer()
    played.attempt.stepped(STEP + 1)
    broken_link(played)
    assert played.told(0)[-1] == Reconnect(generation=2, connection=1)


def test_a_death_while_links_are_made_is_answered():
    played = RunOutcome.of(policy=RETRY)
    broken_link(played)
    played.dies(1)
    played.answer()
    assert played.rungs() == [Rung.OPERATOR_RETRY, Rung.PROCESS_REPLACE]
    assert played.stage() is Stage.TRAINING


def break_in_a_repair(played: RunOutcome, **changes: Any) -> None:
    """Rank 3 dies; before it has the state of another, a link of those that train breaks."""
    played.dies(3)
    played.answer(until=is_plan)
    for rank in range(3):
        played.trains(rank)
    played.overtakes()
    broken_link(played, **changes)


def relinks(played: RunOutcome) -> None:
    """All ranks have new links."""
    generation, link = played.attempt.generation, played.attempt._connection
    told = Reconnected(generation=generation, connection=link, operations=1)
    for rank in range(4):
        played.attempt.reconnected(rank, told, now_s=played.now_s)
    played.collect()


def test_new_links_in_the_middle_of_a_repair_do_not_end_it():
    played = RunOutcome.of(policy=RETRY)
    break_in_a_repair(played)
    assert played.stage() is Stage.RECONNECTING
    relinks(played)
    assert (played.stage(), played.ended()) == (Stage.REPAIRING, [])
    played.passes(7.0)
    played.trains(3)
    played.collect()
    assert played.stage() is Stage.TRAINING
    assert [(note.step, note.succeeded) for note in played.ended()] == [(STEP, True)] * 2
    assert [note.replaced for note in played.ended()] == [(3,), ()]
    assert all(note.duration_s >= 7.0 for note in played.ended())


def test_a_repair_that_is_done_while_links_are_made_ends_with_the_last_of_them():
    played = RunOutcome.of(policy=RETRY)
    break_in_a_repair(played)
    played.trains(3)
    assert (played.stage(), played.ended()) == (Stage.RECONNECTING, [])
    assert played.attempt.has_deadline, "new links have a limit whoever trains"
    relinks(played)
    assert played.stage() is Stage.TRAINING
    assert [note.succeeded for note in played.ended()] == [True, True]


def test_a_repair_that_goes_on_after_new_links_has_its_limit_again():
    played = RunOutcome.of(policy=RETRY)
    break_in_a_repair(played)
    relinks(played)
    played.passes(REPAIR_LIMIT_S + 0.1)
    assert played.ended()[0].why == "ranks [3] did not come within 30 s"


def test_links_that_break_before_there_is_a_plan_begin_another_generation():
    played = RunOutcome.of(policy=RETRY)
    played.sees(2, WorkerFaultKind.COLLECTIVE)
    assert played.stage() is Stage.GATHERING
    broken_link(played)
    assert played.rungs() == [Rung.STEP_RETRY, Rung.STEP_RETRY]


# A rank's memory.


def test_a_damaged_rank_gets_its_state_from_a_replica():
    played = RunOutcome.of(HSDP)
    played.damaged(0)
    played.answer()
    (ended,) = played.ended()
    assert (ended.succeeded, ended.replaced, ended.repaired) == (True, (), (0,))
    assert (played.rungs(), played.replaced()) == ([Rung.STEP_RETRY], [])


def test_damage_that_comes_back_at_the_same_step_gets_a_new_process():
    played = RunOutcome.of(HSDP)
    played.damaged(0)
    played.answer()
    played.damaged(0)
    assert played.rungs() == [Rung.STEP_RETRY, Rung.PROCESS_REPLACE]
    assert played.replaced() == [0]
    assert NewGeneration(number=3) not in played.told(0), "the process before is to end"
    played.attempt.disconnected(0, now_s=played.now_s)  # it is ended by its agent, and nobody minds
    assert played.passes(END_NOTICE_S * 2) == []
    played.answer()
    assert played.stage() is Stage.TRAINING


# Abnormal steps.

TRE = Policy(numeric_retry=True)


def abnormal(played: RunOutcome, **changes: Any) -> None:
    """Every rank sees the same step come out abnormal."""
    generation = played.attempt.generation
    for rank in range(4):
        played.sees(rank, WorkerFaultKind.NUMERIC, step=STEP, generation=generation, **changes)


def test_an_abnormal_step_is_done_again_from_the_snapshot_and_accepted_the_second_time():
    played = RunOutcome.of(policy=TRE)
    abnormal(played)
    played.answer()
    assert (played.plan().mode, played.plan().step) == (RepairMode.ROLL_BACK, STEP - 2)
    assert played.ended()[0].steps_lost == 2
    assert played.attempt.step == STEP - 2
    accept_second_time(played)
    assert played.plan().mode is RepairMode.ACCEPT
    assert (played.plan().step, played.plan().applies) == (STEP + 1, (0, 1, 2, 3))
    assert [note.decision.accept_abnormal for note in played.began()] == [False, True]


def accept_second_time(played: RunOutcome, **changes) -> None:
    played.stand_at(STEP, StepPhase.PREPARED)
    abnormal(played, **changes)
    played.answer()


def test_the_norms_of_an_accepted_step_are_put_on_record_before_and_after():
    played = RunOutcome.of(policy=TRE)
    abnormal(played, grad_norm=900.0)
    played.answer()
    accept_second_time(played, grad_norm=901.0)
    recorded = [action for action in played.actions if isinstance(action, NormAccepted)]
    assert recorded == [NormAccepted(STEP + 1, (900.0, 901.0))]


def test_a_step_that_was_accepted_is_not_asked_about_a_third_time():
    played = RunOutcome.of(policy=TRE)
    abnormal(played)
    played.answer()
    accept_second_time(played)
    abnormal(played)
    assert played.stage() is Stage.GIVEN_UP
    assert "was accepted already" in played.given_up()[0]


def test_a_step_that_is_not_finite_is_never_accepted():
    played = RunOutcome.of(policy=TRE)
    abnormal(played, is_finite=False)
    played.answer()
    assert played.rungs() == [Rung.STEP_RETRY]
    abnormal(played, is_finite=False)
    assert played.stage() is Stage.GIVEN_UP
    assert played.rungs() == [Rung.STEP_RETRY]
    assert "step_retry: the last one failed" in played.given_up()[0]


def without_snapshot(played: RunOutcome, rank: int) -> None:
    own = played.ranks[rank]
    own.report = own.report.model_copy(update={"snapshot_step": None})


def test_ranks_without_a_common_snapshot_do_not_roll_back():
    played = RunOutcome.of(ALONE, policy=TRE)
    without_snapshot(played, 1)
    abnormal(played)
    played.answer()
    assert played.ended()[0].why == "the ranks have no snapshot of one step"
    assert played.stage() is Stage.GIVEN_UP


def test_a_rank_without_the_snapshot_gets_it_from_its_replica():
    played = RunOutcome.of(HSDP, policy=TRE)
    without_snapshot(played, 1)
    abnormal(played)
    played.answer()
    (ended,) = played.ended()
    assert (ended.succeeded, ended.repaired, ended.step) == (True, (1,), STEP - 2)


def test_a_loss_that_is_no_number_twice_costs_the_process_that_made_it():
    played = RunOutcome.of(HSDP, policy=TRE)
    for _ in range(2):
        abnormal(played, is_finite=False, culprit=2)
        played.answer()
    assert played.rungs() == [Rung.STEP_RETRY, Rung.PROCESS_REPLACE]
    assert played.began()[1].fault.rank == 2
    assert (played.replaced(), played.stage()) == ([2], Stage.TRAINING)
    assert (played.plan().mode, played.plan().step) == (RepairMode.ROLL_BACK, STEP - 2)
    assert played.plan().moves == (Move(source=0, target=2),)
    abnormal(played, is_finite=False, culprit=2)
    assert played.stage() is Stage.GIVEN_UP


# Abnormal steps whose recovery another fault cuts short.


def collective_fails(played: RunOutcome) -> None:
    played.sees(1, WorkerFaultKind.COLLECTIVE, step=STEP)


def rank_dies(played: RunOutcome) -> None:
    played.dies(2)


def is_plan(message: CoordinatorMessage) -> bool:
    return isinstance(message, Plan)


def cut_short(played: RunOutcome, stage: Stage, fault: Callable[[RunOutcome], None]) -> None:
    """A fault comes before all ranks have told how they stand, or have done what was planned."""
    if stage is Stage.GATHERING:
        played.answer(silent={3})
    else:
        played.answer(until=is_plan)
        played.ranks[0].carry_out(played.plan())
    assert played.stage() is stage
    played.overtakes()
    fault(played)
    played.answer()


CUTS = pytest.mark.parametrize(
    ("stage", "fault"),
    [
        (stage, fault)
        for stage in (Stage.GATHERING, Stage.REPAIRING)
        for fault in (collective_fails, rank_dies)
    ],
)


@CUTS
def test_a_roll_back_that_another_fault_cuts_short_is_carried_out_by_all_ranks(stage, fault):
    played = RunOutcome.of(policy=TRE)
    abnormal(played)
    cut_short(played, stage, fault)
    assert (played.plan().mode, played.plan().step) == (RepairMode.ROLL_BACK, STEP - 2)
    moves = (Move(source=0, target=2),) if fault is rank_dies else ()
    assert (played.plan().rolls_back, played.plan().moves) == (True, moves)
    assert played.stage() is Stage.TRAINING
    assert [(note.succeeded, note.cut_short) for note in played.ended()] == [(True, False)] * 2


@CUTS
def test_a_retry_that_was_cut_short_and_made_in_the_end_counts_once(stage, fault):
    played = RunOutcome.of(policy=TRE)
    abnormal(played)
    cut_short(played, stage, fault)
    accept_second_time(played)
    assert played.began()[-1].decision.accept_abnormal
    assert played.plan().mode is RepairMode.ACCEPT
    assert played.stage() is Stage.TRAINING


@CUTS
def test_an_acceptance_that_another_fault_cuts_short_is_carried_out_by_all_ranks(stage, fault):
    played = RunOutcome.of(policy=TRE)
    abnormal(played)
    played.answer()
    played.stand_at(STEP, StepPhase.PREPARED)
    abnormal(played)
    cut_short(played, stage, fault)
    assert (played.plan().mode, played.plan().step) == (RepairMode.ACCEPT, STEP + 1)
    assert played.stage() is Stage.TRAINING
    assert [rank.report.step for rank in played.ranks.values()] == [STEP + 1] * 4


@CUTS
def test_what_comes_after_a_roll_back_is_mended_where_it_is(stage, fault):
    played = RunOutcome.of(policy=TRE)
    abnormal(played)
    cut_short(played, stage, fault)
    played.stand_at(STEP + 1, StepPhase.RUN)
    played.attempt.stepped(STEP + 1)
    played.dies(3)
    played.answer()
    assert (played.plan().mode, played.plan().step) == (RepairMode.TRAIN, STEP + 1)


def test_a_step_that_comes_out_abnormal_proves_that_all_ranks_train():
    played = RunOutcome.of(policy=TRE)
    abnormal(played)
    played.answer(until=is_plan)
    for rank in range(3):  # the word of the last one takes longer
        played.trains(rank, step=STEP - 2)
    played.stand_at(STEP, StepPhase.PREPARED)
    played.overtakes()
    abnormal(played)
    played.answer()
    assert (played.plan().mode, played.plan().step) == (RepairMode.ACCEPT, STEP + 1)
    assert played.stage() is Stage.TRAINING


def test_a_roll_back_that_comes_to_nothing_leaves_nothing_to_save_and_was_not_tried():
    played = RunOutcome.of(HSDP, policy=TRE)
    abnormal(played)
    played.answer(silent={3})
    played.dies(0)
    played.dies(2)
    played.answer()
    assert played.stage() is Stage.GIVEN_UP
    assert played.last_save().why == "the ranks were going back to a snapshot"
    told = [(note.succeeded, note.cut_short) for note in played.ended()]
    assert told == [(False, True), (False, True), (False, False)]


def test_a_rank_that_has_left_its_step_needs_a_generation_and_no_new_links():
    played = RunOutcome.of(policy=RETRY)
    played.sees(2, WorkerFaultKind.CONNECTION)
    played.passes(CONNECTION_SETTLE_S)
    assert played.rungs() == [Rung.STEP_RETRY]


def test_one_rank_that_has_left_its_step_speaks_for_all_that_have_not():
    played = RunOutcome.of(policy=RETRY)
    played.sees(2, WorkerFaultKind.CONNECTION, connection=0)
    played.sees(1, WorkerFaultKind.CONNECTION)
    played.passes(CONNECTION_SETTLE_S)
    assert played.rungs() == [Rung.STEP_RETRY]


def test_a_rank_that_leaves_its_step_while_links_are_made_is_not_left_waiting():
    played = RunOutcome.of(policy=RETRY)
    broken_link(played)
    assert played.stage() is Stage.RECONNECTING
    played.sees(1, WorkerFaultKind.CONNECTION)
    played.passes(CONNECTION_SETTLE_S)
    assert isinstance(played.told(1)[-1], NewGeneration)


def test_the_rank_that_does_not_come_is_the_one_that_is_replaced():
    played = RunOutcome.of()
    played.sees(2, WorkerFaultKind.COLLECTIVE)
    played.answer(silent={1})
    played.passes(REPAIR_LIMIT_S + 0.1)
    assert played.rungs() == [Rung.STEP_RETRY, Rung.PROCESS_REPLACE]
    assert played.replaced() == [1]
