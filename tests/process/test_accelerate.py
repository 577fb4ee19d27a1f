"""A loop of its own over accelerate: real ranks that are killed, stopped, ended, misled.

Every run's curve, all digits, is that of an undisturbed run of the same program.
"""

from __future__ import annotations

import re

import pytest

from perdure.storage.address import open_store
from perdure.training.journal.steps import read_kept_steps
from perdure.training.runtime.step_loop.skipping import skipped_prefix
from tests.process.framework_runs import STEPS, FrameworkRuns, fault, whole_curve
from tests.process.program_jobs import by_hand, printed

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

# Eight steps of two batches are an epoch, and the last of them has one.
SAMPLES = "--num_samples=120"
LOSSES = re.compile(r"step (\d+): losses of the first rank (\[.*\])")


@pytest.fixture(scope="module")
def loop(bench) -> FrameworkRuns:
    return FrameworkRuns(bench, "accelerate", ("accelerate_paced.py", SAMPLES))


@pytest.fixture(scope="module")
def undisturbed(loop) -> dict[int, float]:
    """Loss of every step of a run without a fault."""
    running = loop.start("undisturbed")
    curve = whole_curve(running)
    assert len(running.worker_lines("trains a DistributedDataParallel")) == 2
    return curve


@pytest.mark.long
def test_a_killed_rank_of_a_loop_over_accelerate_is_replaced_and_no_step_is_lost(loop, undisturbed):
    # 16 is the last step of an epoch.
    running = loop.loses_ranks_and_no_step(undisturbed, first_rank_at=16)
    assert running.worker_lines("behind the loop") == ["behind the loop: 2 ranks"]


@pytest.mark.long
def test_without_perdure_the_same_script_trains_the_same(bench, loop, undisturbed):
    alone = printed(by_hand("accelerate_train.py", SAMPLES, f"--max_steps={STEPS}"), LOSSES)
    assert list(alone) == list(range(1, STEPS + 1))
    running = bench.look(loop.job("undisturbed"))
    assert printed(running.worker_lines("losses"), LOSSES) == alone


@pytest.mark.long
def test_a_loop_over_accelerate_outlives_the_loss_of_a_node(loop, undisturbed):
    loop.outlives_the_loss_of_a_node(undisturbed)


@pytest.mark.long
def test_a_loop_over_accelerate_that_hangs_is_noticed_by_its_step_and_restarted(loop, undisturbed):
    # Each of its evaluations is longer than a step may be.
    running = loop.is_restarted_when_it_hangs(undisturbed, evaluate_s=16)
    assert running.history.attempts[1].from_step == 10


@pytest.mark.long
def test_a_loop_over_accelerate_that_is_asked_to_end_saves_and_goes_on_from_the_same_step(
    loop, undisturbed
):
    loop.saves_and_goes_on_when_it_is_asked_to_end(undisturbed)


@pytest.mark.long
def test_a_loop_over_accelerate_is_restarted_in_the_middle_of_an_epoch(loop, undisturbed):
    loop.is_restarted_in_the_middle_of_an_epoch(undisturbed)


@pytest.mark.long
def test_a_loop_over_accelerate_goes_back_several_steps_within_its_processes(loop, undisturbed):
    spiked = {"faults": [fault("gradient", 1, 19)]}
    restart = {"numeric_retry": True, "snapshot_every_steps": 5, "abnormal_grad_norm": 1000.0}
    running = loop.start("spike", drill=spiked, restart=restart)
    running.complete(undisturbed)
    (attempt,) = running.history.attempts
    assert [one.ended.steps_lost for one in attempt.recoveries] == [3]


@pytest.mark.long
def test_a_loop_over_accelerate_passes_over_an_abnormal_batch(loop, undisturbed):
    faults = [fault("gradient", 1, 12), fault("kill", 0, 20)]
    restart = {"data_skipping": True, "abnormal_grad_norm": 1000.0}
    running = loop.start("skips", drill={"faults": faults}, restart=restart)
    running.complete()
    assert running.rungs() == ["process_replace"]
    curve = running.curve()
    assert list(curve) == list(range(1, STEPS + 1))
    assert all(curve[step] == undisturbed[step] for step in range(1, 12))
    store = open_store(running.job.storage)
    assert len(list(store.list(skipped_prefix(running.job.run_id)))) == 1
    with_all = read_kept_steps(store, "accelerate-undisturbed")
    without = read_kept_steps(store, running.job.run_id)
    for step in range(1, STEPS):
        expected = with_all[step + 1 if step >= 12 else step].position
        assert without[step].position == expected


@pytest.mark.long
def test_a_loop_over_accelerate_pauses_at_a_step_and_goes_on(loop, undisturbed):
    loop.pauses_and_goes_on(undisturbed)


@pytest.mark.long
def test_a_loop_over_accelerate_goes_on_with_another_number_of_ranks(loop, undisturbed):
    loop.goes_on_with_other_ranks(1)


@pytest.mark.long
def test_a_wrong_argument_of_a_script_over_accelerate_is_named_and_stops_the_run(loop):
    loop.stops_at_a_wrong_argument("--bath_size=8")


@pytest.mark.long
def test_a_target_that_is_not_the_jobs_is_named_and_stops_the_run(loop):
    running = loop.stops("target", "--max_steps=30")
    assert "steps: 24 in the job, but training_steps has until=30: leave that out" in running.out


@pytest.mark.long
def test_a_loop_over_accelerate_whose_model_is_sharded_recovers(loop):
    sharded = {"parallelism": {"kind": "fsdp2"}, "env": {"PACE_S": "0", "SHARDED": "1"}}
    plain = loop.start("shards", **sharded)
    plain.complete()
    assert len(plain.worker_lines("trains a FSDPBytes")) == 2
    broken = {"faults": [fault("link", 1, 12), fault("kill", 1, 17)]}
    running = loop.start("shards-broken", drill=broken, **sharded)
    running.complete(plain.curve())
    assert running.rungs() == ["step_retry", "in_place_restart"]
    assert [one.from_step for one in running.history.attempts] == [0, 10]
