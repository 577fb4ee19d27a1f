"""AdamW's groups and the learning rate."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perdure.training.config.model import ModelSpec, OptimizerSpec
from perdure.training.trainer.model import Decoder
from perdure.training.trainer.pretrain import lr_ratio, make_optimizer, make_scheduler

SPEC = OptimizerSpec(lr=0.01, warmup_steps=10, min_lr_ratio=0.1, weight_decay=0.3)


@pytest.fixture
def model() -> Decoder:
    return Decoder(ModelSpec(num_layers=1, hidden_size=16, num_heads=2, seq_len=8), 32)


FREE = OptimizerSpec(warmup_steps=0, min_lr_ratio=0.0)


@pytest.mark.parametrize(
    ("spec", "steps", "ratios"),
    [
        pytest.param(SPEC, 100, {0: 0.1, 4: 0.5, 9: 1.0}, id="the first step is not lost"),
        pytest.param(SPEC, 100, {10: 1.0, 55: 0.55, 100: 0.1, 1000: 0.1}, id="to the floor"),
        pytest.param(FREE, 50, {0: 1.0, 50: 0.0}, id="no warm-up"),
        pytest.param(SPEC, 10, {9: 1.0, 10: 1.0}, id="a warm-up as long as the run"),
    ],
)
def test_the_warm_up_is_linear_and_a_cosine_goes_from_the_peak_to_the_floor(spec, steps, ratios):
    for done, ratio in ratios.items():
        assert lr_ratio(done, spec, steps=steps) == pytest.approx(ratio, rel=1e-15, abs=1e-15)


@given(st.integers(0, 50), st.integers(1, 200), st.floats(0, 1))
def test_the_rate_rises_then_falls_and_stays_between_floor_and_peak(warmup, steps, floor):
    spec = OptimizerSpec(warmup_steps=min(warmup, steps), min_lr_ratio=floor)
    ratios = [lr_ratio(done, spec, steps=steps) for done in range(steps + 1)]
    peak = spec.warmup_steps
    assert ratios[:peak] == sorted(ratios[:peak])
    assert ratios[peak:] == sorted(ratios[peak:], reverse=True)
    assert all(0 < ratio <= 1 for ratio in ratios[:peak])
    assert all(floor - 1e-9 <= ratio <= 1 for ratio in ratios[peak:])


def test_weights_decay_on_matrices_and_not_on_norms(model):
    optimizer = make_optimizer(model, SPEC)
    groups = [(g["weight_decay"], {p.ndim for p in g["params"]}) for g in optimizer.param_groups]
    assert groups == [(0.3, {2}), (0.0, {1})]
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    assert (optimizer.defaults["lr"], optimizer.defaults["betas"]) == (0.01, (0.9, 0.95))


def test_a_step_without_gradients_shrinks_the_matrices_alone(model):
    optimizer = make_optimizer(model, SPEC)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - 0.01 * 0.3 if parameter.ndim == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_the_scheduler_gives_each_step_its_rate_and_goes_on_from_its_state(model):
    def make():
        optimizer = make_optimizer(model, SPEC)
        return optimizer, make_scheduler(optimizer, SPEC, steps=100)

    optimizer, scheduler = make()
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.01 * lr_ratio(done, SPEC, steps=100) for done in range(20)])
    later_optimizer, later = make()
    later.load_state_dict(scheduler.state_dict())
    later_optimizer.load_state_dict(optimizer.state_dict())
    assert later.get_last_lr() == scheduler.get_last_lr()
    assert later_optimizer.param_groups[1]["lr"] == pytest.approx(
        0.01 * lr_ratio(20, SPEC, steps=100)
    )
