"""The Trainer of transformers under Perdure: real ranks that are killed, stopped, ended, misled.

Every run's curve, all digits, is that of an undisturbed run of the same program.
"""

from __future__ import annotations

import time

import pytest

from tests.process.framework_runs import STEPS, FrameworkRuns, fault, whole_curve

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

# Eight steps of two micro-batches are an epoch, and the last of them has one.
ARGUMENTS = ("--num_samples=120", "--gradient_accumulation_steps=2", "--logging_steps=1")


@pytest.fixture(scope="module")
def trainer(bench) -> FrameworkRuns:
    return FrameworkRuns(bench, "trainer", ("trainer_paced.py", *ARGUMENTS))


@pytest.fixture(scope="module")
def undisturbed(trainer) -> dict[int, float]:
    """Loss of every step of a run without a fault."""
    return whole_curve(trainer.start("undisturbed"))


def test_a_killed_rank_of_a_trainer_is_replaced_and_no_step_is_done_again(trainer, undisturbed):
    trainer.loses_ranks_and_no_step(undisturbed, first_rank_at=14)


@pytest.mark.long
def test_a_trainer_outlives_the_loss_of_a_node(trainer, undisturbed):
    trainer.outlives_the_loss_of_a_node(undisturbed)


@pytest.mark.long
def test_a_trainer_that_hangs_is_noticed_by_its_step_and_restarted(trainer, undisturbed):
    # Each of these evaluations is longer than a step may be.
    evaluations = ("--eval_strategy=steps", "--eval_steps=8")
    running = trainer.is_restarted_when_it_hangs(undisturbed, *evaluations, evaluate_s=1.6)
    shown = running.worker_lines("evaluated ")
    assert [line.split(":")[0] for line in shown] == [
        f"evaluated {step}" for step in (8, 16, 24, 24)
    ]


@pytest.mark.long
def test_a_trainer_that_is_asked_to_end_saves_and_goes_on_from_the_same_step(trainer, undisturbed):
    trainer.saves_and_goes_on_when_it_is_asked_to_end(undisturbed)


@pytest.mark.long
def test_a_trainer_is_restarted_in_the_middle_of_an_epoch_without_reading_it_again(
    trainer, undisturbed
):
    trainer.is_restarted_in_the_middle_of_an_epoch(undisturbed)


@pytest.mark.long
def test_a_wrong_argument_of_a_script_is_named_and_stops_the_run(trainer):
    trainer.stops_at_a_wrong_argument("--learning_rte=1e-3")


@pytest.mark.long
def test_a_rank_that_dies_in_an_evaluation_costs_a_restart_and_no_committed_step(
    trainer, undisturbed
):
    slow = {"PACE_S": "0", "EVALUATE_S": "0.5"}
    running = trainer.start("evaluates", "--eval_strategy=steps", "--eval_steps=12", env=slow)
    running.reach(12)  # the save of step 10 is behind it, its evaluation takes seconds
    time.sleep(1)
    assert running.local.kill_rank(1)
    running.complete(undisturbed)
    assert running.rungs()[-1] == "in_place_restart"
    assert running.history.attempts[-1].from_step >= 10


@pytest.mark.long
def test_a_script_without_the_callback_is_told_what_it_lacks(trainer, tmp_path):
    (tmp_path / "plain.py").write_text("print('trained somehow')\n")
    script = {"script": ["plain.py"], "cwd": str(tmp_path)}
    running = trainer.stops("plain", worker=script)
    assert "plain.py returned at step 0 of 24: a callback of perdure.integrations" in running.out


@pytest.mark.long
def test_two_targets_that_differ_are_named_and_stop_the_run(trainer):
    running = trainer.stops("target", "--max_steps=30")
    assert "steps: 24 in the job, but the Trainer has max_steps=30: leave that out" in running.out


@pytest.mark.long
def test_a_trainer_that_ends_before_the_target_has_its_last_step_saved(trainer):
    trainer.has_its_last_step_saved_when_it_ends_early()


@pytest.mark.long
def test_a_trainer_pauses_at_a_step_and_goes_on(trainer, undisturbed):
    trainer.pauses_and_goes_on(undisturbed)


@pytest.mark.long
def test_a_trainer_goes_on_with_another_number_of_ranks(trainer, undisturbed):
    trainer.goes_on_with_other_ranks(1)


@pytest.mark.long
def test_a_trainer_begins_with_the_weights_of_another_run(trainer, undisturbed):
    trainer.begins_with_the_weights_of_another(undisturbed)


@pytest.mark.long
def test_a_trainer_goes_one_step_back_when_a_loss_is_not_a_number(trainer, undisturbed):
    trainer.goes_one_step_back_when_a_loss_is_not_a_number(undisturbed)


@pytest.mark.long
def test_a_trainer_reads_an_iterable_dataset_up_to_its_place(trainer):
    trainer.reads_a_stream_up_to_its_place('--accelerator_config={"dispatch_batches": false}')


@pytest.mark.long
def test_the_best_model_of_a_trainer_is_loaded_behind_the_last_save(trainer, undisturbed, tmp_path):
    saved = [f"--{one}_strategy=steps" for one in ("eval", "save")]
    every = [f"--{one}_steps=8" for one in ("eval", "save")]
    # A loss that grows is the better one here, so that the first evaluation is the best.
    best = ["--load_best_model_at_end", "--greater_is_better=true", f"--output_dir={tmp_path}"]
    killed = {"faults": [fault("kill", 1, 18)]}
    running = trainer.start("best", *saved, *every, *best, drill=killed)
    running.complete(undisturbed)
    assert running.rungs() == ["process_replace"]
    shown = [line.split(": ") for line in running.worker_lines("evaluated ")]
    assert [step for step, _ in shown] == [f"evaluated {step}" for step in (8, 16, 24, 24)]
    losses = [float(loss) for _, loss in shown]
    assert losses[0] == losses[3] > losses[2]


FSDP2 = {"kind": "fsdp2"}


@pytest.fixture(scope="module")
def shards(bench) -> FrameworkRuns:
    """The same with a model that FSDP2 shards."""
    sharded = ("--fsdp=full_shard", '--fsdp_config={"version": 2}')
    return FrameworkRuns(bench, "trainer-shards", ("trainer_paced.py", *ARGUMENTS, *sharded))


@pytest.fixture(scope="module")
def undisturbed_shards(shards) -> dict[int, float]:
    """Loss of every step of a sharded run without a fault."""
    running = shards.start("undisturbed", parallelism=FSDP2)
    curve = whole_curve(running)
    assert len(running.worker_lines("trains a FSDPLlamaForCausalLM")) == 2
    return curve


@pytest.mark.long
def test_a_sharded_trainer_goes_on_from_its_last_checkpoint_when_a_rank_is_killed(
    shards, undisturbed_shards
):
    killed = {"faults": [fault("kill", 1, 13)]}
    running = shards.start("killed", drill=killed, parallelism=FSDP2)
    running.complete(undisturbed_shards)
    assert running.rungs() == ["in_place_restart"]  # no other rank has its shard
    assert [one.from_step for one in running.history.attempts] == [0, 10]
    assert running.status()["checkpoints"]["store"] == {"newest": STEPS, "count": 3}


@pytest.mark.long
@pytest.mark.parametrize("point", ["start", "backward", "prepared", "voted"])
def test_a_sharded_trainer_does_one_step_again_when_connections_break(
    point, shards, undisturbed_shards
):
    broken = {"faults": [fault("link", 1, 12, point)]}
    running = shards.start(point, drill=broken, parallelism=FSDP2)
    running.complete(undisturbed_shards)
    assert running.rungs() == ["step_retry"]
    (attempt,) = running.history.attempts
    assert [one.ended.steps_lost for one in attempt.recoveries] == [0]


@pytest.mark.long
def test_a_sharded_trainer_outlives_a_node_by_the_copies_of_its_partner(shards, undisturbed_shards):
    lost = {"faults": [fault("kill_node", 1, 13)]}
    saves = {"every_steps": 5, "partner_copies": 1}
    running = shards.start_apart("node", drill=lost, checkpoint=saves, parallelism=FSDP2)
    running.complete(undisturbed_shards)
    assert running.rungs() == ["pod_reschedule"]
    assert running.history.attempts[-1].from_step == 10


@pytest.mark.long
def test_a_sharded_trainer_goes_on_with_another_number_of_ranks(shards, undisturbed_shards):
    shards.goes_on_with_other_ranks(4, parallelism=FSDP2)
