"""Restarts every so often, in real processes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from perdure.training.drill.driver import RunDriver
from tests.process.harness import assert_as_undisturbed, faulty_job
from tests.values import not_none
from tests.waiting import wait_for

pytestmark = [pytest.mark.process, pytest.mark.long]

STEPS = 40


def test_a_run_that_is_restarted_every_so_often_is_as_one_that_is_not(home):
    # The policy has no restart left: what is asked for is none of its recoveries.
    restart = {"max_restarts": 0, "in_place_retries": 1, "every_s": 1.0}
    saves = {"every_steps": 8}
    driver = RunDriver(home)
    played = driver.run(
        faulty_job(home, "every", steps=STEPS, pace_s=0.2, restart=restart, checkpoint=saves)
    )
    plain = driver.run(faulty_job(home, "plain", steps=STEPS, checkpoint=saves))
    assert_as_undisturbed(played, plain, steps=STEPS)
    attempts = played.history.attempts
    outcomes = [not_none(view.ended).outcome for view in attempts]
    assert len(outcomes) >= 3, "two restarts at least fell due"
    assert outcomes == ["restarted"] * (len(outcomes) - 1) + ["completed"]
    assert {view.started.placement for view in attempts} == {1}, "in the same containers"
    assert [view for view in attempts if view.decision or not_none(view.ended).fault] == []
    assert played.history.recoveries() == []
    for before, after in pairwise(attempts):
        assert after.from_step == not_none(before.ended).to_step, "no step is trained twice"


@pytest.mark.prefect
def test_the_ui_shows_a_restart_every_so_often_as_what_it_is(bench, api):
    restart = {"max_restarts": 0, "every_s": 1.0}
    running = bench.start(bench.job("daily", restart=restart))
    assert running.finish() == 0, running.out
    assert running.rungs() == []

    def shown() -> list[str]:
        tasks = api.task_runs("daily").items()
        return [state for name, state in tasks if name.startswith("attempt ")]

    wait_for(lambda: set(shown()) == {"Restarted", "Completed"}, what="both states")
    assert shown().count("Completed") == 1
