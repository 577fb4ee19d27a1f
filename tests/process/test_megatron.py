"""Programs of Megatron under Perdure: real megatron-core on the CPU, ranks that are killed.

`make test-megatron` runs them in an environment that has megatron-core. The loop is of the tests,
in the form of megatron.training (tests/recipes/megatron_form).
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from perdure.storage.address import StorageSpec, open_store
from perdure.storage.checkpoint import CheckpointStore
from perdure.training.config.job import Job, parse_job
from perdure.training.config.model import ParallelKind
from perdure.training.drill.driver import Pauser, RunDriver, RunHook, RunOutcome
from perdure.training.drill.evaluation import list_recoveries
from perdure.training.drill.job import drill_job
from perdure.training.recovery.rungs import Rung
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.watch import Progress
from tests.local_run import LocalRun
from tests.process.harness import RECIPES, REPO, assert_as_undisturbed

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        find_spec("megatron") is None, reason="no megatron-core: make test-megatron"
    ),
]

EXAMPLES = REPO / "examples"
STEPS = 10
RETRY, REPLACE, IN_PLACE = Rung.STEP_RETRY, Rung.PROCESS_REPLACE, Rung.IN_PLACE_RESTART
PRELOAD = [
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.distributed",
    "megatron.core.pipeline_parallel",
]
INSTANCES = ("--use-distributed-optimizer", "--num-distributed-optimizer-instances=2")
BUCKETS = ("--overlap-grad-reduce", "--ddp-bucket-size=4000")


@dataclass(frozen=True, slots=True)
class Form:
    """A layout of ranks, by Megatron's arguments."""

    ranks: int
    arguments: tuple[str, ...] = ()


DATA = Form(2)
FORMS = {
    "tensor": Form(4, ("--tensor-model-parallel-size=2",)),
    "pipeline": Form(4, ("--pipeline-model-parallel-size=2",)),
    "interleaved": Form(
        4,
        (
            "--pipeline-model-parallel-size=2",
            "--num-layers=4",
            "--num-layers-per-virtual-pipeline-stage=1",
        ),
    ),
    "two instances": Form(4, INSTANCES),
    "buckets": Form(2, BUCKETS),
    "buckets of two instances": Form(4, (*INSTANCES, *BUCKETS)),
    "gathers in hooks": Form(4, (*INSTANCES, *BUCKETS, "--overlap-param-gather")),
    "bf16": Form(2, ("--bf16",)),
    "fp16": Form(2, ("--fp16",)),
    "bf16 of two instances": Form(4, (*INSTANCES, "--bf16")),
}


def play(
    home: Path,
    name: str,
    form: Form,
    *arguments: str,
    faults: tuple[dict[str, Any], ...] = (),
    env: Mapping[str, str] = MappingProxyType({}),
    hook: RunHook | None = None,
    **changes: Any,
) -> RunOutcome:
    """A run; with SHOT, ranks kill themselves in the forward pass of a micro-batch."""
    shots = home / f"shots-{name}"
    shots.mkdir(parents=True)
    worker = {"script": ["pretrain_tiny.py", *form.arguments, *arguments], "cwd": str(RECIPES)}
    job = job_of(home, name, form.ranks, worker, {"SHOTS": str(shots), **env}, faults, **changes)
    return RunDriver(home).run(job, hook=hook)


def job_of(
    home: Path,
    name: str,
    ranks: int,
    worker: Mapping[str, Any],
    env: Mapping[str, str],
    faults: tuple[dict[str, Any], ...],
    *,
    steps: int = STEPS,
    **changes: Any,
) -> Job:
    file, *arguments = worker["script"]
    usual = [
        f"--train-iters={steps}",
        f"--global-batch-size={4 * ranks}",
        "--disable-gloo-process-groups",
        "--rerun-mode=disabled",
    ]
    integration = None if env.get("BY_LINE") else "megatron"
    nodes = 2 if ranks > 2 else 1
    sections: dict[str, Any] = {
        "worker": {
            "recipe": None,
            "preload": PRELOAD,
            **worker,
            "script": [file, *usual, *arguments],
            "integration": integration,
        },
        "env": {"OMP_NUM_THREADS": "1", **env},
        "checkpoint": {"every_steps": 4},
        "watch": {"consistency_every_steps": 1},
        "engine": {"nodes": nodes, "slots_per_node": ranks // nodes, "spares": 0},
        "drill": {"faults": list(faults)},
        **changes,
    }
    return drill_job(home, name, kind=ParallelKind.DDP, steps=steps, changes=sections)


@cache
def undisturbed(home: Path, form: Form) -> RunOutcome:
    number = len(list(home.glob("shots-*")))
    return play(home, f"whole-{number}", form)


VALIDATION = re.compile(r"validation loss at (.*?) +\| (.*)")


def validations(home: Path, name: str) -> dict[str, str]:
    """What evaluations have printed, by when they were."""
    logs = (home / "runs" / name).rglob("rank-*.stdout.log")
    return dict(found for log in logs for found in VALIDATION.findall(log.read_text()))


def at(kind: str, rank: int, step: int, point: str) -> dict[str, Any]:
    return {"kind": kind, "rank": rank, "step": step, "point": point}


def test_ranks_of_megatron_are_replaced_within_a_step_and_no_digit_differs(home):
    faults = (at("kill", 0, 7, "voted"), at("link", 1, 9, "backward"))
    played = play(home, "ranks", DATA, faults=faults, env={"SHOT": "1:5:2"})
    assert [recovery.rung for recovery in list_recoveries(played.history)] == [
        REPLACE,
        REPLACE,
        RETRY,
    ]
    assert len(played.history.attempts) == 1
    assert_as_undisturbed(played, undisturbed(home, DATA), steps=STEPS)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "two instances" else pytest.mark.long) for n in FORMS],
)
def test_ranks_of_every_layout_are_replaced_within_a_step(home, name):
    form = FORMS[name]
    last = form.ranks - 1
    faults = (at("kill", 0, 7, "voted"), at("link", last, 9, "backward"))
    played = play(
        home, f"broken-{name.replace(' ', '-')}", form, faults=faults, env={"SHOT": f"{last}:4:2"}
    )
    assert [recovery.rung for recovery in list_recoveries(played.history)] == [
        REPLACE,
        REPLACE,
        RETRY,
    ]
    assert_as_undisturbed(played, undisturbed(home, form), steps=STEPS)


@pytest.mark.long
@pytest.mark.parametrize("name", ["tensor", "pipeline", "bf16 of two instances"])
def test_when_all_ranks_die_they_go_on_from_the_newest_checkpoint(home, name):
    form = FORMS[name]
    faults = tuple(at("kill", rank, 7, "backward") for rank in range(form.ranks))
    played = play(home, f"all-{name.replace(' ', '-')}", form, faults=faults)
    first, second = played.history.attempts
    assert first.decision is not None
    assert first.decision.rung is IN_PLACE
    assert second.from_step == 4
    assert_as_undisturbed(played, undisturbed(home, form), steps=STEPS)


@pytest.mark.long
def test_without_a_second_instance_no_rank_is_replaced_and_the_next_rung_answers(home):
    form = Form(2, ("--use-distributed-optimizer",))
    played = play(home, "one-instance", form, faults=(at("kill", 1, 7, "backward"),))
    first, second = played.history.attempts
    assert first.decision is not None
    assert "no replica" in str(first.decision)
    assert first.decision.rung is IN_PLACE
    assert second.from_step == 4
    assert_as_undisturbed(played, undisturbed(home, form), steps=STEPS)


@pytest.mark.long
@pytest.mark.parametrize("form", [DATA, FORMS["tensor"]], ids=["data", "tensor"])
def test_evaluations_and_saves_of_megatron_are_as_undisturbed_and_a_death_costs_no_step(home, form):
    own, name = home / f"megatron-saves-{form.ranks}", f"saves-{form.ranks}"
    arguments = ("--eval-iters=2", "--eval-interval=3", "--save-interval=5", f"--save={own}")
    faults = (at("kill", form.ranks - 1, 4, "backward"), at("kill", 0, 8, "voted"))
    played = play(home, name, form, *arguments, faults=faults)
    assert [recovery.rung for recovery in list_recoveries(played.history)] == [REPLACE, REPLACE]
    assert (own / "latest_checkpointed_iteration.txt").read_text() == str(STEPS)
    whole = play(home, f"{name}-whole", form, *arguments)
    assert_as_undisturbed(played, whole, steps=STEPS)
    assert len(validations(home, name)) == STEPS // 3 + 1
    assert validations(home, name) == validations(home, f"{name}-whole")


@pytest.mark.long
def test_an_evaluation_that_a_death_cuts_short_is_left_out(home):
    arguments = ("--eval-iters=2", "--eval-interval=3")
    by_line = {"BY_LINE": "1"}
    played = play(home, "cut", DATA, *arguments, faults=(at("kill", 1, 6, "applied"),), env=by_line)
    assert [recovery.rung for recovery in list_recoveries(played.history)] == [REPLACE]
    assert_as_undisturbed(played, play(home, "cut-whole", DATA, *arguments), steps=STEPS)
    whole = validations(home, "cut-whole")
    assert validations(home, "cut") == {k: v for k, v in whole.items() if k != "iteration 6"}


@pytest.mark.long
@pytest.mark.parametrize("name", ["data", "fp16", "two instances"])
def test_a_loss_that_is_no_number_has_the_step_done_again(home, name):
    form = FORMS.get(name, DATA)
    restart = {"numeric_retry": True, "snapshot_every_steps": 1}
    faults = (at("not_a_number", 1, 6, "backward"),)
    played = play(home, f"nan-{name.replace(' ', '-')}", form, faults=faults, restart=restart)
    assert [recovery.rung for recovery in list_recoveries(played.history)] == [RETRY]
    assert_as_undisturbed(played, undisturbed(home, form), steps=STEPS)


@pytest.mark.long
def test_a_rank_that_is_stopped_is_a_hang_and_all_go_on_from_the_newest_checkpoint(home):
    faults = (at("stop", 1, 7, "backward"),)
    played = play(home, "stopped", DATA, faults=faults, restart={"hang_timeout_s": 8})
    first, second = played.history.attempts
    assert first.decision is not None
    assert first.decision.rung is Rung.HANG_RESTART
    assert second.from_step == 4
    assert_as_undisturbed(played, undisturbed(home, DATA), steps=STEPS)


PACED = {"PACE_S": "0.3"}  # requests are looked for every other second


@pytest.mark.long
def test_a_program_pauses_between_two_steps_and_goes_on(home):
    pauser = Pauser(at_step=2, num_ranks=2)
    played = play(home, "paused", DATA, env=PACED, hook=pauser)
    assert pauser.paused_at
    assert_as_undisturbed(played, undisturbed(home, DATA), steps=STEPS)


@pytest.mark.long
def test_at_a_signal_the_session_saves_and_ends_whatever_handler_megatron_has(home):
    def terminate_once(run: RunSupervisor, progress: Progress) -> None:
        if not signals and progress.last is not None and progress.last.step >= 5:
            (worker,) = LocalRun(home, run.job.run_id).rank(1)
            worker.terminate()
            signals.append(progress.last.step)

    signals: list[int] = []
    arguments = ("--exit-signal-handler",)
    played = play(home, "signal", DATA, *arguments, env=PACED, hook=terminate_once)
    _, second = played.history.attempts
    assert second.from_step >= signals[0]
    assert_as_undisturbed(played, undisturbed(home, DATA), steps=STEPS)


@pytest.mark.long
def test_at_the_end_of_megatrons_own_time_all_ranks_have_saved_the_same_step(home):
    duration = ("--exit-duration-in-mins=0.06",)
    play(home, "duration", DATA, *duration, env={"PACE_S": "1"})
    store = open_store(StorageSpec(address=f"file://{home / 'store'}"))
    last = CheckpointStore(store, "duration").latest()
    assert last is not None
    assert last < STEPS
    for log in (home / "runs" / "duration").rglob("rank-*.stderr.log"):
        assert f"called sys.exit() at step {last} of {STEPS}" in log.read_text()


# Megatron-LM's own tree, a checkout at the tag core_v0.16.1 that MEGATRON_LM names.
MEGATRON_LM = os.environ.get("MEGATRON_LM")
needs_own_tree = pytest.mark.skipif(
    MEGATRON_LM is None, reason="no checkout of Megatron-LM: MEGATRON_LM=..."
)
OWN_FORMS = {
    "data": Form(2),
    "tensor": Form(4, ("--tensor-model-parallel-size=2",)),
    "two instances": Form(4, INSTANCES),
    "gathers in hooks": Form(4, (*INSTANCES, *BUCKETS, "--overlap-param-gather")),
}
ON_CPU = shlex.split("""
    --attention-backend unfused --distributed-backend gloo --use-cpu-initialization
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion
    --no-bias-dropout-fusion --no-rope-fusion""")
PRETRAIN_GPT = shlex.split("""pretrain_gpt.py
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 2 --mock-data --split 90,10,0 --num-workers 0
    --tokenizer-type NullTokenizer --vocab-size 8191 --lr 1e-2 --min-lr 1e-3 --lr-warmup-iters 3
    --lr-decay-style cosine --clip-grad 1.0 --eval-iters 2 --eval-interval 3 --log-interval 1
    --transformer-impl local --no-create-attention-mask-in-dataloader --no-persist-layer-norm
""")


def play_own_tree(home: Path, name: str, form: Form, *faults: dict[str, Any]) -> RunOutcome:
    assert MEGATRON_LM is not None
    preload = ["megatron_lm_cpu", "megatron.core.models.gpt.gpt_model", "gpt_builders"]
    worker = {
        "script": [*PRETRAIN_GPT, *ON_CPU, *form.arguments],
        "cwd": MEGATRON_LM,
        "preload": preload,
    }
    job = job_of(home, name, form.ranks, worker, own_environment(), faults)
    return RunDriver(home).run(job)


def own_environment() -> dict[str, str]:
    path = os.pathsep.join([str(MEGATRON_LM), str(RECIPES), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


@pytest.mark.long
@needs_own_tree
@pytest.mark.parametrize("name", OWN_FORMS)
def test_pretrain_gpt_of_megatron_lm_unchanged_loses_ranks_and_no_digit(home, name):
    form, last = OWN_FORMS[name], OWN_FORMS[name].ranks - 1
    faults = (
        at("kill", last, 5, "backward"),
        at("kill", 0, 7, "voted"),
        at("link", last, 9, "backward"),
    )
    run_id = f"own-{name.replace(' ', '-')}"
    played = play_own_tree(home, run_id, form, *faults)
    assert [recovery.rung for recovery in list_recoveries(played.history)] == [
        REPLACE,
        REPLACE,
        RETRY,
    ]
    assert len(played.history.attempts) == 1
    whole = play_own_tree(home, f"{run_id}-whole", form)
    assert_as_undisturbed(played, whole, steps=STEPS)
    assert len(validations(home, run_id)) >= STEPS // 3
    assert validations(home, run_id) == validations(home, f"{run_id}-whole")


@pytest.mark.long
@needs_own_tree
def test_the_example_survives_the_fault_that_its_job_has(home):
    document = yaml.safe_load((EXAMPLES / "megatron_session.yaml").read_text())
    worker = document["worker"]
    worker["script"] += [*ON_CPU, "--train-iters", "24"]
    worker |= {"cwd": str(EXAMPLES), "preload": ["megatron_lm_cpu", *worker["preload"]]}
    document |= {"steps": 24, "env": own_environment(), "preflight": {"nodes": False}}
    document["storage"] = {"address": f"file://{home}/store"}
    played = RunDriver(home).run(parse_job(document))
    (recovery,) = list_recoveries(played.history)
    assert recovery.rung is REPLACE
    whole = parse_job({**document, "run_id": "example-whole", "drill": {"faults": []}})
    assert_as_undisturbed(played, RunDriver(home).run(whole), steps=24)
