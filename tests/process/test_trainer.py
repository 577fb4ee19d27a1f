"""The Trainer of transformers under Perdure: real ranks that are killed, stopped, ended, misled.

Every run's curve, all digits, is that of an undisturbed run of the same program.
"""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from tests.process.harness import RECIPES, Workbench
from tests.waiting import wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

STEPS = 24
# Eight steps of two micro-batches are an epoch, and the last of them has one.
ARGUMENTS = ("--num_samples=120", "--gradient_accumulation_steps=2", "--logging_steps=1")


def trainer_job(bench: Workbench, run_id: str, *further: str, **changes: Any) -> dict[str, Any]:
    """Two ranks on one node that run tests/recipes/trainer_paced.py."""
    script = ["trainer_paced.py", *ARGUMENTS, *further]
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
    running = bench.start(trainer_job(bench, "trainer-undisturbed"))
    running.complete()
    curve = running.curve()
    assert list(curve) == list(range(1, STEPS + 1))
    assert curve[STEPS] < curve[1]
    return curve


def fault(kind: str, rank: int, step: int, point: str = "backward") -> dict[str, Any]:
    return {"kind": kind, "rank": rank, "step": step, "point": point}


def test_a_killed_rank_of_a_trainer_is_replaced_and_no_step_is_done_again(bench, undisturbed):
    faults = [fault("kill", 1, 9), fault("kill", 0, 14, "voted"), fault("link", 1, 20)]
    running = bench.start(trainer_job(bench, "trainer-killed", drill={"faults": faults}))
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
def test_a_trainer_outlives_the_loss_of_a_node(bench, undisturbed):
    engine = {"nodes": 2, "slots_per_node": 1, "spares": 1, "grace_s": 10}
    lost = {"faults": [fault("kill_node", 1, 13)]}
    restart = {"pod_retries": 1, "node_replace": True}
    running = bench.start(
        trainer_job(bench, "trainer-node", drill=lost, restart=restart, engine=engine)
    )
    running.complete(undisturbed)
    assert running.rungs() == ["node_replace"]


@pytest.mark.long
def test_a_trainer_that_hangs_is_noticed_by_its_step_and_restarted(bench, undisturbed):
    stopped = {"faults": [fault("stop", 1, 15)]}
    restart = {"hang_timeout_s": 3}
    # Evaluations have a limit of their own: each of these is longer than that of a step.
    slow = {"PACE_S": "0", "EVALUATE_S": "0.6"}
    running = bench.start(
        trainer_job(
            bench, "trainer-hang", "--eval_strategy=steps", "--eval_steps=8",
            drill=stopped, restart=restart, env=slow,
        )
    )  # fmt: skip
    running.complete(undisturbed)
    assert running.rungs() == ["hang_restart"]
    (ended, _) = running.history.attempts
    assert ended.ended is not None
    assert ended.ended.fault is not None
    assert (ended.ended.fault.fault_class, ended.ended.fault.rank) == ("hang", 1)
    shown = running.worker_lines("evaluated ")
    assert [line.split(":")[0] for line in shown] == [
        f"evaluated {step}" for step in (8, 16, 24, 24)
    ]


@pytest.mark.long
def test_a_trainer_that_is_asked_to_end_saves_and_goes_on_from_the_same_step(bench, undisturbed):
    running = bench.start(trainer_job(bench, "trainer-term", env={"PACE_S": "1"}))
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
def test_a_trainer_is_restarted_in_the_middle_of_an_epoch_without_reading_it_again(
    bench, undisturbed
):
    killed = {"faults": [fault("kill", 0, 13), fault("kill", 1, 22)]}
    restart = {"process_replace": False, "end_of_life_checkpoint": False}
    running = bench.start(trainer_job(bench, "trainer-place", drill=killed, restart=restart))
    running.complete(undisturbed)
    assert running.rungs() == ["in_place_restart", "in_place_restart"]
    assert [one.from_step for one in running.history.attempts] == [0, 10, 20]


@pytest.mark.long
def test_a_wrong_argument_of_a_script_is_named_and_stops_the_run(bench):
    running = bench.start(trainer_job(bench, "trainer-wrong", "--learning_rte=1e-3"))
    assert running.finish() == 1
    assert running.rungs() == ["stop"]
    (attempt,) = running.history.attempts
    assert "--learning_rte=1e-3" in attempt.ended.fault.evidence
    assert "--learning_rte=1e-3" in running.out
    running.leave_nothing()


@pytest.mark.long
def test_a_rank_that_dies_in_an_evaluation_costs_a_restart_and_no_committed_step(
    bench, undisturbed
):
    slow = {"PACE_S": "0", "EVALUATE_S": "0.5"}
    running = bench.start(
        trainer_job(
            bench, "trainer-evaluates", "--eval_strategy=steps", "--eval_steps=12", env=slow
        )
    )
    running.reach(12)  # the save of step 10 is behind it, its evaluation takes seconds
    time.sleep(1)
    assert running.local.kill_rank(1)
    running.complete(undisturbed)
    assert running.rungs()[-1] == "in_place_restart"
    assert running.history.attempts[-1].from_step >= 10


@pytest.mark.long
def test_a_script_without_the_callback_is_told_what_it_lacks(bench, tmp_path):
    (tmp_path / "plain.py").write_text("print('trained somehow')\n")
    script = {"script": ["plain.py"], "cwd": str(tmp_path)}
    running = bench.start(trainer_job(bench, "trainer-plain", worker=script))
    assert running.finish() == 1
    assert running.rungs() == ["stop"]
    assert "plain.py returned at step 0 of 24: a callback of perdure.integrations" in running.out


@pytest.mark.long
def test_two_targets_that_differ_are_named_and_stop_the_run(bench):
    running = bench.start(trainer_job(bench, "trainer-target", "--max_steps=30"))
    assert running.finish() == 1
    assert running.rungs() == ["stop"]
    assert "steps: 24 in the job, but the Trainer has max_steps=30: leave that out" in running.out


@pytest.mark.long
def test_a_trainer_pauses_at_a_step_and_goes_on(bench, undisturbed):
    running = bench.start(trainer_job(bench, "trainer-pause", env={"PACE_S": "1"}))
    running.reach(5)
    bench.perdure("pause", running.job.run_id)
    wait_for(lambda: running.status()["pause"] is not None, timeout_s=60, what=running.out)
    paused_at = running.status()["pause"]["step"]
    assert running.step() == paused_at
    bench.perdure("resume", running.job.run_id)
    running.complete(undisturbed)


SHARDED = ("--fsdp=full_shard", '--fsdp_config={"version": 2}')


def sharded_job(bench: Workbench, run_id: str, **changes: Any) -> dict[str, Any]:
    """The same with a model that FSDP2 shards."""
    return trainer_job(bench, run_id, *SHARDED, parallelism={"kind": "fsdp2"}, **changes)


@pytest.fixture(scope="module")
def undisturbed_shards(bench) -> dict[int, float]:
    """Loss of every step of a sharded run without a fault."""
    running = bench.start(sharded_job(bench, "trainer-shards"))
    running.complete()
    assert len(running.worker_lines("trains a FSDPLlamaForCausalLM")) == 2
    curve = running.curve()
    assert list(curve) == list(range(1, STEPS + 1))
    assert curve[STEPS] < curve[1]
    return curve


@pytest.mark.long
def test_a_sharded_trainer_goes_on_from_its_last_checkpoint_when_a_rank_is_killed(
    bench, undisturbed_shards
):
    killed = {"faults": [fault("kill", 1, 13)]}
    running = bench.start(sharded_job(bench, "trainer-shards-killed", drill=killed))
    running.complete(undisturbed_shards)
    assert running.rungs() == ["in_place_restart"]  # no other rank has its shard
    assert [one.from_step for one in running.history.attempts] == [0, 10]
    assert running.status()["checkpoints"]["store"] == {"newest": STEPS, "count": 3}


@pytest.mark.long
@pytest.mark.parametrize("point", ["start", "backward", "prepared", "voted"])
def test_a_sharded_trainer_does_one_step_again_when_connections_break(
    point, bench, undisturbed_shards
):
    broken = {"faults": [fault("link", 1, 12, point)]}
    running = bench.start(sharded_job(bench, f"trainer-shards-{point}", drill=broken))
    running.complete(undisturbed_shards)
    assert running.rungs() == ["step_retry"]
    (attempt,) = running.history.attempts
    assert [one.ended.steps_lost for one in attempt.recoveries] == [0]


@pytest.mark.long
def test_a_sharded_trainer_outlives_a_node_by_the_copies_of_its_partner(bench, undisturbed_shards):
    engine = {"nodes": 2, "slots_per_node": 1, "spares": 1, "grace_s": 10}
    lost = {"faults": [fault("kill_node", 1, 13)]}
    saves = {"every_steps": 5, "partner_copies": 1}
    running = bench.start(
        sharded_job(bench, "trainer-shards-node", drill=lost, checkpoint=saves, engine=engine)
    )
    running.complete(undisturbed_shards)
    assert running.rungs() == ["pod_reschedule"]
    assert running.history.attempts[-1].from_step == 10
