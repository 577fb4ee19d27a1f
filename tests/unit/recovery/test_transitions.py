"""The table of an attempt's reactions: nothing is missing in it, and nothing is beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.training.recovery.protocol import LastSaved
from perdure.training.recovery.reactions import METHODS
from perdure.training.recovery.stages import Stage, State
from perdure.training.recovery.stimuli import STIMULI, LastSaveReported, ProcessEnded, RankTrains
from perdure.training.recovery.transitions import (
    BECOMES,
    LEADS_TO,
    REACTIONS,
    Reaction,
    name_of,
    reaction_to,
    states_after,
    transitions_markdown,
)

PAGE = Path(__file__).parents[3] / "docs" / "architecture.md"
WITHOUT_METHOD = {Reaction.IGNORE, Reaction.REFUSE}


def test_every_stimulus_has_one_reaction_in_every_state():
    assert list(REACTIONS) == list(STIMULI), (
        "training/recovery/transitions.py: REACTIONS needs each stimulus, in their order"
    )
    for stimulus, row in REACTIONS.items():
        assert list(row) == list(State), f"{name_of(stimulus)} needs a reaction in each state"


def test_every_reaction_answers_something_and_has_its_method():
    used = {reaction for row in REACTIONS.values() for reaction in row.values()}
    assert used == set(Reaction)
    assert set(METHODS) == set(Reaction) - WITHOUT_METHOD, (
        "training/recovery/reactions.py needs a method for each reaction"
    )


def test_only_a_reaction_with_a_method_leads_anywhere():
    assert {*LEADS_TO, *BECOMES} <= set(METHODS)


def test_names_of_stimuli_are_those_of_their_classes():
    for stimulus in STIMULI:
        assert name_of(stimulus).replace("_", "") == stimulus.__name__.lower()


def test_every_state_can_be_reached_and_all_but_the_last_can_be_left():
    reached, size = {State.STARTING}, 0
    while len(reached) > size:
        size = len(reached)
        reached |= {
            after
            for state in tuple(reached)
            for stimulus in STIMULI
            if reaction_to(stimulus, state) is not Reaction.REFUSE
            for after in states_after(stimulus, state)
        }
    assert reached == set(State)
    for state in State:
        goes_on = any(states_after(stimulus, state) != {state} for stimulus in STIMULI)
        assert goes_on == (state is not State.GIVEN_UP)


def test_a_stimulus_may_lead_to_what_it_becomes_leads_to():
    assert State.GATHERING in states_after(ProcessEnded, State.TRAINING)
    assert State.RECONNECTING not in states_after(ProcessEnded, State.TRAINING)
    after_early_fault = states_after(RankTrains, State.STARTING)
    assert {State.TRAINING, State.GATHERING} <= after_early_fault
    assert State.SAVING not in states_after(RankTrains, State.REPAIRING)


def test_states_are_stages_but_for_the_gathering_before_a_last_save():
    assert {state.stage for state in State} == set(Stage)
    assert State.GATHERING_TO_SAVE.stage is State.GATHERING.stage is Stage.GATHERING


@pytest.mark.parametrize("checks_invariants", [True, False])
def test_a_stimulus_that_is_impossible_changes_nothing_and_is_an_error_only_where_that_is_checked(
    harness, checks_invariants
):
    harness.attempt.checks_invariants = checks_invariants
    impossible = LastSaveReported(0, LastSaved(step=3, problem="the disk is full"))
    if checks_invariants:
        with pytest.raises(AssertionError, match="last_save_reported is impossible while training"):
            harness.handle(impossible)
    else:
        harness.handle(impossible)
    assert harness.collect() == []
    assert harness.stage() is Stage.TRAINING


def test_the_page_about_the_architecture_holds_exactly_the_printed_diagram_and_table():
    page = PAGE.read_text(encoding="utf-8")
    assert transitions_markdown() in page, (
        "docs/architecture.md is out of date: replace the diagram and the table of the section "
        "about the states of an attempt by the output of transitions_markdown()"
    )


def test_the_diagram_has_a_line_for_each_change_of_state():
    lines = transitions_markdown().splitlines()
    names = "last_save_reported, process_ended, node_silent, deadline_passed"
    assert f"    saving --> given_up: {names}" in lines
    assert "    repairing --> training: rank_trains" in lines
    assert not any(line.startswith("    given_up --> g") for line in lines)
