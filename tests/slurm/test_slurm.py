"""A run in Slurm's allocations survives all that nodes, people and Slurm itself do to it."""

from __future__ import annotations

import time

import pytest

from perdure.training.recovery.rungs import Rung
from tests.process.test_warm_spares import is_warm
from tests.slurm.runs import SlurmRun
from tests.waiting import wait_for

pytestmark = [pytest.mark.process, pytest.mark.prefect, pytest.mark.timeout(900)]

DOWN_S = 60.0


def await_warm_spare(run: SlurmRun) -> None:
    wait_for(
        lambda: any(is_warm(run.running, node) for node in {"n3", "n4"} - set(run.members())),
        what="the spare's imports",
    )


def test_a_killed_rank_costs_a_step(submit, undisturbed, api):
    run = submit("killed")
    run.reach(3)
    run.rank(1).kill()
    run.await_answer()
    run.complete(undisturbed)
    assert run.answers() == [Rung.PROCESS_REPLACE]
    assert run.running.history.isolated == ()
    api.wait_for("killed", "Completed")


def test_a_node_without_power_is_replaced_by_a_spare_while_slurm_takes_it_out(
    lab, submit, undisturbed
):
    run = submit("powered-off")
    run.reach(3)
    await_warm_spare(run)
    assert run.members() == ["n1", "n2"], "n1 has the batch script"
    lab.power_off("n2")
    run.await_answer()
    wait_for(lambda: lab.states()["n2"].startswith("down"), what="Slurm has noticed")
    run.complete(undisturbed)
    assert run.answers() == [Rung.NODE_REPLACE]
    assert run.running.history.isolated == ("n2",)
    assert run.slurm("Restarts") == "0"


def test_a_run_that_a_person_cancels_in_slurm_is_cancelled(lab, submit, api):
    run = submit("cancelled")
    run.reach(3)
    lab.slurm("scancel", run.job_id)
    run.await_end("CANCELLED")
    history = run.running.history
    assert history.ended is not None, run.out
    assert history.ended.outcome == "cancelled"
    assert history.committed_step >= 3
    assert history.isolated == ()
    run.leave_nothing()
    api.wait_for("cancelled", "Cancelled")


@pytest.mark.long
def test_the_loss_of_the_supervisors_node_costs_no_step(lab, submit, undisturbed):
    run = submit("supervisor")
    run.reach(3)
    lost = run.supervisor()
    assert lost not in run.members()
    lab.power_off(lost)
    wait_for(lambda: run.supervisor() != lost, what="another supervisor")
    run.rank(0).kill()
    run.await_answer()
    run.complete(undisturbed)
    assert run.answers() == [Rung.PROCESS_REPLACE]
    assert run.running.history.isolated == ()


@pytest.mark.long
def test_a_stopped_rank_is_a_hang_of_its_process(submit, undisturbed):
    policy = {"pod_retries": 1, "node_replace": True, "hang_timeout_s": 12}
    run = submit("stopped", restart=policy)
    run.reach(3)
    run.rank(1).suspend()
    run.await_answer()
    run.complete(undisturbed)
    assert run.answers() == [Rung.PROCESS_REPLACE]
    assert run.running.history.isolated == ()


@pytest.mark.long
def test_a_drained_node_trains_to_the_end_of_the_job(lab, submit, undisturbed):
    run = submit("drained")
    run.reach(3)
    lab.slurm("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=maintenance")
    wait_for(lambda: lab.states()["n2"].startswith("drain"), what="n2 is drained")
    run.reach(run.running.step() + 5)
    run.complete(undisturbed)
    assert run.answers() == []
    assert run.running.history.isolated == ()


@pytest.mark.long
def test_three_allocations_that_reach_their_time_limit_train_as_one(submit, undisturbed):
    run = submit("limited", "--time=3")
    run.reach(3)
    run.running.pace(2.0)
    run.await_restarts(2)
    run.complete(undisturbed)
    history = run.running.history
    assert run.running.rungs() == []
    assert len(history.attempts) >= 3
    assert all(view.fault is None for view in history.attempts)
    assert history.isolated == ()


@pytest.mark.long
def test_nobody_misses_a_slurmctld_that_is_down(lab, submit, undisturbed):
    run = submit("without-controller")
    run.reach(3)
    lab.controller_down()
    time.sleep(DOWN_S / 2)
    run.rank(1).kill()
    time.sleep(DOWN_S / 2)
    lab.controller_up()
    run.await_answer()
    run.complete(undisturbed)
    assert run.answers() == [Rung.PROCESS_REPLACE]
    assert run.slurm("Restarts") == "0"
    assert run.running.history.isolated == ()


@pytest.mark.long
def test_a_run_that_is_requeued_goes_on(lab, submit, undisturbed):
    run = submit("requeued")
    run.reach(3)
    lab.slurm("scontrol", "requeue", run.job_id)
    run.await_restarts(1)
    wait_for(lambda: len(run.running.history.attempts) == 2, what=run)
    run.complete(undisturbed)
    history = run.running.history
    assert run.running.rungs() == []
    assert history.attempts[-1].from_step >= 3, "saved at the end of the allocation"
    assert history.isolated == ()


@pytest.mark.long
def test_slurm_starts_a_run_again_that_has_lost_the_node_of_its_batch_script(
    lab, submit, undisturbed
):
    run = submit("batch-node")
    run.reach(3)
    await_warm_spare(run)
    lab.power_off("n1")
    run.await_restarts(1)
    run.complete(undisturbed)
    assert "n1" not in run.members()
    assert set(run.running.history.isolated) <= {"n1"}
