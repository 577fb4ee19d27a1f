"""A device's own random state in a checkpoint: saved by every rank, and back where it was.

No accelerator is here. `StandIn` is registered with torch as the module of a device type, which is
the seam that torch.cuda and torch_npu fill; behind it is a generator on the host. It makes no
tensors: models, and what ranks send each other, stay on the CPU. What a real device's generator
does is not shown here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.utils.backend_registration import rename_privateuse1_backend

from perdure.training.device import device_rng_state, set_device_rng_state
from perdure.training.runtime.state.checkpointer import Checkpointer
from tests.unit.runtime.trainees import CPU, Place, Trainee

STEP = 3
NUM_DRAWS = 5


class StandIn:
    """Generators of two devices; in the place of torch.cuda or torch.npu."""

    def __init__(self, seed: int) -> None:
        self._generators = [torch.Generator().manual_seed(seed + index) for index in range(2)]

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self._generators[device.index].get_state()

    def set_rng_state(self, new_state: torch.Tensor, device: torch.device) -> None:
        self._generators[device.index].set_state(new_state)

    def is_available(self) -> bool:
        """No: torch is to put nothing onto it by itself."""
        return False

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Seeds of torch stay on the host, so that each test can distinguish the devices' own."""

    def draws(self, index: int) -> list[float]:
        """What a dropout on the device would see next."""
        return torch.rand(NUM_DRAWS, generator=self._generators[index]).tolist()


def registered(seed: int) -> StandIn:
    """A stand-in that torch knows; once in a process."""
    stand_in = StandIn(seed)
    rename_privateuse1_backend("standin")
    torch._register_device_module("standin", stand_in)
    return stand_in


def devices() -> list[torch.device]:
    return [torch.device("standin", index) for index in range(2)]


@dataclass(frozen=True)
class Drawn:
    """What a rank's device drew after its checkpoint."""

    restored: int
    first: list[float]
    second: list[float]  # of the device beside it, which belongs to another rank


def draw(rank: int, place: Place) -> Drawn:
    """Restore, or save where there is nothing to restore; then draw."""
    stand_in = registered(1000 * place.attempt + 10 * rank)
    trainee = Trainee(rank, seed=place.attempt)
    checkpointer = place.checkpointer(trainee, rank, dist.get_world_size())
    own = devices()[0]
    with random_on(checkpointer, own):
        restored = checkpointer.restore()
    if not restored:
        for _ in range(STEP):
            trainee.step()
        stand_in.draws(0)  # not at the beginning of its sequence
        checkpointer.prepare()
        with random_on(checkpointer, own):
            checkpointer.save(STEP, data=trainee.data.state_dict())
    drawn = Drawn(restored, stand_in.draws(0), stand_in.draws(1))
    checkpointer.settle(240)
    return drawn


@contextmanager
def random_on(checkpointer: Checkpointer, device: torch.device) -> Iterator[None]:
    """Its random state is the stand-in's meanwhile; tensors and votes were set up on the CPU."""
    checkpointer._device = device
    yield
    checkpointer._device = CPU


def draw_again(_rank: int) -> None:
    """One device draws again from the state that is set; the one beside it goes on."""
    stand_in = registered(7)
    first, second = devices()
    state = device_rng_state(first)
    assert state is not None
    assert state.dtype == torch.uint8
    kept = state.clone()
    expected, beside = stand_in.draws(0), stand_in.draws(1)
    set_device_rng_state(first, kept)
    assert stand_in.draws(0) == expected
    assert stand_in.draws(1) != beside
    assert device_rng_state(second) is not None


def test_a_device_goes_on_from_the_state_that_was_set_and_others_are_left_alone(cluster):
    cluster.run(draw_again, num_ranks=1)


def test_the_cpu_has_no_state_beside_torchs_own():
    assert device_rng_state(CPU) is None


@pytest.mark.parametrize(
    "keeps",
    [
        pytest.param(True, id="from memory", marks=pytest.mark.long),
        pytest.param(False, id="from the store"),
    ],
)
def test_every_rank_gets_its_devices_random_state_back(cluster, keeps):
    node = cluster.node(disk=False)

    def attempt(number: int, num_ranks: int, name: str | None) -> list[Drawn]:
        cluster.checkpoints.fence(1, number)
        place = Place(cluster.folder, number, (name,), (None,))
        results: list[Drawn] = cluster.run(draw, place, num_ranks=num_ranks)
        return results

    before = attempt(1, 2, node.name)
    assert [one.restored for one in before] == [0, 0]
    saved = cluster.checkpoints.manifest(STEP).tensors
    assert {name for name in saved if name.endswith("/device")} == {
        "random/rank00000/device",
        "random/rank00001/device",
    }
    after = attempt(2, 3, node.name if keeps else None)
    assert [one.restored for one in after] == [STEP] * 3
    assert [one.first for one in after[:2]] == [one.first for one in before]
    assert before[0].first != before[1].first
    fresh = StandIn(1000 * 2 + 10 * 2).draws(0)
    assert after[2].first == fresh, "a rank that the saved world did not have keeps its seed's"
    for one, other in zip(after, before, strict=False):
        assert one.second != other.second, "a rank sets its own device's state alone"
