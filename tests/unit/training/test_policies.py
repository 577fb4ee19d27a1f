"""The intervals that follow from measurement and from the model's size."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from training.runtime.step_loop.policies import SaveClock
from training.specs.recovery import CheckpointSpec


@dataclass
class Loader:
    epoch: int = 0


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_young_daly_interval_follows_from_the_measured_cost_of_a_save():
    clock = Clock()
    saves = SaveClock(CheckpointSpec(mtbf_s=5000), Loader(), 0, clock=clock)
    assert saves.is_due(1), "the cost is not known yet"
    clock.now_s = 4
    saves.saved(1, started_s=0)
    interval_s = 200  # sqrt(2 x 4 x 5000)
    clock.now_s = 4 + interval_s - 1
    assert not saves.is_due(2)
    clock.now_s = 4 + interval_s
    assert saves.is_due(3)


@pytest.mark.parametrize(
    ("num_parameters", "every_steps", "every_epochs"),
    [(10**8, None, 1), (10**9, 500, None), (10**10, 500, None), (10**11, 200, None)],
)
def test_without_an_interval_the_recommended_one_for_the_size_is_taken(
    num_parameters, every_steps, every_epochs
):
    resolved = CheckpointSpec().resolved(num_parameters)
    assert (resolved.every_steps, resolved.every_epochs) == (every_steps, every_epochs)
