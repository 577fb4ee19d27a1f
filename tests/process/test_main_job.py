"""The main job: faults of processes and nodes leave the loss curve as it was."""

from __future__ import annotations

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
    assert running.rungs() == ["in_place_restart", "pod_reschedule"]
    faults = [a.ended.fault for a in running.history.attempts if a.ended.fault]
    assert [(f.fault_class.value, f.node, f.rank) for f in faults] == [
        ("native_crash", "node-0", 1),
        ("node_lost", "node-1", None),
    ]
    assert running.history.isolated == ("node-1",)

    counts = [
        re.search(r"rank (\d) .*CNT=(\d+) .*CNT=(\d+)", line) for line in running.worker_lines()
    ]
    assert sorted(tuple(map(int, m.groups())) for m in counts if m) == [
        (0, 1, 1), (0, 1, 2), (0, 1, 3),  # node-0: one container, three process starts
        (2, 1, 1), (2, 1, 2), (2, 2, 1),  # node-1 twice, then a new container on node-2
    ]  # fmt: skip
    assert [[m.schedule_cnt for m in p.members] for p in running.history.placements] == [
        [1, 1],
        [1, 2],
    ]
    assert len(running.history.data) == 1
    running.leave_nothing()


def test_the_first_rank_may_die_as_well_as_any_other(bench, undisturbed):
    running = bench.start(bench.job("rank-0-dies"))
    running.reach(5)
    assert len(running.local.kill_rank(0)) == 1
    assert running.finish() == 0, running.out
    assert running.curve() == undisturbed.curve()
    assert running.rungs() == ["in_place_restart"]
    running.leave_nothing()


def test_without_pod_retries_a_lost_node_reschedules_the_whole_job(bench, undisturbed_pair):
    running = bench.start(bench.pair("job-level", restart={"pod_retries": 0}))
    running.reach(12)
    assert running.local.kill_node("node-0")
    assert running.finish() == 0, running.out
    assert running.curve() == undisturbed_pair.curve()
    assert running.rungs() == ["job_reschedule_isolated"]
    members = [[(m.node, m.schedule_cnt) for m in p.members] for p in running.history.placements]
    assert members == [[("node-0", 1), ("node-1", 1)], [("node-2", 2), ("node-1", 2)]]
    running.leave_nothing()


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


def test_without_a_healthy_spare_the_run_says_so_and_follows_its_policy(bench):
    job = bench.pair("no-spare", restart={"spare_wait_s": 1, "allow_without_isolation": False})
    job["engine"] = {**job["engine"], "spares": 0}
    running = bench.start(job)
    running.reach(3)
    assert running.local.kill_node("node-1")
    assert running.finish() == 1
    assert running.rungs()[-1] == "stop"
    assert "no healthy spare" in running.out
    running.leave_nothing()
