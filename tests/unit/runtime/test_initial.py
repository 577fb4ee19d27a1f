"""A run that begins from the checkpoint of another one."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.local import LocalStore
from perdure.storage.retention import Retention, apply_retention
from perdure.training.config.run_name import InitFromSpec
from perdure.training.errors import InputError
from perdure.training.runtime.state.checkpointer import Checkpointer
from perdure.training.runtime.state.initial import InitialState
from perdure.training.runtime.state.live import LiveState
from tests.unit.runtime.trainees import CPU, Place, Trainee
from tests.unit.storage.nodes import Cluster

pytestmark = pytest.mark.usefixtures("group")

STEP = 3


@pytest.fixture
def source(tmp_path) -> Trainee:
    """A run called `run` with a checkpoint of step 3; its training, as it was saved."""
    Cluster.at(tmp_path)
    trainee = Trainee()
    train(trainee, tmp_path, STEP)
    return trainee


def train(trainee: Trainee, folder: Path, *saved: int) -> None:
    """Train up to the last of the steps, and save each of them."""
    checkpointer = Place(folder, 1, (None,), (None,)).checkpointer(trainee, 0, 1)
    for step in range(trainee.data.samples // 4 + 1, saved[-1] + 1):
        trainee.step()
        if step in saved:
            checkpointer.save(step, data=trainee.data.state_dict())


class Heir(Trainee):
    """Another seed, and other hyperparameters."""

    def __init__(self) -> None:
        super().__init__(seed=9)
        group = self.optimizer.param_groups[0]
        group["lr"], group["betas"], group["weight_decay"] = 0.002, (0.9, 0.99), 0.3
        self.scheduler.base_lrs = [0.002]


def take_over(folder: Path, trainee: Trainee, **spec: Any) -> None:
    own = CheckpointStore(LocalStore(folder / "store"), "heir")
    given = InitFromSpec(**{"run": "run", "step": STEP, **spec})
    InitialState(given, own, LiveState(trainee.training), CPU).load()


def test_weights_and_moments_are_the_others_and_all_else_is_its_own(tmp_path, source, caplog):
    caplog.set_level(logging.INFO)
    heir, fresh = Heir(), Heir().state()
    take_over(tmp_path, heir)
    taken, given = heir.state(), source.state()
    assert taken["model"] == given["model"]
    assert taken["optimizer"]["state"] == given["optimizer"]["state"]
    assert taken["optimizer"]["param_groups"] == fresh["optimizer"]["param_groups"]
    assert taken["scaler"] == given["scaler"]
    assert (taken["scheduler"], taken["data"]) == (fresh["scheduler"], 0)
    assert "weights of run run at step 3, optimizer: keep" in caplog.text


def test_an_optimizer_that_is_reset_begins_at_nothing(tmp_path, source):
    heir, fresh = Heir(), Heir().state()
    take_over(tmp_path, heir, optimizer="reset")
    taken = heir.state()
    assert taken["model"] == source.state()["model"]
    assert not heir.training.has_optimizer_state
    for part in ("optimizer", "scheduler", "scaler", "data"):
        assert taken[part] == fresh[part]


def test_the_newest_step_is_settled_once(tmp_path, source):
    weights = source.state()["model"]
    take_over(tmp_path, Heir(), step=None)
    train(source, tmp_path, STEP + 2)
    heir = Heir()
    take_over(tmp_path, heir, step=None)  # a restart before its first checkpoint
    assert heir.state()["model"] == weights != source.state()["model"]


def test_no_retention_deletes_what_is_being_taken_over(tmp_path, source, monkeypatch):
    train(source, tmp_path, STEP + 2)
    checkpoints = CheckpointStore(LocalStore(tmp_path / "store"), "run")
    put = LiveState.put

    def put_while_the_other_run_goes_on(self: LiveState, *given: Any) -> None:
        apply_retention(checkpoints, Retention(1), protect=())
        assert STEP in checkpoints.steps()
        put(self, *given)

    monkeypatch.setattr(LiveState, "put", put_while_the_other_run_goes_on)
    take_over(tmp_path, Heir())
    apply_retention(checkpoints, Retention(1), protect=())
    assert STEP not in checkpoints.steps()


class Wider(Trainee):
    def __init__(self) -> None:
        super().__init__()
        self.training.model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3))
        self.training.model.register_buffer("seen", self.seen)
        self.training.optimizers = [torch.optim.AdamW(self.training.model.parameters())]


class Deeper(Trainee):
    def __init__(self) -> None:
        super().__init__()
        self.model.append(nn.Linear(3, 3))
        self.training.optimizers = [torch.optim.AdamW(self.model.parameters())]


class Shallower(Trainee):
    def __init__(self) -> None:
        super().__init__()
        del self.model[2]
        self.training.optimizers = [torch.optim.AdamW(self.model.parameters())]


class Sgd(Trainee):
    def __init__(self) -> None:
        super().__init__()
        self.training.optimizers = [torch.optim.SGD(self.model.parameters(), momentum=0.9)]


@pytest.mark.parametrize(
    ("trainee", "spec", "words"),
    [
        (
            Wider,
            {},
            r"init_from.run: another model: model/0.\w+ is \(7.*\) in run run at ",
        ),
        (Deeper, {}, "init_from.run: another model: run run at step 3 has no model/3.bias, which"),
        (Shallower, {}, "another model: this run has no model/2.bias, which run run at step 3 has"),
        (Sgd, {}, r"init_from.optimizer: keep: .* no optim/state.\S+, .*; reset leaves"),
        (Trainee, {"step": 2}, "init_from.step: 2: run run has no such checkpoint; it has 3$"),
        (Trainee, {"run": "nobody"}, "init_from.run: 'nobody': the job's storage has no"),
        (
            Trainee,
            {"run": "nobody", "step": None},
            "init_from.run: 'nobody': the job's storage has no",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, source, trainee, spec, words):
    heir = trainee()
    before = heir.state()["model"]
    with pytest.raises(InputError, match=words):
        take_over(tmp_path, heir, **spec)
    assert heir.state()["model"] == before


def test_another_optimizer_may_begin_with_the_weights_alone(tmp_path, source):
    heir = Sgd()
    take_over(tmp_path, heir, optimizer="reset")
    assert heir.state()["model"] == source.state()["model"]


def test_a_run_takes_over_until_it_has_a_checkpoint_of_its_own(tmp_path, source):
    spec = InitFromSpec(run="run", step=STEP)
    place = Place(tmp_path, 1, (None,), (None,))
    context = place.context(0, 1)
    job = context.job.model_copy(update={"run_id": "heir", "init_from": spec})
    context = replace(context, job=job)
    own = CheckpointStore(LocalStore(tmp_path / "store"), "heir")
    heir = Heir()
    assert Checkpointer(context, own, heir.training, CPU).restore() == 0
    assert heir.state()["model"] == source.state()["model"]
    heir.step()
    Checkpointer(context, own, heir.training, CPU).save(1, data=heir.data.state_dict())
    later = Heir()
    assert Checkpointer(context, own, later.training, CPU).restore() == 1
    assert later.state()["model"] == heir.state()["model"]
