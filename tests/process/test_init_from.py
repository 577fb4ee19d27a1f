"""A run that begins from another one's checkpoint, in real processes."""

from __future__ import annotations

import pytest

from perdure.training.config.drill import DrillFault, DrillKind, DrillPoint
from perdure.training.config.model import ParallelKind
from perdure.training.drill.driver import RunDriver, RunOutcome
from perdure.training.drill.job import drill_job
from perdure.training.recovery.rungs import Rung
from tests.process.harness import assert_as_undisturbed

pytestmark = [pytest.mark.process, pytest.mark.long]

TAUGHT_STEPS, STEPS = 24, 12
HEIR = {
    "optimizer": {"lr": 1e-3, "warmup_steps": 0, "betas": [0.8, 0.9]},
    "checkpoint": {"every_steps": 10},
    "restart": {"process_replace": False, "end_of_life_checkpoint": False},
}


@pytest.fixture(scope="module")
def heir(home):
    """Runs that begin from `taught`, sharded though it was not; each is made once."""
    taught = drill_job(home, "taught", kind=ParallelKind.DDP, steps=TAUGHT_STEPS, changes={})
    played = {"taught": RunDriver(home).run(taught)}

    def play(name: str, *faults: DrillFault, **spec) -> RunOutcome:
        if name not in played:
            given = {"drill": {"faults": faults}, **({"init_from": spec} if spec else {})}
            job = drill_job(
                home, name, kind=ParallelKind.FSDP2, steps=STEPS, changes={**HEIR, **given}
            )
            played[name] = RunDriver(home).run(job)
        return played[name]

    return play


def test_a_run_goes_on_with_the_weights_of_another_and_its_own_hyperparameters(heir):
    (taught, _), *_ = (heir("taught").curve[step] for step in (TAUGHT_STEPS,))
    kept = heir("kept", run="taught")
    (fresh, _), (first, _) = heir("fresh").curve[1], kept.curve[1]
    assert kept.ended == "completed"
    assert list(kept.curve) == list(range(1, STEPS + 1))
    assert abs(first - taught) < 0.1 * (fresh - taught)
    reset = heir("reset", run="taught", optimizer="reset")
    assert reset.curve[1] == kept.curve[1], "the first step has the same weights"
    assert reset.curve[2] != kept.curve[2], "and other moments"
    earlier = heir("earlier", run="taught", step=10)
    assert earlier.curve[1] != kept.curve[1]


def test_a_restart_before_the_first_checkpoint_begins_from_the_same_weights_again(heir):
    fault = DrillFault(kind=DrillKind.KILL, rank=1, step=5, point=DrillPoint.BACKWARD)
    killed = heir("killed", fault, run="taught")
    assert len(killed.fired_s[0]) == 1
    first, second = killed.history.attempts
    assert first.decision is not None
    assert first.decision.rung is Rung.IN_PLACE_RESTART
    assert second.from_step == 0
    assert_as_undisturbed(killed, heir("kept", run="taught"), steps=STEPS)
