"""Random numbers of a step."""

from __future__ import annotations

import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from training.runtime.state.random_numbers import seed_of, seed_step

SEEDS = st.integers(0, 2**63 - 1)
SMALL = st.integers(0, 10_000)


def drawn(seed: int, rank: int, step: int) -> tuple[float, float, float]:
    seed_step(seed, rank=rank, step=step)
    own = float(np.random.rand())  # noqa: NPY002 the generator that libraries use
    return random.random(), own, float(torch.rand(()))  # noqa: S311


def test_a_step_that_is_done_again_draws_what_it_drew_whatever_came_between():
    first = drawn(5, 1, 30)
    drawn(5, 1, 31)
    torch.rand(17)
    assert drawn(5, 1, 30) == first


def test_every_generator_depends_on_seed_rank_and_step():
    base = drawn(5, 1, 30)
    for other in (drawn(6, 1, 30), drawn(5, 2, 30), drawn(5, 1, 31)):
        assert all(one != another for one, another in zip(base, other, strict=True))


def test_dropout_of_a_repeated_step_is_the_same():
    layer = torch.nn.Dropout(0.5)
    seed_step(1, rank=0, step=7)
    first = layer(torch.ones(64))
    layer(torch.ones(64))
    seed_step(1, rank=0, step=7)
    assert torch.equal(layer(torch.ones(64)), first)


@given(SEEDS, SMALL, SMALL)
def test_any_seed_is_one_that_all_generators_take(seed, rank, step):
    assert 0 <= seed_of(seed, rank=rank, step=step) < 2**63
    seed_step(seed, rank=rank, step=step)


def test_no_two_of_many_steps_and_ranks_share_a_seed():
    seeds = {seed_of(s, rank=r, step=n) for s in range(3) for r in range(40) for n in range(400)}
    assert len(seeds) == 3 * 40 * 400


def test_seeds_are_those_of_yesterday():
    # A run that goes on with a newer version is to draw what it would have drawn.
    assert seed_of(0, rank=0, step=1) == 1398777264001445488
