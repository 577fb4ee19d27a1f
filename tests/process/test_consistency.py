"""Ranks that train different models, in real processes: a program's mistake, and a flipped bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from perdure.training.config.model import ParallelKind
from perdure.training.drill.driver import RunDriver, RunOutcome
from perdure.training.drill.evaluation import list_recoveries
from perdure.training.drill.job import drill_job
from perdure.training.recovery.faults import FaultClass
from perdure.training.recovery.rungs import Rung
from tests.process.harness import REPO, assert_as_undisturbed

pytestmark = pytest.mark.process

STEPS = 16
AT_STEP = 9
Play = Callable[..., RunOutcome]


@pytest.fixture(scope="module")
def play(home) -> Play:
    """Runs of tests/recipes/adrift.py, each made once."""
    played: dict[str, RunOutcome] = {}

    def run(
        name: str,
        *,
        wrap: str,
        kind: ParallelKind = ParallelKind.DDP,
        slots: int = 2,
        **env: str,
    ) -> RunOutcome:
        if name not in played:
            changes = {
                "engine": {"slots_per_node": slots},
                "worker": {"recipe": "tests.recipes.adrift:main", "cwd": str(REPO)},
                "env": {"WRAP": wrap, "MARK": str(home / f"mark-{name}"), **env},
                "watch": {"consistency_every_steps": 1},
            }
            job = drill_job(home, name, kind=kind, steps=STEPS, changes=changes)
            played[name] = RunDriver(home).run(job)
        return played[name]

    return run


@pytest.mark.parametrize(
    "kind",
    [ParallelKind.DDP, pytest.param(ParallelKind.FSDP2, marks=pytest.mark.long)],
)
def test_a_model_that_nobody_wrapped_ends_the_run_at_step_1_and_says_what_to_do(play, kind):
    played = play(f"unwrapped-{kind}", wrap="none", kind=kind)
    (view,) = played.history.attempts
    fault = view.ended.fault
    assert fault.fault_class is FaultClass.USER_CODE_ERROR
    assert "different gradients at step 1" in fault.evidence
    assert "wrap the model in DistributedDataParallel or FSDP2" in fault.evidence
    assert view.decision.rung is Rung.STOP
    assert (dict(played.curve), list(played.history.checkpoints)) == ({}, [])


@pytest.mark.long
@pytest.mark.parametrize(("part", "rank"), [("weights", 2), ("gradients", 0)])
def test_a_flipped_bit_is_found_on_its_rank_and_mended_by_a_replica(play, home, part, rank):
    name = f"flipped-{part}"
    played = play(name, wrap="ddp", FLIP=f"{part}:{rank}:{AT_STEP}")
    assert (home / f"mark-{name}").exists()
    (recovery,) = list_recoveries(played.history)
    assert recovery.rung is Rung.STEP_RETRY
    (view,) = played.history.attempts
    fault = view.recoveries[0].began.fault
    assert (fault.fault_class, fault.rank) == (FaultClass.DEVICE_MEMORY_ERROR, rank)
    assert f"{part} of rank {rank} differ from those of most ranks at step {AT_STEP}" in (
        fault.evidence
    )
    assert view.recoveries[0].ended.repaired == (rank,)
    assert_as_undisturbed(played, play("undisturbed", wrap="ddp"), steps=STEPS)


@pytest.mark.long
def test_a_job_that_takes_shards_for_replicas_is_refused_before_the_first_step(play):
    played = play("wrong-kind", wrap="fsdp2", kind=ParallelKind.DDP)
    (view,) = played.history.attempts
    assert view.ended.fault.fault_class is FaultClass.USER_CODE_ERROR
    assert "parallelism.kind: ddp has ranks 0, 1, 2, 3 hold the same weights" in (
        view.ended.fault.evidence
    )
    assert view.decision.rung is Rung.STOP


@pytest.mark.long
def test_of_two_ranks_nobody_knows_which_is_right_and_both_go_back_to_the_checkpoint(play, home):
    played = play("flipped-of-two", wrap="ddp", slots=1, FLIP=f"weights:1:{AT_STEP + 3}")
    assert (home / "mark-flipped-of-two").exists()
    first, second = played.history.attempts
    fault = first.ended.fault
    assert fault.fault_class is FaultClass.NUMERIC_ANOMALY
    assert "different weights at step 12, and were equal before" in fault.evidence
    assert first.decision.rung is Rung.IN_PLACE_RESTART
    assert first.last_save is None or first.last_save.step is None
    assert second.from_step == 10
    assert_as_undisturbed(played, play("two", wrap="ddp", slots=1), steps=STEPS)
