"""The supervisor is not the owner: its death stops nothing, and it comes back to the same run."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import psutil
import pytest

from perdure.training.journal.time_account import account_time
from perdure.training.wire.version import PERDURE_VERSION
from tests.process.harness import Running, Workbench
from tests.values import not_none
from tests.waiting import wait_for

pytestmark = pytest.mark.process


def test_a_second_start_adopts_the_living_attempt_and_training_never_stopped(
    bench, undisturbed_pair
):
    store = {"address": f"file://{bench.home}/store-adopted"}  # with no corpus prepared yet
    job = bench.pair("adopted", storage=store)
    first = bench.start(job)
    first.reach(5)
    workers = {p.pid for rank in (0, 1) for p in first.local.rank(rank)}
    first.kill_supervisor()
    at_death = first.step()
    wait_for(lambda: first.step() > at_death + 3, what="steps without a supervisor")

    first.pace(6.0)  # or a busy machine would start the third when all is over
    second = bench.start(job)
    adopted = "watching an adopted attempt"  # the run's name alone is in what both print at once
    wait_for(lambda: adopted in second.out, what="adoption")
    assert {p.pid for rank in (0, 1) for p in second.local.rank(rank)} == workers

    third = bench.start(job)
    assert third.finish(hurry=False) == 1
    assert "AlreadySupervised: run adopted is still training" in third.out
    assert "'perdure status adopted' shows it" in third.out
    assert "ETTR" not in third.out, "the account is that of the one that supervises"
    assert "Traceback" not in third.out

    second.complete(undisturbed_pair)
    assert len(second.history.attempts) == 1
    assert second.history.epoch == 2
    assert [data.skipped for data in second.history.data] == [False, True]


@pytest.mark.long
def test_a_supervisor_of_another_release_ends_nothing_and_the_next_of_the_same_one_goes_on(
    bench, undisturbed_pair, tmp_path
):
    job = bench.pair("upgraded")
    first = bench.start(job)
    first.reach(5)
    workers = {p.pid for rank in (0, 1) for p in first.local.rank(rank)}
    first.kill_supervisor()
    info = tmp_path / "perdure-9.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: perdure\nVersion: 9.0.0\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    upgraded = replace(bench, env={**bench.env, "PYTHONPATH": path}).start(job)
    assert upgraded.finish(hurry=False) == 1
    refusal = f"is {PERDURE_VERSION}, and this supervisor 9.0.0: supervise the run with the image"
    assert refusal in upgraded.out
    assert "Traceback" not in upgraded.out
    at_refusal = first.step()
    wait_for(lambda: first.step() > at_refusal + 3, what="steps after the refusal")
    assert {p.pid for rank in (0, 1) for p in first.local.rank(rank)} == workers
    second = bench.start(job)
    second.complete(undisturbed_pair)
    assert len(second.history.attempts) == 1


@pytest.mark.long
def test_of_two_starts_at_the_same_moment_one_trains_and_the_other_says_so(bench, undisturbed_pair):
    job = bench.pair("twice-at-once")
    begun = bench.look(job)
    begun.pace(2.0)
    one_trains(bench, job, epoch=1)
    begun.reach(3)
    begun.pace(6.0)  # or on a busy machine all would be over before the next two look
    supervisor = not_none(begun.history.supervisor)
    os.kill(supervisor.pid, signal.SIGKILL)
    wait_for(lambda: not psutil.pid_exists(supervisor.pid) or is_zombie(supervisor.pid))
    adopted = one_trains(bench, job, epoch=2)
    adopted.complete(undisturbed_pair)
    assert len(adopted.history.attempts) == 1


def one_trains(bench: Workbench, job: dict[str, Any], *, epoch: int) -> Running:
    """Start a job twice at the same moment; return the start that supervises it."""
    starts = [bench.start(job) for _ in range(2)]
    processes = [not_none(start.process) for start in starts]
    wait_for(lambda: any(process.poll() is not None for process in processes), what="one end")
    (ended, supervising) = sorted(starts, key=lambda start: not_none(start.process).poll() is None)
    assert not_none(ended.process).returncode == 1, ended.out
    assert "AlreadySupervised: " in ended.out
    assert "Traceback" not in ended.out
    assert not_none(supervising.process).poll() is None, supervising.out
    wait_for(lambda: supervising.history.open_attempt is not None, what="the attempt")
    supervisor = not_none(supervising.history.supervisor)
    assert (supervisor.epoch, supervisor.pid) == (epoch, not_none(supervising.process).pid)
    return supervising


def is_zombie(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.long
def test_the_time_of_a_command_that_ran_on_without_a_supervisor_is_the_commands(bench, tmp_path):
    script = f"touch {tmp_path}/began; until [ -e {tmp_path}/end ]; do sleep 0.1; done"
    job = {
        "run_id": "unattended-command",
        "storage": {"address": f"file://{bench.home}/store"},
        "worker": {"command": ["sh", "-c", script]},
        "engine": {"nodes": 1, "slots_per_node": 1, "spares": 0, "grace_s": 1},
        "preflight": {"nodes": False},
    }
    first = bench.start(job)
    wait_for((tmp_path / "began").exists, what="its start")
    first.kill_supervisor()
    second = bench.start(job)
    wait_for(lambda: second.history.epoch == 2, what="adoption")
    (tmp_path / "end").touch()
    assert second.finish() == 0, second.out
    assert len(second.history.attempts) == 1
    spent = account_time(second.history, (), now_s=0.0).seconds
    assert spent["unsupervised"] == 0
    (gap,) = second.history.unattended
    assert spent["command"] > gap[1] - gap[0] > 0
    second.leave_nothing()


@pytest.mark.long
def test_a_fault_in_a_run_without_a_supervisor_is_answered_by_the_next_one(bench, undisturbed_pair):
    job = bench.pair("unwatched", restart={"process_replace": False})
    first = bench.start(job)
    first.reach(12)
    first.kill_supervisor()
    assert first.local.kill_rank(1)
    wait_for(
        lambda: not any(first.local.rank(rank) for rank in (0, 1)),
        what="the peers of the dead rank to end",
    )
    second = bench.start(job)
    second.complete(undisturbed_pair)
    assert second.rungs() == ["in_place_restart"]
    ended, after = second.history.attempts
    assert after.from_step == ended.last_save.step >= 12, "the survivor saved before it ended"


@pytest.mark.long
def test_a_process_is_replaced_without_a_supervisor_and_the_next_one_records_it(
    bench, undisturbed_pair
):
    job = bench.pair("self-recovered")
    first = bench.start(job)
    first.reach(12)
    first.kill_supervisor()
    (killed,) = first.local.kill_rank(1)
    at_death = first.step()
    wait_for(lambda: first.step() > at_death + 3, what="steps after the death")
    assert [process.pid for process in first.local.rank(1)] != [killed]
    assert first.rungs() == [], "no supervisor has copied it into the ledger yet"

    second = bench.start(job)
    second.complete(undisturbed_pair)
    assert second.rungs() == ["process_replace"]
    assert len(second.history.attempts) == 1


@pytest.mark.long
def test_a_run_whose_containers_are_all_gone_is_placed_again(bench, undisturbed_pair):
    job = bench.pair("vanished")
    first = bench.start(job)
    first.reach(12)
    first.kill_supervisor()
    for process in first.local.processes():
        process.kill()
    second = bench.start(job)
    second.complete(undisturbed_pair)
    assert second.rungs() == ["job_reschedule"]
    assert second.history.isolated == ()


@pytest.mark.long
def test_a_completed_run_is_not_run_again_and_another_job_may_not_take_its_name(bench):
    first = bench.start(bench.pair("once", steps=20, env={"PACE_S": "0"}))
    assert first.finish() == 0, first.out
    again = bench.start(bench.pair("once", steps=20, env={"PACE_S": "0"}))
    assert again.finish() == 0
    assert "was completed before" in again.out
    assert len(again.history.attempts) == 1

    other = bench.start(bench.pair("once", steps=20, seed=12))
    assert other.finish() == 1
    assert "another seed" in other.out

    longer = bench.start(bench.pair("once", steps=24, env={"PACE_S": "0"}))
    assert longer.finish() == 0, longer.out
    assert list(longer.curve()) == list(range(1, 25)), "a larger target goes on where it ended"
