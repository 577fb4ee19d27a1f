"""A run in few words: right at every moment of its life."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perdure.training.journal.history import replay
from perdure.training.journal.records import RunCreated, RunEnded
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.rungs import Rung
from perdure.training.reporting.rows import story_rows
from perdure.training.reporting.summary import (
    attempts_table,
    attempts_title,
    faults_by_class,
    final_message,
)
from tests.unit.journal.histories import (
    BEGINNING,
    CRASH,
    CRASH_BEGAN,
    CRASH_FAILED,
    GOES_ON,
    LINK_BEGAN,
    LINK_RECOVERED,
    NOW,
    SKIPPED,
    STANDS,
    began,
    decided,
    over,
    seen,
    started,
    stepped,
)

TRAINS = stepped(1, 11)
FAILED = (TRAINS, over(), decided())


def ended(outcome: str) -> RunEnded:
    return RunEnded(**NOW, outcome=outcome, message="")


TITLES = {
    "a first attempt starts": ((), "Attempt 1.1 is starting"),
    "a healthy first attempt": ((TRAINS,), "Attempt 1.1 is training"),
    "recovering inside": ((TRAINS, *seen(LINK_BEGAN)), "Attempt 1.1 is recovering"),
    "recovered inside": ((TRAINS, *seen(LINK_BEGAN, LINK_RECOVERED)), "Attempt 1.1 is training"),
    "paused": ((TRAINS, *seen(STANDS)), "Attempt 1.1 is paused"),
    "resumed": ((TRAINS, *seen(STANDS, GOES_ON)), "Attempt 1.1 is training"),
    "failed, not decided": ((TRAINS, over()), "Attempt 1.1 failed (native_crash), to be decided"),
    "failed and decided": (
        FAILED,
        "Attempt 1.1 failed (native_crash), the answer is in_place_restart",
    ),
    "one trains after a failed one": (
        (*FAILED, started(2), stepped(2, 41)),
        "Attempt 1.2 is training, after 1 failed attempt",
    ),
    "cancelled in a recovery": ((*FAILED, ended("cancelled")), "Cancelled after 1 attempt"),
    "completed": (
        (*FAILED, started(2), over(2, "completed"), ended("completed")),
        "Completed after 2 attempts",
    ),
    "an attempt stopped": ((TRAINS, over(1, "stopped")), "Attempt 1.1 has stopped"),
}


@pytest.mark.parametrize("moment", TITLES)
def test_the_title_of_the_attempts_is_right_at_every_moment(moment):
    records, title = TITLES[moment]
    assert attempts_title(replay([*BEGINNING, *records])) == title


def test_before_any_attempt_the_title_says_so():
    assert attempts_title(replay(BEGINNING[:2])) == "No attempt yet"
    end = replay([*BEGINNING[:2], ended("failed")])
    assert attempts_title(end) == "Failed before any attempt"


def test_the_steps_of_a_command_are_not_known_so_it_is_running():
    job = RunCreated(**NOW, job={"worker": {"command": ["true"]}})
    history = replay([BEGINNING[0], job, *BEGINNING[2:]])
    assert attempts_title(history) == "Attempt 1.1 is running"


def test_every_state_has_its_row():
    history = replay([*BEGINNING, *FAILED, *seen(LINK_BEGAN, LINK_RECOVERED), started(2)])
    first, inside, second = attempts_table(story_rows(history))
    assert (first["attempt"], first["state"], first["answer"]) == (
        "1.1",
        "failed",
        "in_place_restart",
    )
    assert (inside["attempt"], inside["state"]) == ("1.1, generation 1", "recovered")
    assert (second["attempt"], second["state"], second["steps"]) == ("1.2", "starting", "from 10")
    assert all(isinstance(value, str) for value in first.values()), "nothing is shown as null"


def test_the_last_message_has_steps_faults_by_class_nodes_and_ettr():
    isolating = decided(1, Rung.POD_RESCHEDULE, isolate="node-1")
    inside = seen(LINK_BEGAN, LINK_RECOVERED, CRASH_BEGAN, CRASH_FAILED)
    history = replay([*BEGINNING, *inside, TRAINS, over(), isolating, started(2)])
    assert final_message("step 60 reached", history, ettr=0.914) == (
        "step 60 reached; 2 attempts on 1 placement; faults: 1 link_down and 1 native_crash; "
        "isolated: node-1; ETTR 91.4%"
    )
    assert final_message("step 60 reached", replay(BEGINNING), ettr=None) == (
        "step 60 reached; 1 attempt on 1 placement; no fault; no node isolated"
    )


def test_a_fault_that_was_not_recovered_inside_the_processes_is_counted_once():
    history = replay([*BEGINNING, *seen(CRASH_BEGAN, CRASH_FAILED), over(), decided()])
    assert faults_by_class(history).total() == 1


def test_the_last_message_says_what_was_abnormal():
    history = replay([*BEGINNING, *seen(SKIPPED), TRAINS])
    assert final_message("step 60 reached", history, ettr=0.914) == (
        "step 60 reached; 1 attempt on 1 placement; no fault; no node isolated; 1 abnormal step, "
        "1 batch skipped, the newest at step 13: loss 4.5, gradient norm no number; ETTR 91.4%"
    )


NODE = Fault(FaultClass.NODE_LOST, 30.0, "the agent of n1 is gone", node="n1")


@pytest.mark.parametrize(
    ("inside", "end", "number"),
    [
        (None, NODE, 1),
        (None, replace(NODE, num_other_nodes=1), 2),
        (None, replace(NODE, num_other_nodes=2), 3),
        (NODE, NODE, 1),
        (NODE, replace(NODE, node="n2"), 2),
        (NODE, replace(NODE, node="n2", num_other_nodes=1), 2),
        (NODE, replace(NODE, node=None), 1),
        (CRASH, replace(CRASH, node="n7"), 1),
    ],
    ids=str,
)
def test_each_node_that_is_lost_is_a_fault(inside, end, number):
    events = seen(began(1, Rung.NODE_REPLACE, inside)) if inside is not None else []
    history = replay([*BEGINNING, *events, over(fault=end)])
    assert faults_by_class(history).total() == number
