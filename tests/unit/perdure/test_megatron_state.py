"""State of Megatron's optimizers, scalers and schedules, in their least form."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from perdure.integrations.megatron_state import MegatronState, Schedule


class Scaler:
    """A scale that moves with each step, as Megatron's does."""

    def __init__(self, scale: float) -> None:
        self.scale, self.tracker = torch.tensor([scale]), 0

    def update(self) -> None:
        self.scale /= 2
        self.tracker += 1

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "growth_tracker": self.tracker}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.tracker = state["scale"], state["growth_tracker"]


class Mixed:
    """An optimizer that steps a copy of the weights, as Megatron's do for bf16."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.masters = [nn.Parameter(p.detach().float().clone()) for p in model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=0.1)

    def step(self) -> None:
        for number, master in enumerate(self.masters):
            master.grad = torch.full_like(master, 0.5 + number)
        self.optimizer.step()
        self._copy_main_params_to_model_params()

    def _copy_main_params_to_model_params(self) -> None:
        for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
            parameter.data.copy_(master.data)


def layer(seed: int, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(3, 2).to(dtype)


def test_copies_of_weights_and_moments_go_to_another_rank_bit_by_bit():
    model, other = layer(1), layer(2)
    source, target = Mixed(model), Mixed(other)
    source.step()
    state = deepcopy(MegatronState([source], model).state_dict())  # sent to it
    MegatronState([target], other).load_state_dict(state)
    for optimizer in (source, target):
        optimizer.step()
    for ours, theirs in zip(source.masters, target.masters, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_weights_that_the_optimizer_steps_themselves_are_not_saved_twice():
    model = layer(1, torch.float32)
    inner = torch.optim.AdamW(model.parameters())
    state = MegatronState([SimpleNamespace(optimizer=inner)], model).state_dict()
    entries = [e for group in state["optimizers"][0]["parameters"] for e in group]
    assert entries
    assert not any("main" in entry for entry in entries)


def test_settings_of_groups_are_taken_over_and_a_state_that_was_not_there_is_dropped():
    model, other = layer(1), layer(1)
    fresh, used = Mixed(model), Mixed(other)
    fresh.optimizer.param_groups[0]["lr"] = 0.7
    used.step()
    MegatronState([used], other).load_state_dict(MegatronState([fresh], model).state_dict())
    assert used.optimizer.param_groups[0]["lr"] == 0.7
    assert not used.optimizer.state


def test_a_rank_without_parameters_has_a_stub_and_no_state():
    stub = SimpleNamespace(optimizer=None)
    state = MegatronState([stub], nn.Module())
    assert state.state_dict() == {"optimizers": [], "scalers": []}
    assert list(state.parameters()) == []


@pytest.mark.parametrize("num_retries", [1, 3])
def test_a_step_that_is_done_again_begins_with_the_scale_that_it_had(num_retries):
    scaler = Scaler(64.0)
    optimizers = [SimpleNamespace(optimizer=None, grad_scaler=scaler) for _ in range(2)]
    state = MegatronState(optimizers, nn.Module())
    for _ in range(num_retries):
        scaler.update()
        state.put_back()
        assert (scaler.scale.item(), scaler.tracker) == (64.0, 0)
    scaler.update()
    state.keep()  # the step is applied
    state.put_back()
    assert (scaler.scale.item(), scaler.tracker) == (32.0, 1)


def test_a_scale_goes_to_another_rank_as_the_last_applied_step_left_it():
    ours, theirs = Scaler(64.0), Scaler(8.0)
    source = MegatronState([SimpleNamespace(optimizer=None, grad_scaler=ours)], nn.Module())
    target = MegatronState([SimpleNamespace(optimizer=None, grad_scaler=theirs)], nn.Module())
    ours.update()  # in a step that is not applied yet
    target.load_state_dict(source.state_dict())
    assert (theirs.scale.item(), theirs.tracker) == (64.0, 0)


class Samples:
    """Megatron's schedule: the rate falls with the samples."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.optimizer = SimpleNamespace(param_groups=[{"lr": 1.0}])

    def step(self, increment: int) -> None:
        self.num_steps += increment
        self.optimizer.param_groups[0]["lr"] = 1.0 / (1 + self.num_steps)


def schedule(samples: Samples, *, is_skipped: bool = False) -> tuple[Schedule, torch.optim.SGD]:
    rates = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
    made = Schedule(samples, rates, increment=lambda: 4, is_skipped=lambda: is_skipped)
    return made, rates


@pytest.mark.parametrize(("is_skipped", "count", "rate"), [(False, 4, 0.2), (True, 0, 1.0)])
def test_a_schedule_moves_by_samples_unless_the_step_is_skipped(is_skipped, count, rate):
    samples = Samples()
    made, rates = schedule(samples, is_skipped=is_skipped)
    made.step()
    assert samples.num_steps == count
    assert rates.param_groups[0]["lr"] == pytest.approx(rate)


def test_a_schedule_goes_back_to_the_samples_of_a_checkpoint():
    samples = Samples()
    made, rates = schedule(samples)
    made.step()
    state = made.state_dict()
    made.step()
    made.load_state_dict(state)
    assert samples.num_steps == 4
    assert rates.param_groups[0]["lr"] == pytest.approx(0.2)


def test_a_rank_without_parameters_has_the_rate_0():
    samples = Samples()
    samples.optimizer.param_groups = []
    made, _ = schedule(samples)
    assert made.get_last_lr() == [0.0]
