"""The Trainer of Lightning under Perdure: real ranks that are killed, stopped, ended, misled.

Every run's curve, all digits, is that of an undisturbed run of the same program.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.process.harness import RECIPES, Workbench
from tests.waiting import wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

STEPS = 24
# Eight steps of two micro-batches are an epoch, and the last of them has one.
ARGUMENTS = ("--num-samples=120", "--accumulate=2")


def lightning_job(bench: Workbench, run_id: str, *further: str, **changes: Any) -> dict[str, Any]:
    """Two ranks on one node that run tests/recipes/lightning_paced.py."""
    script = ["lightning_paced.py", *ARGUMENTS, *further]
    sections = {
        "data": None,
        "steps": STEPS,
        "worker": {"script": script, "cwd": str(RECIPES)},
        "env": {"PACE_S": "0"},
    }
    return bench.pair(run_id, **{**sections, **changes})


@pytest.fixture(scope="module")
def undisturbed(bench) -> dict[int, float]:
    """Loss of every step of a run without a fault."""
    running = bench.start(lightning_job(bench, "lightning-undisturbed"))
    running.complete()
    curve = running.curve()
    assert list(curve) == list(range(1, STEPS + 1))
    assert curve[STEPS] < curve[1]
    return curve


def fault(kind: str, rank: int, step: int, point: str = "backward") -> dict[str, Any]:
    return {"kind": kind, "rank": rank, "step": step, "point": point}


def test_a_killed_rank_of_lightning_is_replaced_and_no_step_is_done_again(bench, undisturbed):
    faults = [fault("kill", 1, 9), fault("kill", 0, 14, "voted"), fault("link", 1, 20)]
    running = bench.start(lightning_job(bench, "lightning-killed", drill={"faults": faults}))
    running.complete(undisturbed)
    assert running.rungs() == ["process_replace", "process_replace", "step_retry"]
    (attempt,) = running.history.attempts
    assert [one.ended.steps_lost for one in attempt.recoveries] == [0, 0, 0]

    status = running.status()
    assert (status["step"], status["loss"]) == (STEPS, undisturbed[STEPS])
    assert status["ettr"] > 0
    assert status["tokens_per_s"] > 0
    assert status["checkpoints"]["store"] == {"newest": STEPS, "count": 3}


@pytest.mark.long
def test_lightning_outlives_the_loss_of_a_node(bench, undisturbed):
    engine = {"nodes": 2, "slots_per_node": 1, "spares": 1, "grace_s": 10}
    lost = {"faults": [fault("kill_node", 1, 13)]}
    restart = {"pod_retries": 1, "node_replace": True}
    running = bench.start(
        lightning_job(bench, "lightning-node", drill=lost, restart=restart, engine=engine)
    )
    running.complete(undisturbed)
    assert running.rungs() == ["node_replace"]


@pytest.mark.long
def test_a_hang_of_lightning_is_noticed_by_its_step_and_restarted(bench, undisturbed):
    stopped = {"faults": [fault("stop", 1, 15)]}
    restart = {"hang_timeout_s": 3}
    # Validations have a limit of their own: each of these is longer than that of a step.
    slow = {"PACE_S": "0", "VALIDATE_S": "1.5"}
    running = bench.start(
        lightning_job(
            bench, "lightning-hang", "--val-every=30", drill=stopped, restart=restart, env=slow
        )
    )
    running.complete(undisturbed)
    assert running.rungs() == ["hang_restart"]
    (ended, _) = running.history.attempts
    assert ended.ended is not None
    assert ended.ended.fault is not None
    assert (ended.ended.fault.fault_class, ended.ended.fault.rank) == ("hang", 1)
    assert [line.split(":")[0] for line in running.worker_lines("validated ")] == ["validated 16"]


@pytest.mark.long
def test_a_rank_lost_before_a_validation_of_all_ranks_costs_a_restart_and_no_committed_step(
    bench, undisturbed
):
    # Its metric is reduced over all ranks, between two steps.
    lost = {"faults": [fault("kill", 1, 16, "voted")]}
    running = bench.start(lightning_job(bench, "lightning-validates", "--val-every=30", drill=lost))
    running.complete(undisturbed)
    assert running.rungs()[-1] == "in_place_restart"
    assert running.history.attempts[-1].from_step >= 10
    assert len(running.worker_lines("validated 16: ")) == 1


@pytest.mark.long
def test_lightning_that_is_asked_to_end_saves_and_goes_on_from_the_same_step(bench, undisturbed):
    running = bench.start(lightning_job(bench, "lightning-term", env={"PACE_S": "0.5"}))
    running.reach(11)
    (rank_1,) = running.local.rank(1)
    rank_1.send_signal(signal.SIGTERM)
    wait_for(lambda: len(running.history.attempts) == 2, timeout_s=120, what=running.out)
    running.complete(undisturbed)
    assert running.rungs() == ["in_place_restart"]
    saved = running.history.attempts[1].from_step
    assert saved >= 11
    assert saved % 10  # it was the request that had it saved


@pytest.mark.long
def test_lightning_is_restarted_in_the_middle_of_an_epoch_without_reading_it_again(
    bench, undisturbed
):
    killed = {"faults": [fault("kill", 0, 13), fault("kill", 1, 22)]}
    restart = {"process_replace": False, "end_of_life_checkpoint": False}
    shown = {"PACE_S": "0", "PRINT_READ": "1"}
    running = bench.start(
        lightning_job(bench, "lightning-place", drill=killed, restart=restart, env=shown)
    )
    running.complete(undisturbed)
    assert running.rungs() == ["in_place_restart", "in_place_restart"]
    assert [one.from_step for one in running.history.attempts] == [0, 10, 20]
    # Whole steps of two batches, and the last one of an epoch has one; four samples in each.
    steps = [*range(1, 14), *range(11, 23), *range(21, STEPS + 1)]
    batches = sum(1 if step % 8 == 0 else 2 for step in steps)
    assert len(running.worker_lines("read ")) == 4 * batches


@pytest.mark.long
def test_a_wrong_argument_of_a_lightning_script_is_named_and_stops_the_run(bench):
    running = bench.start(lightning_job(bench, "lightning-wrong", "--learning-rte=1e-3"))
    assert running.finish() == 1
    assert running.rungs() == ["stop"]
    (attempt,) = running.history.attempts
    assert "--learning-rte=1e-3" in attempt.ended.fault.evidence
    assert "--learning-rte=1e-3" in running.out
    running.leave_nothing()


@pytest.mark.long
def test_two_targets_of_lightning_that_differ_are_named_and_stop_the_run(bench):
    running = bench.start(lightning_job(bench, "lightning-target", "--max-steps=30"))
    assert running.finish() == 1
    assert running.rungs() == ["stop"]
    assert "steps: 24 in the job, but the Trainer has max_steps=30: leave that out" in running.out


@pytest.mark.long
def test_lightning_pauses_at_a_step_and_goes_on(bench, undisturbed):
    running = bench.start(lightning_job(bench, "lightning-pause", env={"PACE_S": "0.5"}))
    running.reach(5)
    bench.perdure("pause", running.job.run_id)
    wait_for(lambda: running.status()["pause"] is not None, timeout_s=60, what=running.out)
    paused_at = running.status()["pause"]["step"]
    assert running.step() == paused_at
    bench.perdure("resume", running.job.run_id)
    running.complete(undisturbed)
