"""Copies of a state to go back to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from training.runtime.state.live import Snapshots


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


def test_there_is_none_before_the_first():
    assert Snapshots().step is None


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


@pytest.mark.parametrize("earlier", [(4,), (4, 8), (2, 4, 8)])
def test_a_copy_that_is_cut_short_is_never_offered(cut_short, earlier):
    snapshots = taken(*earlier)
    cut_short(snapshots, 20)
    assert (snapshots.step, snapshots.extra) == (earlier[-1], {"data": earlier[-1]})
    assert restored(snapshots) == [earlier[-1]]
    snapshots.take(21, state(21), {"data": 21})
    assert (snapshots.step, restored(snapshots)) == (21, [21])


def test_the_first_copy_that_is_cut_short_is_none(cut_short):
    snapshots = Snapshots()
    cut_short(snapshots, 4)
    assert snapshots.step is None


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
