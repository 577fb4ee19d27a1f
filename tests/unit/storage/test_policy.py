"""Which checkpoints to keep."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from storage.checkpoint import CheckpointStore
from storage.manifest import Manifest
from storage.policy import (
    KeepAnyOf,
    KeepBest,
    KeepEvery,
    KeepLast,
    RetentionPolicy,
    apply_retention,
)

STEPS = [5, 10, 15, 20, 25]


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (KeepLast(2), {20, 25}),
        (KeepLast(99), set(STEPS)),
        (KeepEvery(10), {10, 20}),
        (KeepBest(2, dict(zip(STEPS, [5.0, 1.0, 3.0, 2.0, 4.0], strict=True))), {10, 20}),
        (KeepBest(99, dict.fromkeys(STEPS, 1.0)), set(STEPS)),
        (KeepAnyOf((KeepLast(1), KeepEvery(10))), {10, 20, 25}),
        (KeepAnyOf(()), set()),
    ],
)
def test_retention_policies_keep_their_steps(policy: RetentionPolicy, kept: set[int]) -> None:
    assert policy.keep(STEPS) == kept
    assert policy.keep([]) == set()


def test_among_equally_good_steps_the_newer_is_kept() -> None:
    assert KeepBest(2, dict.fromkeys(STEPS, 1.0)).keep(STEPS) == {20, 25}


def test_a_step_whose_loss_is_not_known_is_kept_beside_the_best() -> None:
    assert KeepBest(1, {5: 2.0, 10: 1.0, 15: 3.0, 99: 0.0}).keep(STEPS) == {10, 20, 25}
    assert KeepBest(1, {}).keep(STEPS) == set(STEPS)


def test_a_loss_that_is_no_number_is_the_worst() -> None:
    losses = dict(zip(STEPS, [math.nan, math.inf, 3.0, 9.0, math.nan], strict=True))
    assert KeepBest(1, losses).keep(STEPS) == {15}
    assert KeepBest(3, losses).keep(STEPS) == {10, 15, 20}


def keep_best(num_steps: int) -> KeepBest:
    return KeepBest(num_steps, {})


@pytest.mark.parametrize("make", [keep_best, KeepLast, KeepEvery])
@pytest.mark.parametrize("value", [0, -1])
def test_intervals_and_numbers_are_positive(make: Callable[[int], object], value: int) -> None:
    with pytest.raises(ValueError, match=f"={value} must be above 0"):
        make(value)


def test_retention_deletes_the_rest_oldest_first(
    checkpoints: CheckpointStore, commit: Callable[..., Manifest]
) -> None:
    for step in STEPS:
        commit(checkpoints, step)
    assert apply_retention(checkpoints, KeepLast(2), protect={10}) == [5, 15]
    assert checkpoints.steps() == [10, 20, 25]
    assert apply_retention(checkpoints, KeepLast(2), protect=()) == [10]


def test_the_newest_is_never_deleted(
    checkpoints: CheckpointStore, commit: Callable[..., Manifest]
) -> None:
    for step in STEPS:
        commit(checkpoints, step)
    assert apply_retention(checkpoints, KeepAnyOf(()), protect=()) == STEPS[:-1]
    assert apply_retention(checkpoints, KeepEvery(1000), protect=()) == []
    assert checkpoints.steps() == [25]
    assert checkpoints.verify(25) == []


def test_a_newer_damaged_step_does_not_count_as_the_newest(
    checkpoints: CheckpointStore, commit: Callable[..., Manifest]
) -> None:
    for step in STEPS:
        commit(checkpoints, step)
    checkpoints.set_aside(25, "test")
    apply_retention(checkpoints, KeepAnyOf(()), protect=())
    assert checkpoints.steps() == [20]


def test_retention_of_an_empty_run_does_nothing(checkpoints: CheckpointStore) -> None:
    assert apply_retention(checkpoints, KeepLast(1), protect=()) == []
