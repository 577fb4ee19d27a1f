"""The Trainer of Lightning under Perdure: real ranks that are killed, stopped, ended, misled.

Every run's curve, all digits, is that of an undisturbed run of the same program.
"""

from __future__ import annotations

import pytest

from tests.process.framework_runs import STEPS, FrameworkRuns, fault, whole_curve

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

# Eight steps of two micro-batches are an epoch, and the last of them has one.
ARGUMENTS = ("--num-samples=120", "--accumulate=2")


@pytest.fixture(scope="module")
def trainer(bench) -> FrameworkRuns:
    return FrameworkRuns(bench, "lightning", ("lightning_paced.py", *ARGUMENTS))


@pytest.fixture(scope="module")
def undisturbed(trainer) -> dict[int, float]:
    """Loss of every step of a run without a fault."""
    return whole_curve(trainer.start("undisturbed"))


@pytest.mark.long
def test_a_killed_rank_of_lightning_is_replaced_and_no_step_is_done_again(trainer, undisturbed):
    trainer.loses_ranks_and_no_step(undisturbed, first_rank_at=14)


@pytest.mark.long
def test_lightning_outlives_the_loss_of_a_node(trainer, undisturbed):
    trainer.outlives_the_loss_of_a_node(undisturbed)


@pytest.mark.long
def test_a_hang_of_lightning_is_noticed_by_its_step_and_restarted(trainer, undisturbed):
    # Each of these validations is longer than a step may be.
    running = trainer.is_restarted_when_it_hangs(undisturbed, "--val-every=30", evaluate_s=4)
    assert [line.split(":")[0] for line in running.worker_lines("validated ")] == ["validated 16"]


@pytest.mark.long
def test_a_rank_lost_before_a_validation_of_all_ranks_costs_a_restart_and_no_committed_step(
    trainer, undisturbed
):
    # Its metric is reduced over all ranks, between two steps.
    lost = {"faults": [fault("kill", 1, 16, "voted")]}
    running = trainer.start("validates", "--val-every=30", drill=lost)
    running.complete(undisturbed)
    assert running.rungs()[-1] == "in_place_restart"
    assert running.history.attempts[-1].from_step >= 10
    assert len(running.worker_lines("validated 16: ")) == 1


@pytest.mark.long
def test_lightning_that_is_asked_to_end_saves_and_goes_on_from_the_same_step(trainer, undisturbed):
    trainer.saves_and_goes_on_when_it_is_asked_to_end(undisturbed)


@pytest.mark.long
def test_lightning_is_restarted_in_the_middle_of_an_epoch_without_reading_it_again(
    trainer, undisturbed
):
    shown = {"PACE_S": "0", "PRINT_READ": "1"}
    running = trainer.is_restarted_in_the_middle_of_an_epoch(undisturbed, env=shown)
    # Whole steps of two batches, and the last one of an epoch has one; four samples in each. The
    # first attempt has validated two batches before all.
    steps = [*range(1, 14), *range(11, 23), *range(21, STEPS + 1)]
    batches = sum(1 if step % 8 == 0 else 2 for step in steps)
    assert len(running.worker_lines("read ")) == 4 * (batches + 2)


@pytest.mark.long
def test_a_wrong_argument_of_a_lightning_script_is_named_and_stops_the_run(trainer):
    trainer.stops_at_a_wrong_argument("--learning-rte=1e-3")


@pytest.mark.long
def test_two_targets_of_lightning_that_differ_are_named_and_stop_the_run(trainer):
    running = trainer.stops("target", "--max-steps=30")
    assert "steps: 24 in the job, but the Trainer has max_steps=30: leave that out" in running.out


@pytest.mark.long
def test_lightning_pauses_at_a_step_and_goes_on(trainer, undisturbed):
    trainer.pauses_and_goes_on(undisturbed)


@pytest.mark.long
def test_lightning_goes_on_with_another_number_of_ranks(trainer, undisturbed):
    trainer.goes_on_with_other_ranks(1)


@pytest.mark.long
def test_lightning_begins_with_the_weights_of_another_run(trainer, undisturbed):
    trainer.begins_with_the_weights_of_another(undisturbed)


@pytest.mark.long
def test_lightning_goes_one_step_back_when_a_loss_is_not_a_number(trainer, undisturbed):
    trainer.goes_one_step_back_when_a_loss_is_not_a_number(undisturbed)


@pytest.mark.long
def test_lightning_reads_a_stream_up_to_its_place_in_the_order_that_it_had(trainer):
    trainer.reads_a_stream_up_to_its_place()


@pytest.mark.long
def test_a_fit_that_ends_within_a_step_has_the_one_before_saved(trainer):
    trainer.has_its_last_step_saved_when_it_ends_early()
