"""A model whose parameters come from elsewhere is made without drawing them."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from training.runtime.state.random_numbers import UninitializedParameters, seeded_after


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


def test_what_is_no_random_number_of_a_parameter_is_made_as_ever():
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
