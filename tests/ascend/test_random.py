"""Random numbers of an NPU by the seed and the offset of torch_npu's generator."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


def draw():
    x = torch.randn(64, device="npu:0")
    return torch.cat(
        [
            x,
            torch.rand(8, device="npu:0"),
            torch.randperm(8, device="npu:0").float(),
            torch.bernoulli(torch.full((8,), 0.5, device="npu:0")),
            torch.nn.functional.dropout(torch.ones(64, device="npu:0"), 0.3),
            torch.multinomial(torch.rand(8, device="npu:0"), 4).float(),
            torch.empty(8, device="npu:0").exponential_(),
            torch.randint(0, 100, (8,), device="npu:0").float(),
        ]
    ).cpu()


def test_the_same_seed_gives_the_same_numbers():
    torch.npu.manual_seed(7)
    first, second = draw(), draw()
    torch.npu.manual_seed(7)
    assert torch.equal(draw(), first)
    assert torch.equal(draw(), second)
    assert not torch.equal(first, second)


def test_another_seed_gives_others():
    torch.npu.manual_seed(7)
    first = draw()
    torch.npu.manual_seed(8)
    assert not torch.equal(draw(), first)


def test_a_state_that_is_set_again_goes_on_from_there():
    torch.npu.manual_seed(7)
    draw()
    state = torch.npu.get_rng_state("npu:0")
    expected = draw()
    torch.npu.set_rng_state(state, "npu:0")
    assert torch.equal(draw(), expected)


def test_numbers_of_an_npu_leave_those_of_the_cpu_alone():
    before = torch.get_rng_state()
    draw()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_of_the_callers_own_is_used():
    def numbers():
        generator = torch.Generator("npu:0").manual_seed(3)
        return torch.randn(8, device="npu:0", generator=generator).cpu()

    assert torch.equal(numbers(), numbers())


def test_dropout_scales_what_it_keeps():
    torch.npu.manual_seed(0)
    x = torch.ones(10_000, device="npu:0", requires_grad=True)
    y = torch.nn.functional.dropout(x, 0.25)
    y.sum().backward()
    kept = y != 0
    assert 0.7 < kept.float().mean().item() < 0.8
    assert torch.equal(y[kept].cpu(), torch.full((int(kept.sum()),), 1 / 0.75))
    assert torch.equal(x.grad, y.detach())
