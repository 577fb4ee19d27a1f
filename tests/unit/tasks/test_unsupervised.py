"""What is done about a run that nobody supervises, for every state that its flow run may show."""

from __future__ import annotations

import pytest
from prefect.client.schemas.objects import StateType

from perdure.tasks.unsupervised import (
    LEFT_OVER_PAUSE_S,
    MAX_FAILED_STARTS,
    ROWS,
    FlowRunFacts,
    Remedy,
    failed_starts,
    pause_after,
    remedy_for,
)
from perdure.training.journal.history import RunHistory, replay
from perdure.training.journal.records import RunEnded
from tests.unit.journal.histories import BEGINNING, END, TAKEN

NOW_S = 10_000.0
ALIVE = replay(BEGINNING)
BETWEEN = replay([*BEGINNING, *END])


def over() -> RunHistory:
    ended = RunEnded(at_s=1.0, epoch=1, outcome="cancelled", message="")
    return replay([*BEGINNING, *END, ended])


def about(
    history: RunHistory,
    state: str | None,
    *,
    ago_s: float = 3600.0,
    supervised: bool = False,
    deployed: bool = True,
    failed: int = 0,
    renewed_s: float = 0.0,
) -> Remedy:
    facts = FlowRunFacts(state, NOW_S - ago_s, deployed, failed) if state is not None else None
    return remedy_for(
        history, supervised=supervised, renewed_s=renewed_s, flow_run=facts, now_s=NOW_S
    )


def test_every_state_that_prefect_has_is_answered():
    assert set(ROWS) == {kind.value for kind in StateType}


@pytest.mark.parametrize("state", [None, *ROWS])
def test_a_run_that_is_supervised_or_over_is_left_alone(state):
    assert about(ALIVE, state, supervised=True) is Remedy.NOTHING
    assert about(over(), state) is Remedy.NOTHING


@pytest.mark.parametrize("state", [state for state in ROWS if state != "SCHEDULED"])
def test_whatever_its_flow_run_shows_a_living_attempt_is_taken_care_of(state):
    wanted = Remedy.TAKE_DOWN if state.startswith("CANCEL") else Remedy.RESCHEDULE
    assert about(ALIVE, state) is wanted
    assert about(ALIVE, state, ago_s=ROWS[state].patience_s - 1) is Remedy.NOTHING
    assert about(ALIVE, state, renewed_s=NOW_S - 10) is Remedy.NOTHING, "it lived a moment ago"


def test_a_living_attempt_whose_flow_run_was_deleted_gets_a_new_one():
    assert about(ALIVE, None) is Remedy.START
    assert about(BETWEEN, None) is Remedy.NOTHING
    assert about(ALIVE, None, renewed_s=NOW_S - 10) is Remedy.NOTHING


@pytest.mark.parametrize("state", ["CANCELLING", "CANCELLED"])
def test_only_the_flow_run_that_the_ledger_names_has_a_living_run_taken_down(state):
    facts = FlowRunFacts(state, NOW_S - 3600, is_deployed=True, speaks_for_run=False)
    for history, wanted in ((ALIVE, Remedy.START), (BETWEEN, Remedy.NOTHING)):
        remedy = remedy_for(
            history, supervised=False, renewed_s=0.0, flow_run=facts, now_s=NOW_S
        )  # fmt: skip
        assert remedy is wanted


def test_a_living_attempt_of_a_run_that_no_worker_can_start_gets_a_deployed_flow_run():
    assert about(ALIVE, "CRASHED", deployed=False) is Remedy.START
    assert about(BETWEEN, "CRASHED", deployed=False) is Remedy.NOTHING


def test_where_nothing_lives_only_what_was_interrupted_is_started_again():
    remedies = {state: about(BETWEEN, state) for state in ROWS}
    assert {state for state, one in remedies.items() if one is Remedy.RESCHEDULE} == {
        "PENDING", "RUNNING", "CRASHED"
    }  # fmt: skip
    assert {state for state, one in remedies.items() if one is Remedy.TAKE_DOWN} == {
        "CANCELLING", "CANCELLED"
    }  # fmt: skip


def test_a_flow_run_whose_starts_fail_in_a_row_is_given_up():
    assert about(BETWEEN, "CRASHED", failed=MAX_FAILED_STARTS - 1) is Remedy.RESCHEDULE
    assert about(BETWEEN, "CRASHED", failed=MAX_FAILED_STARTS) is Remedy.GIVE_UP
    assert about(BETWEEN, "CRASHED", failed=MAX_FAILED_STARTS, ago_s=1) is Remedy.GIVE_UP, (
        "before the automation starts it once more"
    )
    assert about(BETWEEN, "SCHEDULED", failed=MAX_FAILED_STARTS) is Remedy.NOTHING, (
        "a user has it retried"
    )
    assert about(BETWEEN, "FAILED", failed=MAX_FAILED_STARTS) is Remedy.NOTHING


def test_a_living_attempt_is_tried_again_ever_less_often():
    assert about(ALIVE, "CRASHED", failed=MAX_FAILED_STARTS) is Remedy.GIVE_UP
    pauses = [pause_after(failed) for failed in range(MAX_FAILED_STARTS, 40)]
    assert pauses[:3] == [60.0, 120.0, 240.0]
    assert max(pauses) == 3600.0
    for failed in (MAX_FAILED_STARTS, MAX_FAILED_STARTS + 2):
        wait_s = pause_after(failed)
        assert about(ALIVE, "FAILED", failed=failed, ago_s=wait_s - 1) is Remedy.NOTHING
        assert about(ALIVE, "FAILED", failed=failed, ago_s=wait_s) is Remedy.RESCHEDULE


def start(at_s: float, *, lasted_s: float = 5.0, end: str = "CRASHED") -> list[tuple[str, float]]:
    return [
        ("SCHEDULED", at_s - 2), ("PENDING", at_s - 1), ("PENDING", at_s - 1),
        ("RUNNING", at_s), (end, at_s + lasted_s),
    ]  # fmt: skip


def test_starts_count_that_bring_nothing_new_and_do_not_last():
    three = [*start(100), *start(200), *start(300, end="FAILED")]
    assert failed_starts(three, advanced_s=50) == 3
    assert failed_starts([*three, ("FAILED", 400)], advanced_s=50) == 3, "an end counts once"
    assert failed_starts(three, advanced_s=220) == 1, "the second one put something on record"
    assert failed_starts(three, advanced_s=305) == 0
    steady = [*start(100), *start(200, lasted_s=400), *start(700)]
    assert failed_starts(steady, advanced_s=50) == 1
    unborn = [("SCHEDULED", 1.0), ("PENDING", 2.0), ("CRASHED", 3.0)] * 4
    assert failed_starts(unborn, advanced_s=0) == 4, "its process does not get as far as Running"
    assert failed_starts([], advanced_s=0) == 0


def test_a_mere_start_does_not_advance_the_ledger():
    before = replay(BEGINNING).advanced_s
    again = TAKEN.model_copy(update={"at_s": before + 100, "epoch": 2})
    assert replay([*BEGINNING, again]).advanced_s == before


@pytest.mark.parametrize("state", [None, *ROWS])
def test_what_an_ended_run_has_leftovers_is_taken_down_every_ten_minutes(state):
    history = over()
    assert history.ended is not None
    leftovers = history.ended.model_copy(update={"leftovers": "pods/a: forbidden"})
    for ago_s, wanted in (
        (LEFT_OVER_PAUSE_S - 1, Remedy.NOTHING),
        (LEFT_OVER_PAUSE_S, Remedy.CLEAR),
    ):
        history.ended = leftovers.model_copy(update={"at_s": NOW_S - ago_s})
        assert about(history, state) is wanted
        assert about(history, state, supervised=True) is Remedy.NOTHING
