"""DDP's gradient buckets are settled before the first step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from perdure.training.config.model import ModelSpec
from perdure.training.runtime.step_loop.wrappers import settle_buckets
from perdure.training.trainer.model import Decoder

pytestmark = pytest.mark.usefixtures("group")

SPEC = ModelSpec(num_layers=2, hidden_size=16, num_heads=2, seq_len=8)
INPUTS = torch.arange(8)[None]


@pytest.fixture
def plain() -> Decoder:
    torch.manual_seed(0)
    return Decoder(SPEC, 32)


@pytest.fixture
def model(plain) -> DistributedDataParallel:
    # Small buckets, so that there are several to sort.
    return DistributedDataParallel(plain, bucket_cap_mb=0.001)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(INPUTS, INPUTS.roll(-1)).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_settling_leaves_weights_and_gradients_as_they_were(model):
    before = [p.detach().clone() for p in model.parameters()]
    settle_buckets(model)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_no_sorting_is_left_for_the_first_step(model):
    settle_buckets(model)
    gradients(model)
    assert not model.reducer._rebuild_buckets()


def test_gradients_after_settling_are_those_of_the_plain_model(plain, model):
    expected = gradients(plain)
    settle_buckets(model)
    for _ in range(3):
        found = gradients(model)
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_wrapper_that_looks_for_unused_parameters_sorts_nothing_and_is_left_alone(plain):
    expected = gradients(plain)
    model = DistributedDataParallel(plain, bucket_cap_mb=0.001, find_unused_parameters=True)
    settle_buckets(model)
    for _ in range(2):
        found = gradients(model)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_frozen_parameters_are_left_alone(plain):
    plain.embedding.weight.requires_grad_(requires_grad=False)
    model = DistributedDataParallel(plain)
    settle_buckets(model)
    gradients(model)
    assert plain.embedding.weight.grad is None


def test_other_models_have_no_buckets(plain):
    settle_buckets(plain)
    assert all(p.grad is None for p in plain.parameters())
