"""The table of attempts and the picture, with what was recovered inside the processes."""

from __future__ import annotations

from dataclasses import replace

from perdure.training.journal.events import StepRecord
from perdure.training.reporting.facts import RecoveryFacts
from perdure.training.reporting.rows import loss_picture, num_kept, story_rows
from tests.unit.journal.histories import (
    CRASH_BEGAN,
    CRASH_FAILED,
    GOES_ON,
    LINK_BEGAN,
    LINK_RECOVERED,
    STANDS,
    history_of,
)

STEP = StepRecord(1, 2.0, 1.0, 1e-3, 1e5, None, 0.0, 0.5, 8, 0, 1, 1)


def test_a_recovery_inside_the_processes_is_a_row_below_its_attempt():
    history = history_of(LINK_BEGAN, LINK_RECOVERED, CRASH_BEGAN, CRASH_FAILED, has_ended=True)
    attempt, link, crash = story_rows(history)
    assert (attempt.generation, attempt.rung, attempt.outcome) == (
        None, "in_place_restart", "failed",
    )  # fmt: skip
    assert (link.generation, link.rung, link.outcome) == (1, "step_retry", "recovered")
    assert (crash.generation, crash.rung, crash.outcome) == (2, "process_replace", "not recovered")
    assert [row.nodes for row in (link, crash)] == ["node-1", "node-0"]
    assert link.fault == "link_down: EI0006"
    assert [(row.from_step, row.to_step) for row in (link, crash)] == [(10, 14), (14, 40)]
    assert (link.seconds_to_next_step, crash.seconds_to_next_step) == (0.62, None)


def test_a_recovery_that_goes_on_differs_from_one_that_its_attempt_cut_off():
    outcomes = [
        story_rows(history_of(LINK_BEGAN, has_ended=ended))[1].outcome for ended in (False, True)
    ]
    assert outcomes == ["recovering", "not recovered"]


def test_every_row_has_the_same_columns_whatever_it_shows():
    history = history_of(LINK_BEGAN, LINK_RECOVERED, STANDS, GOES_ON, has_ended=True)
    assert len(story_rows(history)) == 2, "a pause is no fault"


def test_the_facts_of_a_recovery_are_plain_values():
    view = history_of(LINK_BEGAN, LINK_RECOVERED, CRASH_BEGAN, CRASH_FAILED).attempts[0]
    link, crash = (RecoveryFacts.of(view, recovery).payload for recovery in view.recoveries)
    assert link == {
        "placement": 1, "attempt": 1, "number": 1, "generation": 1, "fault_class": "link_down",
        "evidence": "EI0006", "node": "node-1", "rank": 3, "rung": "step_retry",
        "reason": "link_down at rank 3 on node-1: step_retry",
        "step": 14, "steps_lost": 0, "duration_s": 0.62,
        "replaced": [], "repaired": [3], "succeeded": True, "sub_healthy": False,
        "outcome": "recovered", "why": "",
    }  # fmt: skip
    assert (crash["succeeded"], crash["why"]) == (False, "no replica of rank 1")
    assert (crash["step"], crash["duration_s"]) == (40, 1.5)


def test_the_picture_marks_recovered_faults_and_the_others():
    records = {step: replace(STEP, step=step, loss=10.0 / step) for step in range(1, 41)}
    plain = loss_picture(history_of(), records)
    marked = loss_picture(history_of(LINK_BEGAN, LINK_RECOVERED, has_ended=True), records)
    assert plain.startswith(b"\x89PNG")
    assert marked.startswith(b"\x89PNG")
    assert marked != plain


def test_a_thousand_recoveries_still_make_a_picture():
    many = [LINK_BEGAN.model_copy(update={"number": number}) for number in range(1, 1001)]
    assert loss_picture(history_of(*many), {1: STEP}).startswith(b"\x89PNG")


def test_steps_of_a_command_that_shows_every_tenth_are_all_counted():
    history = history_of()
    history.job = {"worker": {"command": ["train"]}}
    shown = {step: replace(STEP, step=step) for step in (20, 30, 40)}
    assert num_kept(history, shown) == 30, "it began at step 10"


def test_steps_before_the_first_of_the_run_are_not_counted_as_its_steps():
    history = history_of()
    records = {step: replace(STEP, step=step) for step in range(12, 21)}
    assert num_kept(history, records) == 10
