"""Random numbers of a step, and models constructed without drawing any."""

from __future__ import annotations

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from perdure.training.runtime.state.random_numbers import (
    UninitializedParameters,
    seed_of,
    seed_step,
    seeded_after,
)

SEEDS = st.integers(0, 2**63 - 1)
SMALL = st.integers(0, 10_000)


def drawn(seed: int, rank: int, step: int) -> tuple[object, ...]:
    seed_step(seed, rank=rank, step=step)
    own = float(np.random.rand())  # noqa: NPY002 the generator that libraries use
    dropped = nn.functional.dropout(torch.ones(64)).tolist()
    return random.random(), own, float(torch.rand(())), dropped  # noqa: S311


def test_a_step_that_is_done_again_draws_what_it_drew_whatever_came_between():
    first = drawn(5, 1, 30)
    drawn(5, 1, 31)
    torch.rand(17)
    assert drawn(5, 1, 30) == first


def test_every_generator_depends_on_seed_rank_and_step():
    base = drawn(5, 1, 30)
    for other in (drawn(6, 1, 30), drawn(5, 2, 30), drawn(5, 1, 31)):
        assert all(one != another for one, another in zip(base, other, strict=True))


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


class Buffered(nn.Module):
    """Random numbers in a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.noise: Tensor
        self.register_buffer("noise", torch.empty(64).normal_(), persistent=False)
        self.weight = nn.Parameter(torch.ones(64))


@pytest.mark.parametrize(
    "fill",
    [
        nn.init.normal_,
        nn.init.uniform_,
        nn.init.trunc_normal_,
        nn.init.kaiming_uniform_,
        nn.init.kaiming_normal_,
        nn.init.xavier_uniform_,
        nn.init.xavier_normal_,
    ],
    ids=lambda fill: fill.__name__,
)
def test_no_random_number_is_drawn_for_a_parameter(fill):
    parameter = nn.Parameter(torch.ones(8, 8))
    before = torch.get_rng_state()
    with UninitializedParameters():
        fill(parameter)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(8, 8),
        lambda: nn.Embedding(8, 8),
        lambda: nn.LSTM(8, 8),
        lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True),
    ],
    ids=["linear", "embedding", "lstm", "transformer layer"],
)
def test_layers_of_torch_are_made_without_drawing(make):
    before = torch.get_rng_state()
    with UninitializedParameters():
        made = make()
    assert torch.equal(torch.get_rng_state(), before)
    assert {name: one.shape for name, one in made.state_dict().items()} == {
        name: one.shape for name, one in make().state_dict().items()
    }


def test_what_is_no_random_number_of_a_parameter_is_made_as_without_it():
    torch.manual_seed(1)
    expected = Buffered()
    torch.manual_seed(1)
    with UninitializedParameters():
        made = Buffered()
        norm = nn.LayerNorm(8)
    assert torch.equal(made.noise, expected.noise)
    assert torch.equal(made.weight, expected.weight)
    assert torch.equal(norm.weight, torch.ones(8))
    assert torch.equal(norm.bias, torch.zeros(8))


@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_drawn_afterwards_is_the_same_whether_parameters_were_drawn_or_not(seed):
    drawn = []
    for around in (nullcontext(), UninitializedParameters()):
        torch.manual_seed(seed)
        with seeded_after(), around:
            nn.Linear(8, 8)
        drawn.append(torch.randperm(1000))
    assert torch.equal(*drawn)
    torch.manual_seed(seed + 1)
    with seeded_after():
        nn.Linear(8, 8)
    assert not torch.equal(drawn[0], torch.randperm(1000)), "it follows from the seed before"


def test_parameters_are_drawn_as_they_are_without_it():
    torch.manual_seed(1)
    expected = nn.Linear(8, 8)
    torch.manual_seed(1)
    with seeded_after():
        assert torch.equal(nn.Linear(8, 8).weight, expected.weight)
