"""Programs of Megatron under Perdure: real megatron-core on the CPU, ranks that are killed.

`make test-megatron` runs them in an environment that has megatron-core. The loop is of the tests,
in the form of megatron.training (tests/recipes/megatron_form).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from perdure.training.config.model import ParallelKind
from perdure.training.drill.driver import RunDriver, RunOutcome
from perdure.training.drill.evaluation import list_recoveries
from perdure.training.drill.job import drill_job
from perdure.training.recovery.rungs import Rung
from tests.process.harness import RECIPES, assert_as_undisturbed

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        find_spec("megatron") is None, reason="no megatron-core: make test-megatron"
    ),
]

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
    "two instances": Form(4, INSTANCES),
    "buckets": Form(2, BUCKETS),
    "buckets of two instances": Form(4, (*INSTANCES, *BUCKETS)),
    "gathers in hooks": Form(4, (*INSTANCES, *BUCKETS, "--overlap-param-gather")),
    "bf16": Form(2, ("--bf16",)),
    "bf16 of two instances": Form(4, (*INSTANCES, "--bf16")),
}


def play(
    home: Path,
    name: str,
    form: Form,
    *arguments: str,
    faults: tuple[dict[str, Any], ...] = (),
    shots: str = "",
) -> RunOutcome:
    """A run; with `shots`, ranks kill themselves in the forward pass of a micro-batch."""
    marks = home / f"shots-{name}"
    marks.mkdir()
    script = [
        "pretrain_tiny.py",
        f"--train-iters={STEPS}",
        f"--global-batch-size={4 * form.ranks}",
        "--disable-gloo-process-groups",
        "--rerun-mode=disabled",
        *form.arguments,
        *arguments,
    ]
    nodes = 2 if form.ranks > 2 else 1
    changes: dict[str, Any] = {
        "worker": {"recipe": None, "script": script, "cwd": str(RECIPES), "preload": PRELOAD},
        "env": {"SHOT": shots, "SHOTS": str(marks), "OMP_NUM_THREADS": "1"},
        "checkpoint": {"every_steps": 4},
        "watch": {"consistency_every_steps": 1},
        "engine": {"nodes": nodes, "slots_per_node": form.ranks // nodes, "spares": 0},
        "drill": {"faults": list(faults)},
    }
    return RunDriver(home).run(
        drill_job(home, name, kind=ParallelKind.DDP, steps=STEPS, changes=changes)
    )


@cache
def undisturbed(home: Path, form: Form) -> RunOutcome:
    number = len(list(home.glob("shots-*")))
    return play(home, f"whole-{number}", form)


def at(kind: str, rank: int, step: int, point: str) -> dict[str, Any]:
    return {"kind": kind, "rank": rank, "step": step, "point": point}


def test_ranks_of_megatron_are_replaced_within_a_step_and_no_digit_differs(home):
    faults = (at("kill", 0, 7, "voted"), at("link", 1, 9, "backward"))
    played = play(home, "ranks", DATA, faults=faults, shots="1:5:2")
    assert [recovery.rung for recovery in list_recoveries(played.history)] == [
        REPLACE,
        REPLACE,
        RETRY,
    ]
    assert len(played.history.attempts) == 1
    assert_as_undisturbed(played, undisturbed(home, DATA), steps=STEPS)


@pytest.mark.long
@pytest.mark.parametrize("name", FORMS)
def test_ranks_of_every_layout_are_replaced_within_a_step(home, name):
    form = FORMS[name]
    last = form.ranks - 1
    faults = (at("kill", 0, 7, "voted"), at("link", last, 9, "backward"))
    played = play(
        home, f"broken-{name.replace(' ', '-')}", form, faults=faults, shots=f"{last}:4:2"
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
    assert first.decision.rung is IN_PLACE
    assert second.from_step == 4
    assert_as_undisturbed(played, undisturbed(home, form), steps=STEPS)


@pytest.mark.long
def test_evaluations_and_saves_of_megatron_are_done_and_a_death_before_them_costs_no_step(home):
    own = home / "megatron-saves"
    arguments = ("--eval-iters=2", "--eval-interval=3", "--save-interval=5", f"--save={own}")
    played = play(home, "saves", DATA, *arguments, faults=(at("kill", 1, 6, "applied"),))
    assert [recovery.rung for recovery in list_recoveries(played.history)] == [REPLACE]
    assert (own / "latest_checkpointed_iteration.txt").read_text() == str(STEPS)
    assert_as_undisturbed(played, undisturbed(home, DATA), steps=STEPS)
