"""The main job: faults of processes and nodes leave the loss curve as it was."""

from __future__ import annotations

import json
import re

import pytest

pytestmark = pytest.mark.process


def test_a_killed_worker_and_a_lost_node_leave_the_loss_curve_bit_for_bit(bench, undisturbed):
    job = bench.job("faults")
    job["data"] = {**job["data"], "num_workers": 1}
    running = bench.start(job)
    running.reach(13)
    killed = running.local.kill_rank(1)
    running.reach(33)
    lost = running.local.kill_node("node-1")
    assert running.finish() == 0, running.out

    assert (len(killed), len(lost) >= 3) == (1, True), "the faults really fired"
    assert running.curve() == undisturbed.curve()
    assert list(running.curve()) == list(range(1, 61))
    assert running.rungs() == ["process_replace", "pod_reschedule"]
    first, _ = running.history.attempts
    assert (first.ended.fault.fault_class, first.ended.fault.node) == ("node_lost", "node-1")
    assert running.history.isolated == ("node-1",)

    counts = [
        re.search(r"rank (\d) .*CNT=(\d+) .*CNT=(\d+)", line) for line in running.worker_lines()
    ]
    assert sorted(tuple(map(int, m.groups())) for m in counts if m) == [
        (0, 1, 1), (0, 1, 2),  # node-0: one container, two process starts
        (2, 1, 1), (2, 2, 1),  # node-1, then a new container on node-2
    ]  # fmt: skip
    assert [[m.schedule_cnt for m in p.members] for p in running.history.placements] == [
        [1, 1],
        [1, 2],
    ]
    assert len(running.history.data) == 1
    assert_replacement_is_told(running)
    running.leave_nothing()


def assert_replacement_is_told(running) -> None:
    """The ledger, the terminal and the status tell of the new process for rank 1."""
    (recovery,) = running.history.attempts[0].recoveries
    began, ended = recovery.began, recovery.ended
    assert (began.fault.fault_class, began.fault.node, began.fault.rank) == (
        "native_crash", "node-0", 1,
    )  # fmt: skip
    assert (ended.succeeded, ended.replaced, ended.generation) == (True, (1,), 2)
    assert ended.steps_lost == 0
    assert 13 <= ended.step <= began.fault.step + 1

    rows = [line.split("\u2502")[1:-1] for line in running.out.splitlines() if "\u2502" in line]
    cells = [[cell.strip() for cell in row] for row in rows]
    (row,) = [row for row in cells if row[1] == "1, generation 1"]
    assert (row[0], row[2], row[8]) == ("1", "node-0", "process_replace")
    assert float(row[9]) == round(ended.duration_s, 2)
    assert "recovery 1, generation 1: native_crash at rank 1 on node-0" in running.out
    assert f"recovery 1: training goes on from step {ended.step} after" in running.out

    status = json.loads(running.bench.perdure("status", running.job.run_id, "--json"))
    (recovery,) = status["recoveries"]
    assert (recovery["rung"], recovery["outcome"]) == ("process_replace", "mended")
    spent = status["time_s"]
    assert {"productive_step", "recovery_process_replace", "recovery_pod_reschedule"} <= set(spent)
    assert sum(spent.values()) == pytest.approx(status["wall_s"], abs=0.01)


@pytest.mark.long
@pytest.mark.parametrize("rung", ["process_replace", "in_place_restart"])
def test_the_first_rank_may_die_as_well_as_any_other(bench, undisturbed_pair, rung):
    restart = {"process_replace": rung == "process_replace"}
    running = bench.start(bench.pair(f"rank-0-dies-{rung[:2]}", restart=restart))
    running.reach(5)
    assert len(running.local.kill_rank(0)) == 1
    assert running.finish() == 0, running.out
    assert running.curve() == undisturbed_pair.curve()
    assert running.rungs() == [rung]
    running.leave_nothing()


@pytest.mark.long
def test_without_pod_retries_a_lost_node_reschedules_the_whole_job(bench, undisturbed_pair):
    running = bench.start(bench.apart("job-level", restart={"pod_retries": 0}))
    running.reach(12)
    assert running.local.kill_node("node-0")
    assert running.finish() == 0, running.out
    assert running.curve() == undisturbed_pair.curve()
    assert running.rungs() == ["job_reschedule_isolated"]
    members = [[(m.node, m.schedule_cnt) for m in p.members] for p in running.history.placements]
    assert members == [[("node-0", 1), ("node-1", 1)], [("node-2", 2), ("node-1", 2)]]
    running.leave_nothing()


@pytest.mark.long
def test_a_silent_rank_is_noticed_and_the_processes_are_restarted(bench, undisturbed_pair):
    running = bench.start(bench.pair("silent", restart={"hang_timeout_s": 4}))
    running.reach(12)
    (victim,) = running.local.rank(1)
    victim.suspend()
    assert running.finish() == 0, running.out
    assert running.curve() == undisturbed_pair.curve()
    assert running.rungs() == ["hang_restart"]
    running.leave_nothing()


def test_an_error_in_the_users_program_stops_at_once_with_the_diagnosis(bench):
    job = bench.pair("broken")
    job["worker"] = {**job["worker"], "recipe": "paced:broken"}
    running = bench.start(job)
    assert running.finish() == 1
    assert running.rungs() == ["stop"]
    (attempt,) = running.history.attempts
    assert attempt.ended.fault.fault_class == "user_code_error"
    assert "forward() got an unexpected argument" in attempt.ended.fault.evidence
    assert "for the user to mend" in running.out
    running.leave_nothing()


@pytest.mark.long
def test_a_recipe_that_returns_without_training_is_a_fault_and_not_a_success(bench):
    job = bench.pair("lazy")
    del job["data"]  # a recipe of one's own may do without a corpus
    job["worker"] = {**job["worker"], "recipe": "paced:lazy"}
    running = bench.start(job)
    assert running.finish() == 1
    (attempt,) = running.history.attempts
    assert attempt.ended is not None
    assert attempt.ended.fault is not None
    assert "returned at step 0 of 60" in attempt.ended.fault.evidence
    assert "rank-0000" in running.out, "where the output of the rank is"
    running.leave_nothing()


@pytest.mark.long
def test_without_a_healthy_spare_the_run_says_so_and_follows_its_policy(bench):
    job = bench.apart("no-spare", restart={"spare_wait_s": 1, "allow_without_isolation": False})
    job["engine"] = {**job["engine"], "spares": 0}
    running = bench.start(job)
    running.reach(3)
    assert running.local.kill_node("node-1")
    assert running.finish() == 1
    assert running.rungs()[-1] == "stop"
    assert "no healthy spare" in running.out
    running.leave_nothing()
