"""The callback outside Perdure, and what it refuses inside; transformers is the installed one."""

from __future__ import annotations

import inspect
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from perdure.integrations.trainer_loop import PHASES, REPLACED, TrainerLoop
from perdure.integrations.trainer_settings import SERIES, check_settings, check_training
from perdure.integrations.transformers import PerdureCallback
from perdure.training.diagnosis.exits import EXIT_RESTART_ME
from perdure.training.errors import InputError
from perdure.training.recovery.repair import Vote
from perdure.training.runtime.session import Session
from tests.jobs import small_job

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """The example's Trainer, of one rank."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(EXAMPLES)])
    program = pytest.importorskip("trainer_train")
    args = program.Arguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=2, num_samples=16, logging_steps=1
    )
    return program.make_trainer(args)


def session(**changes: Any) -> Any:
    """A session, as far as checks look at it."""
    return SimpleNamespace(job=small_job(**changes), world_size=1)


def test_outside_perdure_the_callback_changes_nothing(trainer):
    assert Session.current is None
    before = dict(vars(trainer))
    trainer.add_callback(PerdureCallback(trainer))
    assert vars(trainer) == before
    trainer.train()
    assert trainer.state.global_step == 2
    assert all(math.isfinite(one["loss"]) for one in trainer.state.log_history[:-1])


@pytest.mark.parametrize("name", [*REPLACED, *PHASES])
def test_every_method_that_is_replaced_is_one_of_the_installed_trainer(name):
    assert inspect.isfunction(getattr(transformers.Trainer, name))


def test_the_one_collective_of_a_log_is_where_it_is_replaced():
    source = inspect.getsource(transformers.trainer)
    assert source.count("nested_gather(") == 1
    assert "nested_gather(tr_loss, self.args.parallel_mode)" in source


def test_a_trainer_as_it_is_passes(trainer):
    check_settings(session(), trainer)
    check_training(small_job(steps=2), 2, None, object(), dict)


def refused(text: str) -> Any:
    return pytest.raises(InputError, match=text)


def test_a_trainer_that_sees_other_ranks_is_refused(trainer):
    one = session()
    one.world_size = 2
    with refused("use_cpu: True: the Trainer sees 1 ranks, and the run has 2"):
        check_settings(one, trainer)


def test_an_order_that_cannot_be_had_again_is_refused(trainer):
    trainer.args.accelerator_config.use_seedable_sampler = False
    with refused("accelerator_config.use_seedable_sampler: false"):
        check_settings(session(), trainer)


def test_a_trainer_that_takes_its_batches_in_its_own_way_is_refused(trainer):
    class Own(transformers.Trainer):  # type: ignore[misc]
        def get_batch_samples(self, *given: Any) -> Any:
            return super().get_batch_samples(*given)

    trainer.__class__ = Own
    with refused("Own takes its batches by a get_batch_samples of its own"):
        check_settings(session(), trainer)


FSDP2 = {"kind": "fsdp2"}


def sharded(trainer: Any, **config: Any) -> Any:
    """The Trainer with the arguments of FSDP, as its constructor reads them."""
    args = trainer.args
    args.fsdp, args.fsdp_config = True, config
    args.fsdp_plugin_args = args._process_fsdp_args()
    return trainer


def test_a_trainer_that_shards_its_model_passes_where_the_job_says_so(trainer):
    check_settings(session(parallelism=FSDP2), sharded(trainer))
    with refused("fsdp: is on, but parallelism.kind is ddp: give the job fsdp2"):
        check_settings(session(), trainer)


def test_a_trainer_that_shards_nothing_is_refused_where_the_job_says_it_does(trainer):
    with refused("parallelism.kind: fsdp2, but the Trainer wraps its model in ddp"):
        check_settings(session(parallelism=FSDP2), trainer)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"version": 1}, "fsdp_config.version: 1: fully_shard of torch alone"),
        ({"xla": True}, "fsdp_config.xla: True: fully_shard of torch alone"),
        ({"cpu_offload": True}, "fsdp_config.cpu_offload: true"),
    ],
)
def test_another_way_to_shard_is_refused(config, text, trainer):
    with refused(text):
        check_settings(session(parallelism=FSDP2), sharded(trainer, **config))


def test_another_wrapper_is_refused(trainer):
    hsdp = {"kind": "hsdp", "replicas": 2}
    with refused("parallelism.kind: hsdp: a Trainer's model is wrapped in ddp, or in fsdp2"):
        check_settings(session(parallelism=hsdp), trainer)


@pytest.mark.parametrize(
    ("restart", "text"),
    [
        ({"data_skipping": True, "abnormal_grad_norm": 9.0}, "data_skipping: true"),
        ({"numeric_retry": True, "snapshot_every_steps": 5}, "snapshot_every_steps: 5"),
    ],
)
def test_an_answer_to_abnormal_steps_that_a_trainer_does_not_have_is_refused(
    restart, text, trainer
):
    with refused(text):
        check_settings(session(restart=restart), trainer)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((3, None, object()), "steps: 2 in the job, but the Trainer has max_steps=3: leave"),
        ((2, "out/checkpoint-1", object()), "resume_from_checkpoint: 'out/checkpoint-1'"),
        ((2, None, {}), "dispatch_batches: must be false"),
    ],
)
def test_what_a_trainer_is_about_to_do_is_refused_with_both_values(given, text):
    max_steps, resume, dataloader = given
    with refused(text):
        check_training(small_job(steps=2), max_steps, resume, dataloader, dict)


def test_the_series_that_is_asked_for_is_that_of_the_extra():
    text = (EXAMPLES.parent / "pyproject.toml").read_text()
    assert f'"transformers>={SERIES},<5.25"' in text


def test_the_target_of_a_trainer_without_one_is_the_jobs(trainer):
    trainer.args.max_steps = -1
    TrainerLoop(session(steps=7), trainer)
    assert trainer.args.max_steps == 7


class Recovered:
    """A loop whose recovery brings this rank behind the step that it was in, or before it."""

    def __init__(self, *, step: int) -> None:
        self.state = SimpleNamespace(step=step, vote=VOTE)

    def is_recoverable(self, _error: BaseException) -> bool:
        return True

    def recover(self, _error: BaseException) -> None:
        pass

    def next_step(self) -> Any:
        return SimpleNamespace(number=self.state.step + 1, data=[{}], vote=None)


VOTE = Vote(step=5, loss=3.0, grad_norm=0.5, stop=False, save=False, pause=False)


def stepping(trainer: Any, *, recovered_at: int) -> TrainerLoop:
    """A loop of which step 5 fails once, and recovery brings it to a step."""
    one = TrainerLoop(session(), trainer)
    one._steps._loop = Recovered(step=recovered_at)  # type: ignore[assignment]
    one._steps._step = SimpleNamespace(number=5, data=[{}, {}], vote=None)  # type: ignore[assignment]
    trainer.state.global_step = 4
    trainer.optimizer = Counting()
    trainer.lr_scheduler = Counting()
    return one


class Counting:
    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1


class Failing:
    """Work that fails the first time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == 1:
            raise RuntimeError("gloo/transport: connection closed")


def test_a_step_that_recovery_has_applied_is_not_applied_again_by_the_trainer(trainer):
    one, work = stepping(trainer, recovered_at=5), Failing()
    optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
    one._in_step(work)
    assert work.calls == 1
    assert one.clip_grad_norm(trainer.model) == 0.5
    trainer.optimizer.step()
    trainer.lr_scheduler.step()
    one.applied()
    assert (optimizer.steps, scheduler.steps) == (0, 0)
    assert (trainer.optimizer, trainer.lr_scheduler) == (optimizer, scheduler)


def test_a_step_that_recovery_has_not_applied_is_done_again(trainer):
    one, work = stepping(trainer, recovered_at=4), Failing()
    one._in_step(work)
    assert work.calls == 2
    trainer.optimizer.step()
    one.applied()
    assert trainer.optimizer.steps == 1
    assert one._steps.step.is_applied


def test_a_trainer_that_would_have_to_go_back_is_started_again(trainer):
    with pytest.raises(SystemExit) as end:
        stepping(trainer, recovered_at=2)._in_step(Failing())
    assert end.value.code == EXIT_RESTART_ME
