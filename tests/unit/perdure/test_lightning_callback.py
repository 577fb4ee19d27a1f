"""The callback outside Perdure, and what it refuses inside; lightning is the installed one."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateFinder, Timer
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors import data_connector

from perdure.integrations.lightning import PerdureCallback
from perdure.integrations.lightning_loop import PHASES, REPLACED, LightningLoop
from perdure.integrations.lightning_settings import (
    SERIES,
    check_checkpoint,
    check_data,
    check_optimizer,
    check_trainer,
)
from perdure.training.errors import InputError
from perdure.training.runtime.session import Session
from tests.jobs import small_job

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def program(monkeypatch):
    """The example's module."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(EXAMPLES)])
    monkeypatch.setattr(sys, "argv", ["lightning_train.py", "--num-samples=32"])
    return pytest.importorskip("lightning_train")


@pytest.fixture
def module(program):
    return program.LanguageModel(program.parse_arguments())


def small_trainer(**settings: Any) -> Trainer:
    """A Trainer of one rank."""
    given = {"accelerator": "cpu", "devices": 1, "max_steps": 2, "logger": False}
    quiet = {"enable_progress_bar": False, "enable_checkpointing": False}
    return Trainer(**{**given, **quiet, "enable_model_summary": False, **settings})


def session(**changes: Any) -> Any:
    """A session, as far as checks look at it."""
    device = torch.device("cpu")
    job = small_job(**{"steps": 2, **changes})
    return SimpleNamespace(job=job, world_size=1, rank=0, device=device)


def refused(text: str) -> Any:
    return pytest.raises(InputError, match=text)


def test_outside_perdure_the_callback_changes_nothing(program, module):
    assert Session.current is None
    barrier = data_connector._InfiniteBarrier
    trainer = small_trainer(callbacks=[PerdureCallback()])
    program.fit(trainer, module.args)
    assert trainer.global_step == 2
    assert data_connector._InfiniteBarrier is barrier
    for path, name in [*REPLACED.values(), *PHASES.values()]:
        target = trainer
        for part in filter(None, path.split(".")):
            target = getattr(target, part)
        assert name not in vars(target)


@pytest.mark.parametrize(("path", "name"), [*REPLACED.values(), *PHASES.values()])
def test_every_method_that_is_replaced_is_one_of_the_installed_trainer(path, name):
    target = small_trainer()
    for part in filter(None, path.split(".")):
        target = getattr(target, part)
    assert inspect.ismethod(getattr(target, name))


def test_the_barrier_that_is_replaced_is_where_the_data_is_prepared():
    source = inspect.getsource(data_connector)
    assert source.count("with _InfiniteBarrier():") == 2


def test_a_trainer_as_it_is_passes(module):
    check_trainer(session(), small_trainer(), module)
    check_trainer(session(), small_trainer(max_steps=-1, max_epochs=1), module)
    check_checkpoint(None)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_steps": 3}, "steps: 2 in the job, but the Trainer has max_steps=3: leave"),
        ({"callbacks": [LearningRateFinder()]}, "callbacks: LearningRateFinder trains beside"),
        ({"callbacks": [Timer()]}, "callbacks: Timer asks all ranks after every batch"),
        ({"max_time": "00:01:00:00"}, "callbacks: Timer"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs: 1"),
        (
            {"strategy": DDPStrategy(model_averaging_period=2)},
            "strategy: DDPStrategy averages models",
        ),
        ({"strategy": "ddp_spawn"}, "strategy: DDPStrategy starts processes of its own"),
    ],
)
def test_a_setting_that_does_not_go_together_is_refused_by_name(settings, text, module):
    with refused(text):
        check_trainer(session(), small_trainer(**settings), module)


def test_another_strategy_than_ddp_is_refused(module):
    with refused("parallelism.kind: fsdp2: a Trainer's model is wrapped in ddp"):
        check_trainer(session(parallelism={"kind": "fsdp2"}), small_trainer(), module)

    class Own(DDPStrategy):  # type: ignore[misc]
        pass

    with refused("strategy: Own is not possible under Perdure: give ddp"):
        check_trainer(session(), small_trainer(strategy=Own()), module)


def test_a_trainer_that_sees_other_ranks_or_devices_is_refused(module):
    one = session()
    one.world_size = 2
    with refused("devices: devices=1 and num_nodes=1 are not the 2 ranks of the run"):
        check_trainer(one, small_trainer(), module)
    one = session()
    one.device = torch.device("meta")
    with refused("accelerator: the Trainer's device is cpu, and that of rank 0 meta"):
        check_trainer(one, small_trainer(), module)


def test_a_step_that_is_not_the_trainers_own_is_refused(module):
    module.automatic_optimization = False
    with refused("automatic_optimization: false in LanguageModel"):
        check_trainer(session(), small_trainer(), module)


def test_a_plugin_that_steps_the_optimizer_itself_is_refused(module):
    trainer = small_trainer()
    trainer.strategy.precision_plugin = DeepSpeedPrecision("32-true")
    with refused("precision: DeepSpeedPrecision steps the optimizer"):
        check_trainer(session(), trainer, module)


@pytest.mark.parametrize(
    ("restart", "text"),
    [
        ({"data_skipping": True, "abnormal_grad_norm": 9.0}, "data_skipping: true"),
        ({"numeric_retry": True, "snapshot_every_steps": 5}, "snapshot_every_steps: 5"),
    ],
)
def test_an_answer_to_abnormal_steps_that_a_trainer_does_not_have_is_refused(restart, text, module):
    with refused(text):
        check_trainer(session(restart=restart), small_trainer(), module)


def test_a_checkpoint_of_the_trainers_own_is_refused():
    with refused("ckpt_path: 'out/last.ckpt': Perdure restores the run itself"):
        check_checkpoint("out/last.ckpt")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda _: [], "gave 0: give one"),
        (lambda p: [torch.optim.SGD(p), torch.optim.SGD(p)], "gave 2: give one"),
        (lambda p: [torch.optim.LBFGS(p)], "LBFGS runs the model within its step"),
    ],
)
def test_an_optimizer_that_a_step_cannot_have_is_refused(make, text):
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    with refused(text):
        check_optimizer(SimpleNamespace(optimizers=make(parameters)))


def test_several_loaders_are_refused():
    loop = SimpleNamespace(_combined_loader=SimpleNamespace(flattened=[1, 2]), _data_fetcher=None)
    with refused("train_dataloaders: 2 loaders: give one"):
        check_data(loop)


def test_the_series_that_is_asked_for_is_that_of_the_extra():
    text = (EXAMPLES.parent / "pyproject.toml").read_text()
    assert f'"lightning>={SERIES}.4,<2.7"' in text


def test_the_target_of_a_trainer_without_one_is_the_jobs(module):
    trainer = small_trainer(max_steps=-1, max_epochs=1)
    one = session(steps=7)
    one.context = SimpleNamespace(placement=1, attempt=2, generation=None)
    LightningLoop(one, trainer, module).attach()
    assert (trainer.max_steps, trainer.max_epochs) == (7, -1)
    assert trainer.num_sanity_val_steps == 0
