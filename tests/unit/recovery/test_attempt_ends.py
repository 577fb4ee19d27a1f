"""The life of an attempt: how it begins and ends, the last save, and pauses."""

from __future__ import annotations

import pytest

from perdure.training.recovery.actions import ToAgent, ToRank
from perdure.training.recovery.faults import FaultClass
from perdure.training.recovery.protocol import (
    AttemptGivenUp,
    GiveUp,
    LastSave,
    LastSaved,
    NewGeneration,
    PauseBegan,
    PauseEnded,
    PauseRequest,
    WorkerFaultKind,
)
from perdure.training.recovery.reactions import CONNECTION_SETTLE_S
from perdure.training.recovery.repair import RepairMode
from perdure.training.recovery.rungs import Policy
from perdure.training.recovery.stages import Stage
from perdure.training.recovery.stimuli import (
    LastSaveReported,
    LoopEnded,
    PauseWanted,
    RankConnected,
    RankDisconnected,
    RankPaused,
)
from tests.unit.recovery.attempts import (
    ALONE,
    EIGHT,
    HSDP,
    REPAIR_LIMIT_S,
    SAVE_LIMIT_S,
    STEP,
    AttemptHarness,
    is_plan,
)

NO_REPLACING = Policy(process_replace=False)


# Beginning and end.


def test_a_death_before_all_ranks_train_ends_the_attempt():
    harness = AttemptHarness.of(is_training=False)
    for rank in (0, 1, 2):
        harness.trains(rank)
    actions = harness.kill(3)
    why = "rank 3 ended while the attempt was starting"
    assert actions[5:] == [
        *(ToRank(rank, GiveUp(why=why)) for rank in (0, 1, 2)),
        ToAgent(None, GiveUp(why=why)),
    ]
    assert harness.stage() is Stage.GIVEN_UP


def test_a_rank_that_comes_too_late_learns_that_all_is_over():
    harness = AttemptHarness.of(is_training=False)
    harness.kill(3)
    harness.collect()
    harness.handle(RankConnected(3))
    (action,) = harness.collect()
    assert isinstance(action, ToRank)
    assert isinstance(action.message, GiveUp)


def test_ranks_that_have_ended_are_not_replaced(harness):
    for rank in range(4):
        harness.handle(LoopEnded(rank))
        harness.handle(RankDisconnected(rank))
    assert harness.stage() is Stage.ENDING
    assert harness.advance(1000.0) == []


def test_nothing_is_recovered_once_a_rank_came_to_its_end(harness):
    harness.handle(LoopEnded(0))
    harness.kill(2)
    assert (harness.rungs(), harness.stage()) == ([], Stage.GIVEN_UP)


@pytest.mark.parametrize("kind", [WorkerFaultKind.CONNECTION, WorkerFaultKind.COLLECTIVE])
@pytest.mark.parametrize("is_fault_first", [True, False])
def test_a_rank_with_a_fault_is_not_left_waiting_when_others_came_to_their_end(
    harness, kind, is_fault_first
):
    if is_fault_first:
        harness.worker_fault(2, kind)
    harness.handle(LoopEnded(0))
    if not is_fault_first:
        harness.worker_fault(2, kind)
    harness.collect()
    assert isinstance(harness.sent_to(2)[-1], GiveUp)
    assert harness.advance(CONNECTION_SETTLE_S * 2) == []


def test_a_recovery_that_a_rank_has_left_by_its_end_is_given_up_at_once(harness):
    harness.worker_fault(2, WorkerFaultKind.COLLECTIVE)
    harness.handle(LoopEnded(0))
    harness.collect()
    assert [event.succeeded for event in harness.ended()] == [False]
    assert harness.given_up() == ["rank 0 came to its end: no generation has all ranks any more"]


def test_after_giving_up_nothing_more_is_done():
    harness = AttemptHarness.of(is_training=False)
    harness.kill(3)
    harness.kill(2)
    assert harness.worker_fault(1, WorkerFaultKind.MEMORY) == []
    assert harness.kill(1, is_reported=False) == []
    assert harness.advance(1000.0) == []


def test_a_worker_fault_that_waits_for_an_explanation_is_forgotten_when_all_is_given_up():
    policy = Policy(process_replace=False, end_of_life_checkpoint=False)
    harness = AttemptHarness.of(policy=policy)
    harness.worker_fault(2, WorkerFaultKind.COLLECTIVE)
    harness.advance(REPAIR_LIMIT_S - 1)
    harness.worker_fault(0, WorkerFaultKind.REPAIR)
    harness.kill(1, is_reported=False)
    harness.advance(2)  # too late for the reports; how rank 1 ended is not known yet
    assert harness.stage() is Stage.GIVEN_UP
    harness.kill(1)
    assert harness.advance(1000) == []
    assert harness.stage() is Stage.GIVEN_UP


# The last save.


@pytest.fixture
def saving() -> AttemptHarness:
    """Rank 1 has ended and is not replaced; ranks 0 and 3 are to save."""
    harness = AttemptHarness.of(HSDP, policy=NO_REPLACING)
    harness.kill(1)
    harness.answer(until=is_plan)
    return harness


def test_survivors_save_one_rank_of_each_group_when_their_processes_are_to_be_lost():
    harness = AttemptHarness.of(EIGHT, policy=NO_REPLACING)
    harness.kill(1)
    assert (harness.rungs(), harness.replaced()) == ([], [])
    assert [harness.sent_to(rank) for rank in (0, 2, 3, 4, 5, 6, 7)] == [
        [NewGeneration(number=2)]
    ] * 7
    assert harness.sent_to(1) == []
    harness.answer(until=is_plan)
    assert (harness.plan().mode, harness.plan().savers) == (RepairMode.LAST_SAVE, (0, 5, 2, 3))
    harness.answer()
    saved = harness.last_save()
    assert (saved.step, saved.ranks, saved.why) == (STEP, (0, 2, 3, 5), "")
    assert harness.stage() is Stage.GIVEN_UP
    assert harness.given_up()[0].startswith("native_crash at rank 1")


def test_an_attempt_is_over_only_when_all_savers_are_done(saving):
    for rank in (2, 0):
        assert saving.stage() is Stage.SAVING
        saving.handle(LastSaveReported(rank, LastSaved(step=STEP)))
    assert saving.stage() is Stage.SAVING, "rank 2 saves nothing, and rank 3 is not done"
    saving.handle(LastSaveReported(3, LastSaved(step=STEP)))
    assert saving.stage() is Stage.GIVEN_UP


def test_the_policy_may_have_no_last_save():
    harness = AttemptHarness.of(policy=Policy(process_replace=False, end_of_life_checkpoint=False))
    harness.kill(1)
    assert harness.stage() is Stage.GIVEN_UP


def saver_ends(harness: AttemptHarness) -> None:
    harness.kill(0)


def saver_cannot_write(harness: AttemptHarness) -> None:
    report = LastSaved(step=STEP, problem="rank 3: the disk is full")
    harness.handle(LastSaveReported(3, report))
    harness.collect()


def time_is_over(harness: AttemptHarness) -> None:
    assert harness.advance(SAVE_LIMIT_S) == []
    harness.advance(0.1)


@pytest.mark.parametrize(
    ("fails", "why"),
    [
        (saver_ends, "rank 0 ended while it saved"),
        (saver_cannot_write, "rank 3: the disk is full"),
        (time_is_over, "the survivors did not finish in time"),
    ],
)
def test_a_last_save_that_one_saver_does_not_finish_fails_and_names_the_reason(saving, fails, why):
    fails(saving)
    assert (saving.last_save().step, saving.last_save().why) == (None, why)
    assert saving.stage() is Stage.GIVEN_UP


def test_a_saver_that_ends_after_its_part_is_done_is_no_failure(saving):
    saving.handle(LastSaveReported(0, LastSaved(step=STEP)))
    saving.kill(0)
    saving.kill(2)
    saving.handle(LastSaveReported(3, LastSaved(step=STEP)))
    saving.collect()
    assert saving.last_save().step == STEP


def test_a_state_that_died_with_its_last_holder_is_not_saved():
    harness = AttemptHarness.of(HSDP, policy=NO_REPLACING)
    harness.kill(1)
    harness.kill(3)
    harness.answer()
    assert harness.last_save().why == "no rank of [1, 3] lives: their state is lost"
    assert harness.stage() is Stage.GIVEN_UP


def test_a_survivor_that_ends_after_its_report_saves_nothing():
    harness = AttemptHarness.of(HSDP, policy=NO_REPLACING)
    harness.kill(1)
    harness.reports(0)
    harness.kill(0)
    harness.answer()
    assert harness.last_save().ranks == (2, 3)


def test_survivors_that_die_one_after_the_other_leave_nothing_to_wait_for():
    harness = AttemptHarness.of(policy=NO_REPLACING)
    for rank in range(4):
        harness.kill(rank)
    assert harness.last_save().step is None
    assert harness.stage() is Stage.GIVEN_UP


@pytest.mark.parametrize("limit_s", [REPAIR_LIMIT_S / 2, REPAIR_LIMIT_S * 2])
def test_a_survivor_that_does_not_report_costs_the_last_save_only_some_time(limit_s):
    harness = AttemptHarness.of(policy=NO_REPLACING, save_limit_s=limit_s)
    harness.kill(1)
    harness.answer(silent={3})
    assert harness.advance(min(REPAIR_LIMIT_S, limit_s)) == []
    harness.advance(0.1)
    assert harness.stage() is Stage.SAVING, "rank 0 holds what rank 3 holds"
    harness.answer(silent={3})
    assert harness.last_save().step == STEP
    assert harness.stage() is Stage.GIVEN_UP


def test_without_a_survivor_that_alone_holds_a_state_nothing_is_saved():
    harness = AttemptHarness.of(HSDP, policy=NO_REPLACING)
    dead, silent = HSDP[0]
    harness.kill(dead)
    harness.answer(silent={silent})
    harness.advance(SAVE_LIMIT_S + 0.1)
    assert harness.last_save().step is None
    assert harness.stage() is Stage.GIVEN_UP


def test_a_last_save_does_not_wait_for_a_new_process_that_is_being_built(sharded):
    sharded.kill(1)
    sharded.answer(silent={1})
    sharded.start(1)  # it has connected, and makes its model
    sharded.collect()
    sharded.kill(0, exit_code=1, error="ValueError: own")  # a fault that ends the processes
    sharded.answer(silent={1}, until=is_plan)
    assert sharded.stage() is Stage.SAVING
    assert sharded.plan().savers == (2, 3)


def test_a_new_process_alone_has_nothing_to_save():
    harness = AttemptHarness.of(((0, 1),))
    harness.kill(1)
    harness.start(1)
    harness.kill(0, exit_code=1, error="ValueError: own")
    assert harness.stage() is Stage.GIVEN_UP
    assert not harness.events(LastSave)


def test_damage_that_no_replica_repairs_ends_the_processes_at_once():
    harness = AttemptHarness.of(ALONE)
    harness.memory_fault(2)
    harness.answer()
    assert harness.rungs() == [], "nothing is tried that cannot succeed"
    assert "no replica: no other rank has the state of rank 2" in harness.given_up()[0]
    assert harness.last_save().why == "no rank of [2] lives: their state is lost"
    assert harness.stage() is Stage.GIVEN_UP


def test_a_dead_rank_is_not_replaced_where_no_other_has_its_state():
    harness = AttemptHarness.of(ALONE)
    harness.kill(2)
    harness.answer()
    assert harness.replaced() == []
    (event,) = harness.events(AttemptGivenUp)
    assert (event.fault.fault_class, event.fault.rank) == (FaultClass.NATIVE_CRASH, 2)
    assert event.why == (
        "native_crash at rank 2 on node-1: in_place_restart "
        "(process_replace: no replica: no other rank has the state of rank 2)"
    )


@pytest.mark.parametrize("has_reported", [False, True])
def test_the_second_of_two_replicas_is_not_replaced_by_the_first_that_has_no_state_yet(
    sharded, has_reported
):
    sharded.kill(0)
    if has_reported:
        sharded.answer(until=is_plan)
        sharded.skip_unanswered()
    else:
        sharded.start(0)
    sharded.kill(2)
    sharded.answer()
    assert sharded.replaced() == [0]
    (event,) = sharded.events(AttemptGivenUp)
    assert event.fault.rank == 2
    assert "process_replace: no replica of rank 2 is left: [0] lost theirs" in event.why


def test_the_fault_of_a_rank_that_was_replaced_is_on_record_when_all_are_given_up(harness):
    harness.kill(1)
    harness.answer(silent=(1,))
    harness.advance(REPAIR_LIMIT_S + 1)
    (event,) = harness.events(AttemptGivenUp)
    assert (event.fault.fault_class, event.fault.rank) == (FaultClass.NATIVE_CRASH, 1)
    assert "process_replace: the last one failed" in event.why


def test_only_the_first_fault_that_ends_an_attempt_is_on_record():
    harness = AttemptHarness.of(is_training=False)
    for rank in (3, 2):
        harness.kill(rank)
    (event,) = harness.events(AttemptGivenUp)
    assert (event.fault.rank, event.why) == (3, "rank 3 ended while the attempt was starting")


def test_the_end_of_a_rank_that_came_to_the_end_of_its_loop_is_no_fault(harness):
    harness.handle(LoopEnded(0))
    harness.kill(0, exit_code=75)
    assert harness.stage() is Stage.GIVEN_UP
    assert not harness.events(AttemptGivenUp)


def test_a_rank_that_ended_by_an_error_of_the_program_is_not_replaced(harness):
    harness.kill(1, exit_code=1, error="TypeError: own")
    assert harness.rungs() == []
    harness.answer()
    assert harness.last_save().step == STEP
    assert "user_code_error" in harness.given_up()[0]


def test_a_recovery_that_a_fault_above_the_processes_cuts_short_is_recorded_as_failed(sharded):
    sharded.memory_fault(0)
    sharded.kill(1, exit_code=1, error="ValueError: own")
    assert [event.succeeded for event in sharded.ended()] == [False]


# Pauses.


def pause_ranks(harness: AttemptHarness, *ranks: int, step: int = STEP) -> None:
    for rank in ranks:
        harness.handle(RankPaused(rank, step, is_paused=True))
    harness.collect()


def goes_on(harness: AttemptHarness, *ranks: int) -> None:
    for rank in ranks:
        harness.handle(RankPaused(rank, STEP, is_paused=False))
    harness.collect()


def test_a_pause_request_goes_to_all_ranks_once(harness):
    harness.handle(PauseWanted(True))
    assert harness.collect() == [ToRank(rank, PauseRequest(wanted=True)) for rank in range(4)]
    harness.handle(PauseWanted(True))
    assert harness.collect() == []
    harness.handle(PauseWanted(False))
    assert harness.collect() == [ToRank(rank, PauseRequest(wanted=False)) for rank in range(4)]


@pytest.mark.parametrize("wanted", [True, False])
def test_a_paused_rank_learns_whether_the_pause_is_still_wanted(harness, wanted):
    harness.handle(PauseWanted(wanted))
    harness.collect()
    pause_ranks(harness, 2)
    assert harness.sent_to(2)[-1] == PauseRequest(wanted=wanted)


def test_a_new_process_learns_that_a_pause_is_wanted(harness):
    harness.handle(PauseWanted(True))
    harness.kill(1)
    harness.answer()
    assert PauseRequest(wanted=True) in harness.sent_to(1)[-3:]


def test_a_pause_begins_when_all_ranks_are_paused_and_ends_when_all_continue(harness):
    pause_ranks(harness, 0, 1, 2)
    assert harness.pauses() == []
    pause_ranks(harness, 3)
    assert harness.pauses() == [PauseBegan(at_s=harness.now_s, number=1, step=STEP)]
    goes_on(harness, 0, 1, 2)
    assert len(harness.pauses()) == 1
    harness.now_s += 7
    goes_on(harness, 3)
    assert harness.pauses()[1] == PauseEnded(at_s=harness.now_s, number=1, step=STEP)


def test_pauses_and_recoveries_have_numbers_of_their_own(harness):
    pause_ranks(harness, *range(4))
    goes_on(harness, *range(4))
    harness.worker_fault(2, WorkerFaultKind.COLLECTIVE)
    harness.answer()
    pause_ranks(harness, *range(4))
    assert [event.number for event in harness.pauses()] == [1, 1, 3]
    assert harness.began()[0].number == 2


def test_a_recovery_ends_a_pause_and_the_one_after_it_is_another(harness):
    pause_ranks(harness, *range(4), step=STEP + 3)
    harness.kill(1)
    assert [type(event) for event in harness.pauses()] == [PauseBegan, PauseEnded]
    assert {event.step for event in harness.pauses()} == {STEP + 3}
    pause_ranks(harness, 0)  # reported before it received the new generation
    harness.answer()
    pause_ranks(harness, 1, 2, 3)
    assert len(harness.pauses()) == 2
    pause_ranks(harness, 0)
    assert [event.number for event in harness.pauses()] == [1, 1, 3]


def test_a_pause_that_is_withdrawn_in_a_recovery_is_over(harness):
    harness.handle(PauseWanted(True))
    pause_ranks(harness, *range(4))
    harness.kill(1)
    harness.handle(PauseWanted(False))
    harness.answer()
    pause_ranks(harness, *range(4), step=STEP + 5)
    assert [(type(event), event.number) for event in harness.pauses()] == [
        (PauseBegan, 1),
        (PauseEnded, 1),
        (PauseBegan, 3),
    ]


def test_a_dead_rank_is_not_paused(harness):
    pause_ranks(harness, 0, 1, 2)
    harness.kill(1)
    harness.answer()
    pause_ranks(harness, 0, 2, 3)
    assert harness.pauses() == []
