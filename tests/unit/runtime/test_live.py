"""A rank becomes what its replica is, value by value and setting by setting."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.runtime.trainees import Loader
from training.runtime.program import Training
from training.runtime.state.live import LiveState
from training.runtime.state.transfer import TensorLayout

INPUTS = torch.linspace(-1, 1, 12).reshape(3, 4)


def made(seed: int, optimizer: Any = torch.optim.AdamW, **settings: Any) -> Training:
    """A small training with a schedule."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    adam = optimizer(model.parameters(), lr=0.1, **settings)
    scheduler = torch.optim.lr_scheduler.StepLR(adam, step_size=2, gamma=0.5)
    return Training(model, adam, scheduler, None, Loader(), 1.0)


def step(training: Training) -> None:
    training.optimizer.zero_grad()
    training.model(INPUTS).square().sum().backward()
    training.optimizer.step()
    training.scheduler.step()  # type: ignore[union-attr]


def adopt(training: Training, source: Training, *, layouts: bool = True) -> None:
    """What a new process does with what its replica sends."""
    tensors, extra = LiveState(source).whole()

    def fill(own: Mapping[str, Tensor]) -> None:
        assert own.keys() == tensors.keys()
        for name, tensor in own.items():
            with torch.no_grad():
                tensor.copy_(tensors[name])

    told = {name: TensorLayout.of(tensor) for name, tensor in tensors.items()}
    LiveState(training).adopt(extra, fill, told if layouts else None)


def all_of(training: Training) -> tuple[Any, ...]:
    return (
        {k: v.tolist() for k, v in training.model.state_dict().items()},
        str(training.optimizer.state_dict()),
        training.scheduler.state_dict(),  # type: ignore[union-attr]
    )


class Copying(torch.optim.AdamW):
    """An optimizer that gives away copies of its state."""

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(super().state_dict())


@pytest.mark.parametrize("layouts", [True, False], ids=["layouts told", "layouts not told"])
@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.Adafactor, {}),
        (Copying, {}),
    ],
)
def test_a_new_process_trains_on_as_its_replica_does(optimizer, settings, layouts):
    replica, fresh = (made(seed, optimizer, **settings) for seed in (1, 2))
    for _ in range(3):
        step(replica)
    adopt(fresh, replica, layouts=layouts)
    for _ in range(3):
        assert all_of(fresh) == all_of(replica)
        step(fresh)
        step(replica)


def test_names_are_those_of_the_model_whatever_wraps_it():
    bare, wrapped = made(1), made(1)
    wrapped.model = nn.DataParallel(wrapped.model)
    step(wrapped)
    step(bare)
    tensors, extra = LiveState(bare).whole()
    assert LiveState(wrapped).whole()[0].keys() == tensors.keys()
    anew = made(2)
    anew.model = nn.DataParallel(anew.model)
    settings = {name: extra[name] for name in ("optimizer", "scheduler", "scaler")}
    LiveState(anew).put(LiveState(bare).tensors()[0], settings)
    state = anew.model.module.state_dict()
    assert {n: t.tolist() for n, t in state.items()} == all_of(bare)[0]


def test_a_replica_before_its_first_step_leaves_no_state_behind():
    replica, other = made(1), made(2)
    step(other)
    adopt(other, replica)
    assert not other.optimizer.state
    assert all_of(other) == all_of(replica)


def test_room_for_the_state_is_made_without_a_step(monkeypatch):
    replica, fresh = made(1), made(2)
    step(replica)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the optimizer was asked for a step")

    monkeypatch.setattr(fresh.optimizer, "step", refuse)
    adopt(fresh, replica)
    assert all_of(fresh)[0] == all_of(replica)[0]


def test_a_type_of_numbers_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match="of type 'load', unknown here"):
        TensorLayout("load", [2], "cpu").empty_beside(torch.zeros(1))


class Tied(nn.Module):
    """Two names for one weight, as language models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 4, bias=False)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(inputs)))


def tied(seed: int) -> Training:
    torch.manual_seed(seed)
    model = Tied()
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(adam, step_size=2, gamma=0.5)
    return Training(model, adam, scheduler, None, Loader(), 1.0)


def test_a_weight_with_two_names_has_one_state():
    replica, fresh = tied(1), tied(2)
    for _ in range(3):
        step(replica)
    adopt(fresh, replica)
    step(fresh)
    step(replica)
    assert all_of(fresh) == all_of(replica)


def test_a_state_for_what_has_another_name_here_is_left_to_the_optimizer():
    replica, fresh = made(1), made(2)
    step(replica)
    tensors, extra = LiveState(replica).whole()
    told = {
        name.replace("2.weight", "3.weight"): TensorLayout.of(one) for name, one in tensors.items()
    }
    LiveState(fresh).adopt({**extra}, lambda _: None, told)
    names, _ = LiveState(fresh).whole()
    assert names.keys() == tensors.keys()
