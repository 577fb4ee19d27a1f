"""Recoveries inside the processes and pauses, as a ledger tells them."""

from __future__ import annotations

import json

import pytest
from pydantic import TypeAdapter, ValidationError

from training.journal.events import EVENT, LedgerEvent
from training.journal.history import RunHistory, replay
from training.journal.records import (
    RECORD,
    AnyRecord,
    AttemptEnded,
    AttemptStarted,
    CheckpointSeen,
    Decided,
    EventSeen,
    FirstStep,
    Placed,
    RunCreated,
    RunEnded,
    SupervisorTook,
)
from training.recovery.decision import Decision, Recovery
from training.recovery.events import LastSave, PauseBegan, PauseEnded, RecoveryBegan, RecoveryEnded
from training.recovery.faults import Fault, FaultClass
from training.recovery.rungs import Rung

LINK = Fault(fault_class=FaultClass.LINK_DOWN, at_s=10.0, evidence="EI0006", step=14)
CRASH = Fault(fault_class=FaultClass.NATIVE_CRASH, at_s=30.0, evidence="SIGKILL", rank=3, step=40)
NOW = {"at_s": 0.0, "epoch": 1}


def began(number: int, rung: Rung = Rung.STEP_RETRY, *, at_s: float = 10.0) -> RecoveryBegan:
    return RecoveryBegan(
        at_s=at_s,
        number=number,
        generation=number,
        fault=LINK,
        decision=Decision(rung, None, "because"),
    )


def ended(number: int, step: int | None = 14, *, succeeded: bool = True) -> RecoveryEnded:
    return RecoveryEnded(
        at_s=11.0, number=number, generation=number + 1, succeeded=succeeded, step=step
    )


def seen(event: LedgerEvent, attempt: int = 1) -> EventSeen:
    return EventSeen(**NOW, placement=1, attempt=attempt, event=event)


def started(attempt: int, from_step: int = 10) -> AttemptStarted:
    return AttemptStarted(**NOW, placement=1, attempt=attempt, from_step=from_step)


def committed(step: int, attempt: int = 1) -> CheckpointSeen:
    return CheckpointSeen(**NOW, placement=1, attempt=attempt, step=step)


def failed(
    attempt: int, rung: Rung = Rung.IN_PLACE_RESTART, *, outcome="failed"
) -> list[AnyRecord]:
    return [
        AttemptEnded(
            **NOW, placement=1, attempt=attempt, outcome=outcome, to_step=40, proc_start_cnt={},
            fault=CRASH if outcome == "failed" else None, duration_s=5.0,
        ),
        *([Decided(**NOW, placement=1, attempt=attempt, decision=Decision(rung, None, "because"))]
          if outcome == "failed" else []),
    ]  # fmt: skip


def history_of(*records: AnyRecord) -> RunHistory:
    """The history of a run of which these are the records after its first attempt began."""
    return replay(
        [
            SupervisorTook(**NOW, supervisor="a", host="h", pid=1),
            RunCreated(**NOW, job={}),
            Placed(**NOW, placement=1, members=(), avoid=()),
            started(1),
            *records,
        ]
    )


def outlines(history: RunHistory) -> list[tuple[str, bool, bool]]:
    return [(one.rung.value, one.progressed, one.failed) for one in history.recoveries()]


@pytest.mark.parametrize(
    "event",
    [
        began(1),
        ended(1),
        LastSave(at_s=1.0, number=2, step=None, why="no replica of rank 3 lives"),
        PauseBegan(at_s=1.0, number=3, step=7),
        PauseEnded(at_s=2.0, number=3, step=7),
    ],
)
def test_every_event_goes_through_log_and_ledger_unchanged(event):
    record = seen(event)
    assert RECORD.validate_json(RECORD.dump_json(record)) == record
    assert EVENT.validate_json(EVENT.dump_json(event)) == event


def test_recoveries_inside_the_processes_come_before_the_one_that_ended_their_attempt():
    history = history_of(
        seen(began(1)), seen(ended(1)), seen(began(2, Rung.PROCESS_REPLACE)),
        seen(ended(2, succeeded=False)), *failed(1), started(2),
        seen(began(1, Rung.OPERATOR_RETRY), 2), seen(ended(1), 2),
    )  # fmt: skip
    assert [rung for rung, _, _ in outlines(history)] == [
        "step_retry", "process_replace", "in_place_restart", "operator_retry",
    ]  # fmt: skip
    assert [one.fault.fault_class.value for one in history.recoveries()] == [
        "link_down", "link_down", "native_crash", "link_down",
    ]  # fmt: skip


def test_a_recovery_that_goes_on_in_a_living_attempt_has_neither_failed_nor_progressed():
    assert outlines(history_of(seen(began(1)))) == [("step_retry", False, False)]


def test_a_recovery_that_came_to_grief_has_failed():
    history = history_of(seen(began(1)), seen(ended(1, None, succeeded=False)))
    assert outlines(history) == [("step_retry", False, True)]


def test_a_recovery_that_another_fault_cut_short_is_told_from_one_that_failed():
    cut = ended(1, None, succeeded=False).model_copy(update={"cut_short": True})
    history = history_of(
        seen(began(1)), seen(began(2, Rung.PROCESS_REPLACE)),
        seen(cut), seen(ended(2, None, succeeded=False)), *failed(1),
    )  # fmt: skip
    assert [one.cut_short for one in history.recoveries()] == [True, False, False]
    assert [one.cut_short for one in history.recoveries()] == [True, False, False]


@pytest.mark.parametrize("outcome", ["failed", "stopped"])
def test_a_recovery_whose_attempt_ended_first_has_failed(outcome):
    history = history_of(seen(began(1)), *failed(1, outcome=outcome))
    assert outlines(history)[0] == ("step_retry", False, True)


def test_an_end_that_was_lost_with_a_node_is_no_failure_of_a_completed_attempt():
    assert outlines(history_of(seen(began(1)), *failed(1, outcome="completed"))) == [
        ("step_retry", False, False)
    ]


def test_a_step_committed_after_a_recovery_is_progress():
    mended = [seen(began(1)), seen(ended(1, 14))]
    assert outlines(history_of(*mended, committed(15))) == [("step_retry", True, False)]


def test_a_save_from_before_the_fault_is_no_progress_when_it_is_committed_after_it():
    mended = [seen(began(1)), seen(ended(1, 14))]
    assert outlines(history_of(*mended, committed(14))) == [("step_retry", False, False)]


def test_the_order_of_notes_and_commits_in_the_ledger_does_not_matter():
    # A supervisor that takes over reads hours of an attempt at once.
    mended = [seen(began(1)), seen(ended(1, 14))]
    assert outlines(history_of(committed(20), *mended)) == [("step_retry", True, False)]


def test_only_recoveries_before_the_progress_are_free():
    history = history_of(
        seen(began(1)), seen(ended(1, 14)), committed(20), seen(began(2)), seen(ended(2, 25))
    )
    assert [progressed for _, progressed, _ in outlines(history)] == [True, False]


def test_what_the_survivors_save_after_a_failed_recovery_is_no_progress_of_it():
    history = history_of(
        seen(began(1)), seen(ended(1, 14, succeeded=False)),
        seen(LastSave(at_s=12.0, number=2, step=15)), *failed(1), committed(15),
    )  # fmt: skip
    assert outlines(history) == [("step_retry", False, True), ("in_place_restart", False, False)]
    assert history.attempts[0].last_save == LastSave(at_s=12.0, number=2, step=15)


def test_a_later_attempt_that_commits_a_new_step_makes_all_before_it_free():
    history = history_of(
        seen(began(1)), seen(ended(1, succeeded=False)), *failed(1), started(2, 14)
    )
    assert [progressed for _, progressed, _ in outlines(history)] == [False, False]
    history = history_of(
        seen(began(1)), seen(ended(1, succeeded=False)), *failed(1), started(2, 14),
        committed(20, attempt=2),
    )  # fmt: skip
    assert [progressed for _, progressed, _ in outlines(history)] == [True, True]


def test_an_attempt_that_saves_what_it_began_with_at_the_end_of_its_life_got_nowhere():
    again = [started(2, 14), *failed(2), committed(14, attempt=2)]
    assert [progressed for _, progressed, _ in outlines(history_of(*failed(1), *again))] == [
        False,
        False,
    ]


def test_what_an_attempt_began_with_is_told_by_its_first_step():
    # The nodes' memory had step 18, the store 14: a commit of 18 brings nothing new.
    first = FirstStep(**NOW, placement=1, attempt=2, step=19, stepped_s=0.0)
    history = history_of(*failed(1), started(2, 14), first, committed(18, attempt=2))
    assert [progressed for _, progressed, _ in outlines(history)] == [False]


def test_budgets_start_anew_for_recoveries_inside_the_processes_too():
    history = history_of(
        seen(began(1)), *failed(1, Rung.STOP), RunEnded(**NOW, outcome="failed", message="over")
    )
    assert history.recoveries() == []


def test_an_attempt_lists_its_recoveries_with_their_ends():
    history = history_of(seen(began(1)), seen(ended(1)), seen(began(2)))
    first, second = history.attempts[0].recoveries
    assert (first.began, first.ended, first.succeeded) == (began(1), ended(1), True)
    assert (second.began, second.ended, second.succeeded) == (began(2), None, False)


def test_an_end_without_its_beginning_says_nothing():
    history = history_of(seen(ended(7)), seen(PauseEnded(at_s=1.0, number=8, step=3)))
    assert history.attempts[0].recoveries == []
    assert history.attempts[0].pauses == []
    assert history.recoveries() == []


def test_a_run_is_paused_from_the_moment_all_ranks_stand_until_they_go_on():
    stands, goes_on = PauseBegan(at_s=1.0, number=1, step=7), PauseEnded(at_s=5.0, number=1, step=7)
    assert history_of().pause is None
    paused = history_of(seen(stands))
    assert paused.pause is not None
    assert paused.pause.began == stands
    resumed = history_of(seen(stands), seen(goes_on))
    assert resumed.pause is None
    assert [(one.began, one.ended) for one in resumed.attempts[0].pauses] == [(stands, goes_on)]


def test_nothing_that_has_ended_is_paused():
    stands = seen(PauseBegan(at_s=1.0, number=1, step=7))
    assert history_of(stands, *failed(1)).pause is None
    assert history_of(stands, *failed(1), started(2)).pause is None
    assert history_of(stands, RunEnded(**NOW, outcome="cancelled", message="")).pause is None


def test_a_past_recovery_fits_into_a_start_order():
    past = Recovery(fault=LINK, rung=Rung.STEP_RETRY, progressed=True)
    as_json = TypeAdapter(Recovery)
    assert as_json.validate_json(as_json.dump_json(past)) == past


@pytest.mark.parametrize("embedded", ["fault", "decision"])
def test_an_unknown_field_inside_of_an_embedded_fault_or_decision_is_an_error(embedded):
    document = json.loads(began(1).model_dump_json())
    assert EVENT.validate_python(document) == began(1)
    document[embedded]["invented"] = 1
    with pytest.raises(ValidationError, match="invented"):
        EVENT.validate_python(document)
