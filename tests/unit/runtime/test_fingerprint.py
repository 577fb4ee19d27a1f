"""Hashes of weights and gradients: every bit counts, and layouts are told apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from perdure.training.recovery.consistency import Hashes
from perdure.training.runtime.step_loop.fingerprint import fingerprint, hashes_of, slots
from perdure.training.runtime.step_loop.step import Comparison

pytestmark = pytest.mark.usefixtures("group")

CPU = torch.device("cpu")


def trained(dtype: torch.dtype = torch.float32, *, odd: bool = False) -> nn.Module:
    """A small model with gradients."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 3 + odd), nn.Linear(3 + odd, 3)).to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def hashed(model: nn.Module) -> Hashes:
    return hashes_of(slots(fingerprint(model, CPU), rank=0, world_size=1).tolist())[0]


def flip(tensor: Tensor, *, bit: int) -> None:
    """Flip one bit of the last element."""
    kind = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    words = tensor.detach().view(-1).view(kind)
    mask = 1 << bit if bit < 8 * tensor.element_size() - 1 else torch.iinfo(kind).min
    words[-1] ^= mask


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_flipped_bit_shows_in_the_hash_of_what_it_is_in(dtype, odd):
    model = trained(dtype, odd=odd)
    before = hashed(model)
    assert hashed(model) == before
    for parameter in model.parameters():
        for bit in range(8 * parameter.element_size()):
            flip(parameter, bit=bit)
            after = hashed(model)
            assert after.weights != before.weights
            assert (after.gradients, after.shards) == (before.gradients, before.shards)
            flip(parameter, bit=bit)
            assert parameter.grad is not None
            flip(parameter.grad, bit=bit)
            after = hashed(model)
            assert after.gradients != before.gradients
            assert (after.weights, after.shards) == (before.weights, before.shards)
            flip(parameter.grad, bit=bit)
    assert hashed(model) == before


def test_the_same_values_in_another_tensor_are_another_hash():
    model = trained()
    before = hashed(model)
    first, second = (p for p in model.parameters() if p.ndim == 2)
    first.grad, second.grad = second.grad, first.grad
    assert hashed(model).gradients != before.gradients


def test_a_tensor_that_is_not_contiguous_has_the_hash_of_its_elements():
    model = trained()
    before = hashed(model)
    first = next(model.parameters())
    assert first.grad is not None
    first.grad = first.grad.t().contiguous().t()
    assert hashed(model) == before


def test_parameters_without_gradients_are_passed_over():
    model = trained()
    with_all = hashed(model)
    next(model.parameters()).grad = None
    assert hashed(model).gradients != with_all.gradients
    model.zero_grad(set_to_none=True)
    assert hashed(model).gradients == 0


def test_tensors_that_a_program_compares_are_hashed_with_the_shards():
    main_grad = torch.randn(5)
    bare = trained()
    bare.zero_grad(set_to_none=True)

    def shards(*further: Tensor) -> int:
        hashes = fingerprint(bare, CPU, is_split=True, further=further)
        return hashes_of(slots(hashes, rank=0, world_size=1).tolist())[0].shards

    assert shards() == 0
    before = shards(main_grad)
    flip(main_grad, bit=0)
    assert shards(main_grad) != before


def test_it_is_told_once_that_nothing_was_compared():
    bare = trained()
    bare.zero_grad(set_to_none=True)
    notices: list[str] = []
    comparison = Comparison(((0, 1),), every_steps=1, is_split=True, notice=notices.append)
    for step in (1, 2):
        hashes = fingerprint(bare, CPU, is_split=True)
        voted = sum(slots(hashes, rank=rank, world_size=2) for rank in (0, 1))
        assert isinstance(voted, Tensor)
        comparison.check(voted.tolist(), step)
    (notice,) = notices
    assert "no values of the ranks were compared at step 1" in notice
    assert "session.register(compare=...)" in notice


def test_each_rank_has_a_place_of_its_own_in_the_vote():
    own = [fingerprint(trained(), CPU), fingerprint(trained(odd=True), CPU)]
    voted = sum(slots(one, rank=n, world_size=2) for n, one in enumerate(own))
    assert isinstance(voted, Tensor)
    assert hashes_of(voted.tolist()) == [hashed(trained()), hashed(trained(odd=True))]


def test_gradients_that_are_no_numbers_are_equal_to_each_other_alone():
    own = fingerprint(trained(), CPU)
    nan, other = fingerprint(trained(odd=True), CPU), fingerprint(trained(), CPU)
    voted = slots(own, rank=0, world_size=3)
    for rank, one in ((1, nan), (2, other)):
        voted += slots(one, rank=rank, world_size=3, is_finite=False)
    first, second, third = hashes_of(voted.tolist())
    assert (second.gradients, second.shards) == (third.gradients, third.shards)
    assert second.gradients != first.gradients == hashed(trained()).gradients
    assert second.weights == hashed(trained(odd=True)).weights


def test_a_wrapped_model_has_the_hashes_of_its_own():
    bare, wrapped = trained(), DistributedDataParallel(trained())
    for one, other in zip(bare.parameters(), wrapped.parameters(), strict=True):
        other.grad = one.grad
    assert hashed(wrapped) == hashed(bare)


def test_what_a_program_keeps_different_on_purpose_is_left_out():
    model = trained()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    wrapped = DistributedDataParallel(model)
    before = hashed(wrapped)
    parameters = dict(model.named_parameters())
    flip(parameters["0.weight"], bit=3)
    assert hashed(wrapped) == before
    flip(parameters["1.weight"], bit=3)
    assert hashed(wrapped) != before


def test_of_a_sharded_model_the_shards_gradients_and_the_rest_are_hashed_apart():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
    model(torch.ones(2, 4)).sum().backward()
    before = hashed(model)
    assert 0 not in (before.weights, before.gradients, before.shards)
    shard, *_, plain = (p.grad for p in model.parameters())
    assert isinstance(shard, DTensor)
    assert plain is not None
    flip(shard.to_local(), bit=0)
    after = hashed(model)
    assert after.shards != before.shards
    assert (after.weights, after.gradients) == (before.weights, before.gradients)
    flip(plain, bit=0)
    assert hashed(model).gradients != before.gradients
