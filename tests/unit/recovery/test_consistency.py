"""Ranks that should hold the same values, and do not."""

from __future__ import annotations

import pytest

from perdure.training.recovery.consistency import Cause, Hashes, find_difference, is_due

DDP = ((0, 1, 2, 3),)
HSDP = ((0, 2), (1, 3))
FSDP2 = ((0,), (1,), (2,), (3,))
LATER = 700


def held(
    *, weights: tuple[int, ...] = (7,) * 4, gradients: tuple[int, ...] = (8,) * 4,
    shards: tuple[int, ...] = (9,) * 4,
) -> list[Hashes]:  # fmt: skip
    return [Hashes(*one) for one in zip(weights, gradients, shards, strict=True)]


@pytest.mark.parametrize(
    ("groups", "hashes"),
    [
        (DDP, held()),
        # Of what is sharded, only replicas hold the same.
        (HSDP, held(shards=(1, 2, 1, 2))),
        (FSDP2, held(shards=(1, 2, 3, 4))),
    ],
)
@pytest.mark.parametrize("step", [1, LATER])
def test_ranks_that_hold_what_their_layout_has_them_hold_are_no_difference(groups, hashes, step):
    assert find_difference(hashes, groups, step=step, aligned_at=0) is None


@pytest.mark.parametrize(
    ("groups", "hashes", "culprits", "what"),
    [
        (DDP, held(weights=(7, 7, 6, 7)), (2,), "weights of rank 2 differ"),
        (DDP, held(gradients=(8, 8, 8, 1)), (3,), "gradients of rank 3 differ"),
        (DDP, held(weights=(7, 7, 6, 7), gradients=(8, 1, 8, 8)), (1, 2), "weights of ranks 1, 2"),
        (FSDP2, held(weights=(5, 7, 7, 7), shards=(1, 2, 3, 4)), (0,), "weights of rank 0"),
        # Of two replicas nobody knows which is right.
        (HSDP, held(shards=(1, 2, 1, 3)), (), "different gradients at step 700"),
        (DDP, held(weights=(7, 7, 6, 6)), (), "different weights at step 700"),
        # One of the two differences names nobody.
        (DDP, held(weights=(7, 7, 6, 6), gradients=(8, 8, 8, 1)), (), "different weights"),
    ],
)
def test_what_was_equal_and_differs_is_corruption_on_those_that_differ_from_most(
    groups, hashes, culprits, what
):
    found = find_difference(hashes, groups, step=LATER, aligned_at=600)
    assert found is not None
    assert (found.cause, found.culprits) == (Cause.CORRUPTION, culprits)
    assert what in found.text
    assert "step 700" in found.text


@pytest.mark.parametrize(
    ("step", "aligned_at", "gradients", "cause"),
    [
        # Nobody knows in the first steps which weights the user wants.
        (1, 0, (8, 8, 8, 1), Cause.PROGRAM),
        (2, 0, (8, 8, 8, 1), Cause.PROGRAM),
        (3, 0, (8, 8, 8, 1), Cause.CORRUPTION),
        # Every rank has its own: a program that was changed before it was started again.
        (601, 600, (1, 2, 3, 4), Cause.PROGRAM),
        (602, 600, (1, 2, 3, 4), Cause.PROGRAM),
        (603, 600, (1, 2, 3, 4), Cause.CORRUPTION),
        # One rank alone, right after a repair: that of one rank was not whole.
        (601, 600, (8, 8, 8, 1), Cause.CORRUPTION),
    ],
)
def test_a_difference_from_the_beginning_is_the_programs(step, aligned_at, gradients, cause):
    found = find_difference(held(gradients=gradients), DDP, step=step, aligned_at=aligned_at)
    assert found is not None
    assert found.cause is cause
    if cause is Cause.PROGRAM:
        assert "wrap the model in DistributedDataParallel or FSDP2" in found.text
        assert "watch.consistency_every_steps: 0" in found.text


def test_of_many_culprits_the_first_are_named():
    weights = (1,) * 30 + tuple(range(100, 120))
    hashes = [Hashes(weight, 0, 0) for weight in weights]
    found = find_difference(hashes, (tuple(range(50)),), step=LATER, aligned_at=0)
    assert found is not None
    assert found.culprits == tuple(range(30, 50))
    assert "ranks 30, 31, 32, 33, 34, 35, 36, 37 and others differ" in found.text


@pytest.mark.parametrize(
    ("every", "due"),
    [(0, []), (1, list(range(41, 61))), (10, [41, 42, 50, 60]), (100, [41, 42])],
)
def test_the_first_steps_after_a_start_or_repair_are_compared_and_then_every_few(every, due):
    steps = range(41, 61)
    assert [s for s in steps if is_due(s, aligned_at=40, every_steps=every)] == due
