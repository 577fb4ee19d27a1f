"""The life of an attempt: how it begins and ends, the last save, and pauses."""

from __future__ import annotations

import pytest

from tests.unit.recovery.attempts import (
    ALONE,
    EIGHT,
    HSDP,
    REPAIR_LIMIT_S,
    SAVE_LIMIT_S,
    STEP,
    RunOutcome,
)
from training.recovery.actions import ToAgent, ToRank
from training.recovery.attempt import CONNECTION_SETTLE_S, Stage
from training.recovery.events import PauseBegan, PauseEnded
from training.recovery.protocol import (
    GiveUp,
    LastSaved,
    NewGeneration,
    PauseRequest,
    Plan,
    WorkerFaultKind,
)
from training.recovery.repair import RepairMode
from training.recovery.rungs import Policy, Rung

NO_REPLACING = Policy(process_replace=False)


def is_plan(message) -> bool:
    return isinstance(message, Plan)


# Beginning and end.


def test_a_death_before_all_ranks_train_ends_the_attempt():
    played = RunOutcome.of(is_training=False)
    for rank in (0, 1, 2):
        played.trains(rank)
    actions = played.dies(3)
    why = "rank 3 ended while the attempt was starting"
    assert actions[4:] == [
        *(ToRank(rank, GiveUp(why=why)) for rank in (0, 1, 2)),
        ToAgent(None, GiveUp(why=why)),
    ]
    assert played.stage() is Stage.GIVEN_UP


def test_a_rank_that_comes_too_late_is_told_that_all_is_over():
    played = RunOutcome.of(is_training=False)
    played.dies(3)
    played.collect()
    played.attempt.joined(3)
    (action,) = played.collect()
    assert isinstance(action, ToRank)
    assert isinstance(action.message, GiveUp)


def test_ranks_that_come_to_their_end_are_not_missed():
    played = RunOutcome.of()
    for rank in range(4):
        played.attempt.ending(rank, now_s=played.now_s)
        played.attempt.disconnected(rank, now_s=played.now_s)
    assert played.stage() is Stage.ENDING
    assert played.passes(1000.0) == []


def test_nothing_is_recovered_once_a_rank_came_to_its_end():
    played = RunOutcome.of()
    played.attempt.ending(0, now_s=played.now_s)
    played.dies(2)
    assert (played.rungs(), played.stage()) == ([], Stage.GIVEN_UP)


@pytest.mark.parametrize("trouble", [WorkerFaultKind.CONNECTION, WorkerFaultKind.COLLECTIVE])
def test_a_rank_in_trouble_is_not_left_waiting_when_others_came_to_their_end(trouble):
    played = RunOutcome.of()
    played.attempt.ending(0, now_s=played.now_s)
    played.sees(2, trouble)
    assert isinstance(played.told(2)[-1], GiveUp)


def test_a_link_that_broke_just_before_a_rank_came_to_its_end_is_not_mended_either():
    played = RunOutcome.of()
    played.sees(2, WorkerFaultKind.CONNECTION)
    played.attempt.ending(0, now_s=played.now_s)
    played.collect()
    assert isinstance(played.told(2)[-1], GiveUp)
    assert played.passes(CONNECTION_SETTLE_S * 2) == []


def test_a_recovery_that_a_rank_has_left_by_its_end_is_given_up_at_once():
    played = RunOutcome.of()
    played.sees(2, WorkerFaultKind.COLLECTIVE)
    played.attempt.ending(0, now_s=played.now_s)
    played.collect()
    assert [note.succeeded for note in played.ended()] == [False]
    assert played.given_up() == ["rank 0 came to its end: no generation has all ranks any more"]


def test_after_giving_up_nothing_more_is_done():
    played = RunOutcome.of(is_training=False)
    played.dies(3)
    played.dies(2)
    assert played.sees(1, WorkerFaultKind.MEMORY) == []
    assert played.dies(1, told=False) == []
    assert played.passes(1000.0) == []


def test_a_trouble_that_waits_for_an_explanation_is_forgotten_when_all_is_given_up():
    policy = Policy(process_replace=False, end_of_life_checkpoint=False)
    played = RunOutcome.of(policy=policy)
    played.sees(2, WorkerFaultKind.COLLECTIVE)
    played.passes(REPAIR_LIMIT_S - 1)
    played.sees(0, WorkerFaultKind.REPAIR)
    played.dies(1, told=False)
    played.passes(2)  # too late for the reports; how rank 1 ended is not known yet
    assert played.stage() is Stage.GIVEN_UP
    played.dies(1)
    assert played.passes(1000) == []
    assert played.stage() is Stage.GIVEN_UP


# The last save.


def test_survivors_save_one_rank_of_each_group_when_their_processes_are_to_be_lost():
    played = RunOutcome.of(EIGHT, policy=NO_REPLACING)
    played.dies(1)
    assert (played.rungs(), played.replaced()) == ([], [])
    assert [played.told(rank) for rank in (0, 2, 3, 4, 5, 6, 7)] == [[NewGeneration(number=2)]] * 7
    assert played.told(1) == []
    played.answer(until=is_plan)
    assert (played.plan().mode, played.plan().savers) == (RepairMode.LAST_SAVE, (0, 5, 2, 3))
    played.answer()
    saved = played.last_save()
    assert (saved.step, saved.ranks, saved.why) == (STEP, (0, 2, 3, 5), "")
    assert played.stage() is Stage.GIVEN_UP
    assert played.given_up()[0].startswith("native_crash at rank 1")


def test_an_attempt_is_over_only_when_all_savers_are_done():
    played = RunOutcome.of(HSDP, policy=NO_REPLACING)
    played.dies(1)
    played.answer(until=is_plan)
    for rank in (2, 0):
        assert played.stage() is Stage.SAVING
        played.attempt.last_saved(rank, LastSaved(step=STEP), now_s=played.now_s)
    assert played.stage() is Stage.SAVING, "rank 2 saves nothing, and rank 3 is not done"
    played.attempt.last_saved(3, LastSaved(step=STEP), now_s=played.now_s)
    assert played.stage() is Stage.GIVEN_UP


def test_the_policy_may_have_no_last_save():
    played = RunOutcome.of(policy=Policy(process_replace=False, end_of_life_checkpoint=False))
    played.dies(1)
    assert played.stage() is Stage.GIVEN_UP


def test_a_saver_that_dies_makes_the_last_save_fail():
    played = RunOutcome.of(HSDP, policy=NO_REPLACING)
    played.dies(1)
    played.answer(until=is_plan)
    played.dies(0)
    saved = played.last_save()
    assert (saved.step, saved.why) == (None, "rank 0 ended while it saved")
    assert played.stage() is Stage.GIVEN_UP


def test_a_saver_that_ends_after_its_part_is_done_is_no_failure():
    played = RunOutcome.of(HSDP, policy=NO_REPLACING)
    played.dies(1)
    played.answer(until=is_plan)
    played.attempt.last_saved(0, LastSaved(step=STEP), now_s=played.now_s)
    played.dies(0)
    played.dies(2)
    played.attempt.last_saved(3, LastSaved(step=STEP), now_s=played.now_s)
    played.collect()
    assert played.last_save().step == STEP


def test_a_saver_that_cannot_write_says_why():
    played = RunOutcome.of(HSDP, policy=NO_REPLACING)
    played.dies(1)
    played.answer(until=is_plan)
    told = LastSaved(step=STEP, problem="rank 3: the disk is full")
    played.attempt.last_saved(3, told, now_s=played.now_s)
    played.collect()
    assert (played.last_save().step, played.last_save().why) == (None, "rank 3: the disk is full")
    assert played.stage() is Stage.GIVEN_UP


def test_a_state_that_died_with_its_last_holder_is_not_saved():
    played = RunOutcome.of(HSDP, policy=NO_REPLACING)
    played.dies(1)
    played.dies(3)
    played.answer()
    assert played.last_save().why == "no rank of [1, 3] lives: their state is lost"
    assert played.stage() is Stage.GIVEN_UP


def test_a_survivor_that_dies_after_its_report_saves_nothing():
    played = RunOutcome.of(HSDP, policy=NO_REPLACING)
    played.dies(1)
    played.reports(0)
    played.dies(0)
    played.answer()
    assert played.last_save().ranks == (2, 3)


def test_survivors_that_die_one_after_the_other_leave_nothing_to_wait_for():
    played = RunOutcome.of(policy=NO_REPLACING)
    for rank in range(4):
        played.dies(rank)
    assert played.last_save().step is None
    assert played.stage() is Stage.GIVEN_UP


@pytest.mark.parametrize("limit_s", [REPAIR_LIMIT_S / 2, REPAIR_LIMIT_S * 2])
def test_a_survivor_that_does_not_report_costs_the_last_save_only_some_time(limit_s):
    played = RunOutcome.of(policy=NO_REPLACING)
    played.attempt.save_limit_s = limit_s
    played.dies(1)
    played.answer(silent={3})
    assert played.passes(min(REPAIR_LIMIT_S, limit_s)) == []
    played.passes(0.1)
    assert played.stage() is Stage.SAVING, "rank 0 holds what rank 3 holds"
    played.answer(silent={3})
    assert played.last_save().step == STEP
    assert played.stage() is Stage.GIVEN_UP


def test_without_a_survivor_that_alone_holds_a_state_nothing_is_saved():
    played = RunOutcome.of(HSDP, policy=NO_REPLACING)
    dead, silent = HSDP[0]
    played.dies(dead)
    played.answer(silent={silent})
    played.passes(SAVE_LIMIT_S + 0.1)
    assert played.last_save().step is None
    assert played.stage() is Stage.GIVEN_UP


def test_savers_have_their_time_and_no_more():
    played = RunOutcome.of(policy=NO_REPLACING)
    played.dies(1)
    played.answer(until=is_plan)
    assert played.passes(SAVE_LIMIT_S) == []
    played.passes(0.1)
    assert played.last_save().why == "the survivors did not finish in time"
    assert played.stage() is Stage.GIVEN_UP


def test_a_last_save_does_not_wait_for_a_new_process_that_is_being_built():
    played = RunOutcome.of(HSDP)
    played.dies(1)
    played.answer(silent={1})
    played.starts(1)  # it has connected, and makes its model
    played.collect()
    played.dies(0, exit_code=1, error="ValueError: own")  # a fault that ends the processes
    played.answer(silent={1}, until=is_plan)
    assert played.stage() is Stage.SAVING
    assert played.plan().savers == (2, 3)


def test_a_new_process_alone_has_nothing_to_save():
    played = RunOutcome.of(((0, 1),))
    played.dies(1)
    played.starts(1)
    played.dies(0, exit_code=1, error="ValueError: own")
    assert (played.stage(), played.notes()[2:]) == (Stage.GIVEN_UP, [])


def test_damage_that_no_replica_mends_climbs_to_the_end():
    played = RunOutcome.of(ALONE)
    played.damaged(2)
    played.answer()
    assert played.rungs() == [Rung.STEP_RETRY, Rung.PROCESS_REPLACE]
    assert {note.why for note in played.ended()} == {"no rank that lives has the state of rank 2"}
    assert played.last_save().why == "no rank of [2] lives: their state is lost"
    assert played.stage() is Stage.GIVEN_UP


def test_damage_that_does_not_go_away_climbs_to_a_last_save_of_the_replicas():
    played = RunOutcome.of(HSDP)
    for _ in range(2):
        played.damaged(0)
        played.answer()
    played.damaged(0)
    played.answer()
    assert played.rungs() == [Rung.STEP_RETRY, Rung.PROCESS_REPLACE]
    assert (played.last_save().step, played.last_save().ranks) == (STEP, (1, 2))


def test_a_rank_that_ended_by_an_error_of_the_program_is_not_replaced():
    played = RunOutcome.of()
    played.dies(1, exit_code=1, error="ValueError: own")
    assert played.rungs() == []
    played.answer()
    assert played.last_save().step == STEP
    assert "user_code_error" in played.given_up()[0]


def test_a_recovery_that_a_fault_above_the_processes_cuts_short_is_noted_as_failed():
    played = RunOutcome.of(HSDP)
    played.damaged(0)
    played.dies(1, exit_code=1, error="ValueError: own")
    assert [note.succeeded for note in played.ended()] == [False]


# Pauses.


def stands(played: RunOutcome, *ranks: int, step: int = STEP) -> None:
    for rank in ranks:
        played.attempt.paused(rank, step, is_paused=True, now_s=played.now_s)
    played.collect()


def goes_on(played: RunOutcome, *ranks: int) -> None:
    for rank in ranks:
        played.attempt.paused(rank, STEP, is_paused=False, now_s=played.now_s)
    played.collect()


def test_a_wish_to_pause_is_told_to_all_ranks_once():
    played = RunOutcome.of()
    played.attempt.pause(wanted=True)
    assert played.collect() == [ToRank(rank, PauseRequest(wanted=True)) for rank in range(4)]
    played.attempt.pause(wanted=True)
    assert played.collect() == []
    played.attempt.pause(wanted=False)
    assert played.collect() == [ToRank(rank, PauseRequest(wanted=False)) for rank in range(4)]


@pytest.mark.parametrize("wanted", [True, False])
def test_a_rank_that_stands_is_told_whether_that_is_still_wanted(wanted):
    played = RunOutcome.of()
    played.attempt.pause(wanted=wanted)
    played.collect()
    stands(played, 2)
    assert played.told(2)[-1] == PauseRequest(wanted=wanted)


def test_a_new_process_learns_that_a_pause_is_wanted():
    played = RunOutcome.of()
    played.attempt.pause(wanted=True)
    played.dies(1)
    played.answer()
    assert PauseRequest(wanted=True) in played.told(1)[-3:]


def test_a_pause_begins_when_all_ranks_stand_and_ends_when_all_go_on():
    played = RunOutcome.of()
    stands(played, 0, 1, 2)
    assert played.pauses() == []
    stands(played, 3)
    assert played.pauses() == [PauseBegan(at_s=played.now_s, number=1, step=STEP)]
    goes_on(played, 0, 1, 2)
    assert len(played.pauses()) == 1
    played.now_s += 7
    goes_on(played, 3)
    assert played.pauses()[1] == PauseEnded(at_s=played.now_s, number=1, step=STEP)


def test_pauses_and_recoveries_have_numbers_of_their_own():
    played = RunOutcome.of()
    stands(played, *range(4))
    goes_on(played, *range(4))
    played.sees(2, WorkerFaultKind.COLLECTIVE)
    played.answer()
    stands(played, *range(4))
    assert [note.number for note in played.pauses()] == [1, 1, 3]
    assert played.began()[0].number == 2


def test_a_recovery_ends_a_pause_and_what_stands_after_it_is_another():
    played = RunOutcome.of()
    stands(played, *range(4), step=STEP + 3)
    played.dies(1)
    assert [type(note) for note in played.pauses()] == [PauseBegan, PauseEnded]
    assert {note.step for note in played.pauses()} == {STEP + 3}
    stands(played, 0)  # told before it heard of the new generation
    played.answer()
    stands(played, 1, 2, 3)
    assert len(played.pauses()) == 2
    stands(played, 0)
    assert [note.number for note in played.pauses()] == [1, 1, 3]


def test_a_pause_that_is_withdrawn_in_a_recovery_is_over():
    played = RunOutcome.of()
    played.attempt.pause(wanted=True)
    stands(played, *range(4))
    played.dies(1)
    played.attempt.pause(wanted=False)
    played.answer()
    stands(played, *range(4), step=STEP + 5)
    assert [(type(note), note.number) for note in played.pauses()] == [
        (PauseBegan, 1),
        (PauseEnded, 1),
        (PauseBegan, 3),
    ]


def test_a_dead_rank_does_not_stand():
    played = RunOutcome.of()
    stands(played, 0, 1, 2)
    played.dies(1)
    played.answer()
    stands(played, 0, 2, 3)
    assert played.pauses() == []
