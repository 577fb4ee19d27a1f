"""A loop of its own over accelerate: real ranks that are killed, stopped, ended, misled.

Every run's curve, all digits, is that of an undisturbed run of the same program.
"""

from __future__ import annotations

import re
import signal
from typing import Any

import pytest

from storage.address import open_store
from tests.process.harness import RECIPES, Workbench
from tests.process.program_jobs import by_hand, printed
from tests.waiting import wait_for
from training.journal.steps import kept_steps
from training.runtime.step_loop.skipping import skipped_prefix

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

STEPS = 24
# Eight steps of two batches are an epoch, and the last of them has one.
SAMPLES = "--num_samples=120"
LOSSES = re.compile(r"step (\d+): losses of the first rank (\[.*\])")


def accelerate_job(bench: Workbench, run_id: str, *further: str, **changes: Any) -> dict[str, Any]:
    """Two ranks on one node that run tests/recipes/accelerate_paced.py."""
    sections = {
        "data": None,
        "steps": STEPS,
        "worker": {"script": ["accelerate_paced.py", SAMPLES, *further], "cwd": str(RECIPES)},
        "env": {"PACE_S": "0"},
    }
    return bench.pair(run_id, **{**sections, **changes})


@pytest.fixture(scope="module")
def undisturbed(bench) -> dict[int, float]:
    """Loss of every step of a run without a fault."""
    running = bench.start(accelerate_job(bench, "accelerate-undisturbed"))
    running.complete()
    assert len(running.worker_lines("trains a DistributedDataParallel")) == 2
    curve = running.curve()
    assert list(curve) == list(range(1, STEPS + 1))
    assert curve[STEPS] < curve[1]
    return curve


def fault(kind: str, rank: int, step: int, point: str = "backward") -> dict[str, Any]:
    return {"kind": kind, "rank": rank, "step": step, "point": point}


def test_a_killed_rank_of_a_loop_over_accelerate_is_replaced_and_no_step_is_lost(
    bench, undisturbed
):
    # 16 is the last step of an epoch.
    faults = [fault("kill", 1, 9), fault("kill", 0, 16, "voted"), fault("link", 1, 20)]
    running = bench.start(accelerate_job(bench, "accelerate-killed", drill={"faults": faults}))
    running.complete(undisturbed)
    assert running.rungs() == ["process_replace", "process_replace", "step_retry"]
    (attempt,) = running.history.attempts
    assert [one.ended.steps_lost for one in attempt.recoveries] == [0, 0, 0]

    status = running.status()
    assert (status["step"], status["loss"]) == (STEPS, undisturbed[STEPS])
    assert status["tokens_per_s"] > 0
    assert status["checkpoints"]["store"] == {"newest": STEPS, "count": 3}
    assert running.worker_lines("behind the loop") == ["behind the loop: 2 ranks"]


@pytest.mark.long
def test_without_perdure_the_same_script_trains_the_same(bench, undisturbed):
    alone = printed(by_hand("accelerate_train.py", SAMPLES, f"--max_steps={STEPS}"), LOSSES)
    assert list(alone) == list(range(1, STEPS + 1))
    running = bench.look(accelerate_job(bench, "accelerate-undisturbed"))
    assert printed(running.worker_lines("losses"), LOSSES) == alone


@pytest.mark.long
def test_a_loop_over_accelerate_outlives_the_loss_of_a_node(bench, undisturbed):
    engine = {"nodes": 2, "slots_per_node": 1, "spares": 1, "grace_s": 10}
    lost = {"faults": [fault("kill_node", 1, 13)]}
    restart = {"pod_retries": 1, "node_replace": True}
    running = bench.start(
        accelerate_job(bench, "accelerate-node", drill=lost, restart=restart, engine=engine)
    )
    running.complete(undisturbed)
    assert running.rungs() == ["node_replace"]


@pytest.mark.long
def test_a_loop_over_accelerate_that_hangs_is_noticed_by_its_step_and_restarted(bench, undisturbed):
    stopped = {"faults": [fault("stop", 1, 15)]}
    # Evaluations have a limit of their own: each of these is longer than that of a step.
    env = {"PACE_S": "0", "EVALUATE_S": "6"}
    running = bench.start(
        accelerate_job(
            bench, "accelerate-hang", drill=stopped, restart={"hang_timeout_s": 3}, env=env
        )
    )
    running.complete(undisturbed)
    assert running.rungs() == ["hang_restart"]
    (ended, again) = running.history.attempts
    assert ended.ended is not None
    assert ended.ended.fault is not None
    assert (ended.ended.fault.fault_class, ended.ended.fault.rank) == ("hang", 1)
    assert again.from_step == 10


@pytest.mark.long
def test_a_loop_over_accelerate_that_is_asked_to_end_saves_and_goes_on_from_the_same_step(
    bench, undisturbed
):
    running = bench.start(accelerate_job(bench, "accelerate-term", env={"PACE_S": "1"}))
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
def test_a_loop_over_accelerate_is_restarted_in_the_middle_of_an_epoch(bench, undisturbed):
    killed = {"faults": [fault("kill", 0, 13), fault("kill", 1, 22)]}
    restart = {"process_replace": False, "end_of_life_checkpoint": False}
    running = bench.start(accelerate_job(bench, "accelerate-place", drill=killed, restart=restart))
    running.complete(undisturbed)
    assert running.rungs() == ["in_place_restart", "in_place_restart"]
    assert [one.from_step for one in running.history.attempts] == [0, 10, 20]


@pytest.mark.long
def test_a_loop_over_accelerate_goes_back_several_steps_within_its_processes(bench, undisturbed):
    spiked = {"faults": [fault("gradient", 1, 19)]}
    restart = {"numeric_retry": True, "snapshot_every_steps": 5, "abnormal_grad_norm": 1000.0}
    running = bench.start(accelerate_job(bench, "accelerate-spike", drill=spiked, restart=restart))
    running.complete(undisturbed)
    (attempt,) = running.history.attempts
    assert [one.ended.steps_lost for one in attempt.recoveries] == [3]


@pytest.mark.long
def test_a_loop_over_accelerate_passes_over_an_abnormal_batch(bench, undisturbed):
    faults = [fault("gradient", 1, 12), fault("kill", 0, 20)]
    restart = {"data_skipping": True, "abnormal_grad_norm": 1000.0}
    running = bench.start(
        accelerate_job(bench, "accelerate-skips", drill={"faults": faults}, restart=restart)
    )
    running.complete()
    assert running.rungs() == ["process_replace"]
    curve = running.curve()
    assert list(curve) == list(range(1, STEPS + 1))
    assert all(curve[step] == undisturbed[step] for step in range(1, 12))
    store = open_store(running.job.storage)
    assert len(list(store.list(skipped_prefix(running.job.run_id)))) == 1
    with_all = kept_steps(store, "accelerate-undisturbed")
    without = kept_steps(store, running.job.run_id)
    for step in range(1, STEPS):
        expected = with_all[step + 1 if step >= 12 else step].position
        assert without[step].position == expected


@pytest.mark.long
def test_a_loop_over_accelerate_pauses_at_a_step_and_goes_on(bench, undisturbed):
    running = bench.start(accelerate_job(bench, "accelerate-pause", env={"PACE_S": "1"}))
    running.reach(5)
    bench.perdure("pause", running.job.run_id)
    wait_for(lambda: running.status()["pause"] is not None, timeout_s=60, what=running.out)
    assert running.step() == running.status()["pause"]["step"]
    bench.perdure("resume", running.job.run_id)
    running.complete(undisturbed)


@pytest.mark.long
def test_a_wrong_argument_of_a_script_over_accelerate_is_named_and_stops_the_run(bench):
    running = bench.start(accelerate_job(bench, "accelerate-wrong", "--bath_size=8"))
    assert running.finish() == 1
    assert running.rungs() == ["stop"]
    (attempt,) = running.history.attempts
    assert "--bath_size=8" in attempt.ended.fault.evidence
    assert "--bath_size=8" in running.out
    running.leave_nothing()


@pytest.mark.long
def test_a_target_that_is_not_the_jobs_is_named_and_stops_the_run(bench):
    running = bench.start(accelerate_job(bench, "accelerate-target", "--max_steps=30"))
    assert running.finish() == 1
    assert running.rungs() == ["stop"]
    assert "steps: 24 in the job, but training_steps has until=30: leave that out" in running.out


@pytest.mark.long
def test_a_loop_over_accelerate_whose_model_is_sharded_recovers(bench):
    sharded = {"parallelism": {"kind": "fsdp2"}, "env": {"PACE_S": "0", "SHARDED": "1"}}
    plain = bench.start(accelerate_job(bench, "accelerate-shards", **sharded))
    plain.complete()
    assert len(plain.worker_lines("trains a FSDPBytes")) == 2
    broken = {"faults": [fault("link", 1, 12), fault("kill", 1, 17)]}
    running = bench.start(
        accelerate_job(bench, "accelerate-shards-broken", drill=broken, **sharded)
    )
    running.complete(plain.curve())
    assert running.rungs() == ["step_retry", "in_place_restart"]
    assert [one.from_step for one in running.history.attempts] == [0, 10]
