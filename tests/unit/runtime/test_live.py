"""A rank takes the state of its replica, value by value, or goes back to a copy of its own."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from perdure.training.errors import InputError
from perdure.training.runtime.program import Training
from perdure.training.runtime.state.live import LiveState, Snapshots
from perdure.training.runtime.state.transfer import TensorLayout
from tests.unit.runtime.trainees import Loader

INPUTS = torch.linspace(-1, 1, 12).reshape(3, 4)


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


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def made(
    seed: int,
    optimizer: Any = torch.optim.AdamW,
    model: Callable[[], nn.Module] = plain_model,
    **settings: Any,
) -> Training:
    """A small training with a schedule."""
    torch.manual_seed(seed)
    trained = model()
    adam = optimizer(trained.parameters(), lr=0.1, **settings)
    scheduler = torch.optim.lr_scheduler.StepLR(adam, step_size=2, gamma=0.5)
    return Training(trained, [adam], [scheduler], None, Loader(), 1.0)


def made_of_two(seed: int, second: Any = torch.optim.AdamW) -> Training:
    """Likewise, with an optimizer for matrices and one for the rest, and a schedule for each."""
    torch.manual_seed(seed)
    trained = plain_model()
    optimizers = [
        torch.optim.Muon([p for p in trained.parameters() if p.ndim == 2], lr=0.1),
        second([p for p in trained.parameters() if p.ndim < 2], lr=0.05),
    ]
    schedulers = [
        torch.optim.lr_scheduler.StepLR(one, step_size=size, gamma=0.5)
        for one, size in zip(optimizers, (1, 2), strict=True)
    ]
    return Training(trained, optimizers, schedulers, None, Loader(), 1.0)


def step(training: Training) -> None:
    training.zero_grad()
    training.model(INPUTS).square().sum().backward()
    for optimizer in training.optimizers:
        optimizer.step()
    for scheduler in training.schedulers:
        scheduler.step()


def adopt(training: Training, source: Training, *, layouts: bool = True) -> None:
    """What a new process does with what its replica sends."""
    tensors, extra = LiveState(source).whole()

    def fill(own: Mapping[str, Tensor]) -> None:
        assert own.keys() == tensors.keys()
        for name, tensor in own.items():
            with torch.no_grad():
                tensor.copy_(tensors[name])

    sent = {name: TensorLayout.of(tensor) for name, tensor in tensors.items()}
    LiveState(training).adopt(extra, fill, sent if layouts else None)


def all_of(training: Training) -> tuple[Any, ...]:
    return (
        {k: v.tolist() for k, v in training.model.state_dict().items()},
        [str(one.state_dict()) for one in training.optimizers],
        [one.state_dict() for one in training.schedulers],
    )


class Copying(torch.optim.AdamW):
    """An optimizer that gives away copies of its state."""

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(super().state_dict())


@pytest.mark.parametrize("layouts", [True, False], ids=["layouts sent", "layouts not sent"])
@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.Adafactor, {}),
        (Copying, {}),
        (torch.optim.AdamW, {"model": Tied}),
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


@pytest.mark.parametrize("layouts", [True, False], ids=["layouts sent", "layouts not sent"])
@pytest.mark.parametrize("second", [torch.optim.AdamW, torch.optim.SGD])
def test_several_optimizers_train_on_as_those_of_the_replica_do(second, layouts):
    replica, fresh = (made_of_two(seed, second) for seed in (1, 2))
    for _ in range(3):
        step(replica)
    adopt(fresh, replica, layouts=layouts)
    for _ in range(3):
        assert all_of(fresh) == all_of(replica)
        step(fresh)
        step(replica)


def test_several_optimizers_go_back_to_a_copy_of_their_own():
    training = made_of_two(1)
    step(training)
    live = LiveState(training)
    tensors, extra = live.whole()
    snapshots = Snapshots()
    snapshots.take(1, tensors, extra)
    before = all_of(training)
    step(training)
    step(training)
    live.adopt(snapshots.extra, snapshots.restore)
    assert all_of(training) == before


def test_a_checkpoint_has_what_all_optimizers_and_schedules_keep():
    saved, fresh = made_of_two(1), made_of_two(2)
    for _ in range(3):
        step(saved)
    tensors, settings = LiveState(saved).tensors()
    extra = json.loads(json.dumps({"optimizer": settings, **LiveState(saved).parts()}))
    LiveState(fresh).put(tensors, extra)
    assert all_of(fresh) == all_of(saved)


def test_a_state_of_other_schedules_is_refused():
    saved, fresh = made(1), made_of_two(2)
    step(saved)
    with pytest.raises(InputError, match=r"scheduler=.*2 schedulers, but .* is of 1"):
        LiveState(fresh)._put_parts(LiveState(saved).parts())


def test_names_are_those_of_the_model_whatever_wraps_it():
    bare, wrapped = made(1), made(1)
    wrapped.model = nn.DataParallel(wrapped.model)
    step(wrapped)
    step(bare)
    tensors, extra = LiveState(bare).whole()
    assert LiveState(wrapped).whole()[0].keys() == tensors.keys()
    fresh = made(2)
    fresh.model = nn.DataParallel(fresh.model)
    settings = {name: extra[name] for name in ("optimizer", "scheduler", "scaler")}
    LiveState(fresh).put(LiveState(bare).tensors()[0], settings)
    state = fresh.model.module.state_dict()
    assert {n: t.tolist() for n, t in state.items()} == all_of(bare)[0]


def test_a_replica_before_its_first_step_leaves_no_state_behind():
    replica, other = made(1), made(2)
    step(other)
    adopt(other, replica)
    assert not other.has_optimizer_state
    assert all_of(other) == all_of(replica)


def test_the_state_is_allocated_without_a_step(monkeypatch):
    replica, fresh = made(1), made(2)
    step(replica)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the optimizer has taken a step")

    monkeypatch.setattr(fresh.optimizers[0], "step", refuse)
    adopt(fresh, replica)
    assert all_of(fresh)[0] == all_of(replica)[0]


def test_an_unknown_type_of_numbers_is_refused():
    with pytest.raises(ValueError, match="of type 'load', unknown here"):
        TensorLayout("load", [2], "cpu").empty_beside(torch.zeros(1))


def test_a_state_for_what_has_another_name_here_is_left_to_the_optimizer():
    replica, fresh = made(1), made(2)
    step(replica)
    tensors, extra = LiveState(replica).whole()
    results = {
        name.replace("2.weight", "3.weight"): TensorLayout.of(one) for name, one in tensors.items()
    }
    LiveState(fresh).adopt({**extra}, lambda _: None, results)
    names, _ = LiveState(fresh).whole()
    assert names.keys() == tensors.keys()


def state(value: float) -> dict[str, Tensor]:
    """A state whose tensors all hold one value, of several types and shapes."""
    return {
        "weight": torch.full((3, 5), float(value), requires_grad=True),
        "half": torch.full((7,), value, dtype=torch.bfloat16),
        "count": torch.full((), int(value), dtype=torch.int64),
    }


def taken(*steps: int) -> Snapshots:
    """Snapshots of steps; each state holds its step."""
    snapshots = Snapshots()
    for step in steps:
        snapshots.take(step, state(step), {"data": step})
    return snapshots


def restored(snapshots: Snapshots) -> list[float]:
    live = state(-1)
    snapshots.restore(live)
    return sorted({float(value) for tensor in live.values() for value in tensor.detach().flatten()})


@pytest.mark.parametrize("steps", [(4,), (4, 8), (4, 8, 12), (4, 8, 12, 16)])
def test_the_newest_copy_is_the_one_to_go_back_to(steps):
    snapshots = taken(*steps)
    assert (snapshots.step, snapshots.extra) == (steps[-1], {"data": steps[-1]})
    assert restored(snapshots) == [steps[-1]]


def test_a_copy_does_not_change_with_the_state():
    live = state(4)
    snapshots = Snapshots()
    snapshots.take(4, live, {})
    with torch.no_grad():
        for tensor in live.values():
            tensor.fill_(99)
    assert restored(snapshots) == [4]


def test_a_state_may_go_back_to_the_same_copy_twice():
    snapshots = taken(4, 8)
    assert restored(snapshots) == restored(snapshots) == [8]
    snapshots.take(9, state(9), {})
    assert restored(snapshots) == [9]


@pytest.fixture
def cut_short(monkeypatch):
    """Has the next copies fail after their first tensor."""

    def fail(into: list[Tensor], live: list[Tensor]) -> None:
        into[0].copy_(live[0])
        raise RuntimeError("UCE ERROR")

    def take(snapshots: Snapshots, step: int) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(torch, "_foreach_copy_", fail)
            with pytest.raises(RuntimeError, match="UCE"):
                snapshots.take(step, state(step), {"data": step})

    return take


def test_there_is_no_copy_before_the_first_that_is_whole(cut_short):
    snapshots = Snapshots()
    assert snapshots.step is None
    cut_short(snapshots, 4)
    assert snapshots.step is None


@pytest.mark.parametrize("earlier", [(4,), (4, 8), (2, 4, 8)])
def test_a_copy_that_is_cut_short_is_never_offered(cut_short, earlier):
    snapshots = taken(*earlier)
    cut_short(snapshots, 20)
    assert (snapshots.step, snapshots.extra) == (earlier[-1], {"data": earlier[-1]})
    assert restored(snapshots) == [earlier[-1]]
    snapshots.take(21, state(21), {"data": 21})
    assert (snapshots.step, restored(snapshots)) == (21, [21])


def test_two_copies_are_kept_and_no_more_memory_is_taken():
    assert [len(taken(*range(number))._copies) for number in (1, 2, 10)] == [1, 2, 2]


def test_a_state_of_other_tensors_makes_the_copies_before_void():
    # The optimizer has its state only from the first step on.
    snapshots = taken(0)
    more = state(5) | {"optim/exp_avg": torch.full((4,), 5.0)}
    snapshots.take(5, more, {})
    live = {name: torch.zeros_like(tensor) for name, tensor in more.items()}
    snapshots.restore(live)
    assert all(float(value) == 5 for tensor in live.values() for value in tensor.flatten())


@pytest.mark.usefixtures("group")
def test_of_a_sharded_tensor_the_own_part_is_kept():
    mesh = init_device_mesh("cpu", (1,))
    tensor = DTensor.from_local(torch.full((4,), 3.0), mesh, [Replicate()])
    snapshots = Snapshots()
    snapshots.take(3, {"weight": tensor}, {})
    tensor.to_local().fill_(9)
    snapshots.restore({"weight": tensor})
    assert torch.equal(tensor.to_local(), torch.full((4,), 3.0))


def test_a_part_of_the_program_may_have_any_name_and_grow_between_copies():
    source, training = made(1), made(2)
    history = Grown(torch.zeros(1))
    source.state, training.state = {"tensor": history}, {"tensor": Grown(torch.ones(3))}
    adopt(training, source)
    assert training.state["tensor"].state_dict()["values"].tolist() == [0.0]
    snapshots = Snapshots()
    for step_number in (1, 2):
        tensors, extra = LiveState(source).whole()
        snapshots.take(step_number, tensors, extra)
        history.values = torch.zeros(step_number + 1)
    history.values = torch.ones(2)
    LiveState(source).adopt(snapshots.extra, snapshots.restore)
    assert snapshots.step == 2
    assert history.values.tolist() == [0.0, 0.0]


class Grown:
    """A history of values, as programs keep it."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Tensor]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.values = state["values"]
