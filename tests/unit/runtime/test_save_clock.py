"""When a job saves, and what it keeps."""

from __future__ import annotations

import pytest

from perdure.training.config.recovery import CheckpointSpec
from perdure.training.runtime.step_loop.save_clock import SaveClock
from tests.unit.runtime import trainees


class Loader(trainees.Loader):
    """A loader of epochs of a few steps, each taking a second."""

    def __init__(self, steps_per_epoch: int, step: int = 0) -> None:
        super().__init__()
        self.steps_per_epoch = steps_per_epoch
        self.step = step

    @property
    def epoch(self) -> int:
        return self.step // self.steps_per_epoch


def saves(spec: CheckpointSpec, *, steps: int, start: int = 0, steps_per_epoch: int = 7):
    """Steps after which the job is saved, one step a second."""
    loader = Loader(steps_per_epoch, start)
    clock = SaveClock(spec, loader, start, clock=lambda: float(loader.step))
    saved = []
    for number in range(start + 1, steps + 1):
        loader.step = number
        if clock.is_due(number):
            clock.saved(number, started_s=float(number))
            saved.append(number)
    return saved


@pytest.mark.parametrize(
    ("spec", "start", "expected"),
    [
        pytest.param({"every_steps": 5}, 0, [5, 10, 15, 20, 25, 30], id="every n steps"),
        pytest.param(
            {"every_epochs": 1}, 0, [7, 14, 21, 28], id="with the last sample of an epoch"
        ),
        pytest.param({"every_epochs": 2}, 0, [14, 28], id="every second epoch"),
        pytest.param({"every_epochs": 2}, 9, [14, 28], id="epochs of the run, not of the attempt"),
        pytest.param(
            {"every_s": 4}, 0, [4, 8, 12, 16, 20, 24, 28], id="seconds since the last save"
        ),
        pytest.param({}, 0, [], id="no interval"),
    ],
)
def test_a_job_saves_when_an_interval_is_due(spec, start, expected):
    assert saves(CheckpointSpec(**spec), start=start, steps=30) == expected


@pytest.mark.parametrize("spec", [{"every_steps": 8}, {"every_s": 8}])
def test_no_interval_saves_a_step_twice(spec):
    loader = Loader(7)
    clock = SaveClock(CheckpointSpec(**spec), loader, 0, clock=lambda: float(loader.step))
    loader.step = 8
    assert clock.is_due(8)
    clock.saved(8, started_s=8)
    loader.step = 16
    assert not clock.is_due(8)


def test_an_epoch_that_is_due_stays_so_until_it_is_saved():
    loader = Loader(7)
    clock = SaveClock(CheckpointSpec(every_epochs=1), loader, 0)
    loader.step = 7
    assert clock.is_due(7)
    assert clock.is_due(7), "its vote was lost to a fault, and the step is done again"
    clock.saved(7, started_s=clock.now_s())
    assert not clock.is_due(8)


@pytest.mark.parametrize("every_steps", [5, 7, 14, 1])
def test_several_intervals_save_when_either_is_due_and_once_when_both_are(every_steps):
    spec = CheckpointSpec(every_steps=every_steps, every_epochs=1)
    due = {n for n in range(1, 31) if n % every_steps == 0 or n % 7 == 0}
    assert saves(spec, steps=30) == sorted(due)


def test_the_newest_checkpoints_are_kept_and_the_marked_ones():
    steps = list(range(10, 110, 10))
    assert CheckpointSpec(keep_last=2).retention().keep(steps) == {90, 100}
    spec = CheckpointSpec(keep_last=2, keep_every_steps=40)
    assert spec.retention().keep(steps) == {40, 80, 90, 100}


def test_the_best_checkpoints_are_kept_once_the_losses_are_known():
    steps = [10, 20, 30, 40]
    spec = CheckpointSpec(keep_last=1, keep_best=1)
    assert spec.retention({10: 3.0, 20: 1.0, 30: 2.0, 40: 2.5}).keep(steps) == {20, 40}
    assert spec.retention().keep(steps) == set(steps), "nothing can be compared"


def test_the_young_daly_interval_follows_from_the_measured_cost_of_a_save():
    loader = Loader(7)
    clock = SaveClock(CheckpointSpec(mtbf_s=5000), loader, 0, clock=lambda: float(loader.step))
    assert clock.is_due(1), "the cost is not known yet"
    loader.step = 4
    clock.saved(1, started_s=0)
    interval_s = 200  # sqrt(2 x 4 x 5000)
    loader.step = 4 + interval_s - 1
    assert not clock.is_due(2)
    loader.step = 4 + interval_s
    assert clock.is_due(3)


@pytest.mark.parametrize(
    ("num_parameters", "every_steps", "every_epochs"),
    [(10**8, None, 1), (10**9, 500, None), (10**10, 500, None), (10**11, 200, None)],
)
def test_without_an_interval_the_recommended_one_for_the_size_is_taken(
    num_parameters, every_steps, every_epochs
):
    resolved = CheckpointSpec().resolved(num_parameters)
    assert (resolved.every_steps, resolved.every_epochs) == (every_steps, every_epochs)
