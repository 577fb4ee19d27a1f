"""When a checkpoint is due: the job's fields as policies."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from training.runtime.policies import SaveClock
from training.specs.recovery import CheckpointSpec


@dataclass
class Loader:
    epoch: int = 0


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_every_n_steps_counts_steps():
    saves = SaveClock(CheckpointSpec(every_steps=10), Loader(), 0)
    assert [step for step in range(1, 31) if saves.is_due(step)] == [10, 20, 30]


def test_every_t_seconds_counts_from_the_end_of_the_last_save():
    clock = Clock()
    saves = SaveClock(CheckpointSpec(every_s=60), Loader(), 0, clock=clock)
    clock.now_s = 59
    assert not saves.is_due(1)
    clock.now_s = 60
    assert saves.is_due(2)
    saves.saved(2, started_s=60)
    clock.now_s = 119
    assert not saves.is_due(3)


def test_every_n_epochs_saves_with_the_last_step_of_the_epoch():
    loader = Loader()
    saves = SaveClock(CheckpointSpec(every_epochs=2), loader, 0)
    due = []
    for step, epoch in enumerate([0, 1, 1, 2, 2, 3, 4], start=1):
        loader.epoch = epoch
        if saves.is_due(step):
            due.append(step)
    assert due == [4, 7]


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
