"""What to keep."""

from __future__ import annotations

import math

import pytest

from storage.retention import Retention, apply_retention

STEPS = [5, 10, 15, 20, 25]
LOSSES = dict(zip(STEPS, [5.0, 1.0, 3.0, 2.0, 4.0], strict=True))


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(2), {20, 25}),
        (Retention(99), set(STEPS)),
        (Retention(keep_every_steps=10), {10, 20}),
        (Retention(keep_best=2, losses=LOSSES), {10, 20}),
        (Retention(keep_best=99, losses=dict.fromkeys(STEPS, 1.0)), set(STEPS)),
        (Retention(1, keep_every_steps=10), {10, 20, 25}),
        (Retention(), set()),
    ],
)
def test_a_step_is_kept_when_a_rule_wants_it(retention, kept):
    assert retention.keep(STEPS) == kept
    assert retention.keep([]) == set()


def test_among_equally_good_steps_the_newer_is_kept():
    assert Retention(keep_best=2, losses=dict.fromkeys(STEPS, 1.0)).keep(STEPS) == {20, 25}


def test_a_step_whose_loss_is_not_known_is_kept_beside_the_best():
    assert Retention(keep_best=1, losses={5: 2.0, 10: 1.0, 15: 3.0, 99: 0.0}).keep(STEPS) == {
        10,
        20,
        25,
    }
    assert Retention(keep_best=1, losses={}).keep(STEPS) == set(STEPS)


def test_a_loss_that_is_no_number_is_the_worst():
    losses = dict(zip(STEPS, [math.nan, math.inf, 3.0, 9.0, math.nan], strict=True))
    assert Retention(keep_best=1, losses=losses).keep(STEPS) == {15}
    assert Retention(keep_best=3, losses=losses).keep(STEPS) == {10, 15, 20}


@pytest.mark.parametrize("name", ["keep_last", "keep_every_steps", "keep_best"])
@pytest.mark.parametrize("value", [0, -1])
def test_intervals_and_numbers_are_positive(name, value):
    with pytest.raises(ValueError, match=f"{name}={value} must be above 0"):
        Retention(**{name: value})


def test_retention_deletes_the_rest_oldest_first(checkpoints, commit):
    for step in STEPS:
        commit(checkpoints, step)
    assert apply_retention(checkpoints, Retention(2), protect={10}) == [5, 15]
    assert checkpoints.steps() == [10, 20, 25]
    assert apply_retention(checkpoints, Retention(2), protect=()) == [10]


def test_the_newest_is_never_deleted(checkpoints, commit):
    for step in STEPS:
        commit(checkpoints, step)
    assert apply_retention(checkpoints, Retention(), protect=()) == STEPS[:-1]
    assert apply_retention(checkpoints, Retention(keep_every_steps=1000), protect=()) == []
    assert checkpoints.steps() == [25]
    assert checkpoints.verify(25) == []


def test_a_newer_damaged_step_does_not_count_as_the_newest(checkpoints, commit):
    for step in STEPS:
        commit(checkpoints, step)
    checkpoints.set_aside(25, "test")
    apply_retention(checkpoints, Retention(), protect=())
    assert checkpoints.steps() == [20]


def test_retention_of_an_empty_run_does_nothing(checkpoints):
    assert apply_retention(checkpoints, Retention(1), protect=()) == []
