"""The main job: faults of processes and nodes leave the loss curve as it was."""

from __future__ import annotations

import json
import re

import pytest

pytestmark = pytest.mark.process

RUNGS = ["process_replace", "hang_restart", "pod_reschedule"]
ACCOUNTS = {
    "productive_step", "redone_step", "save_block", "start_up", "detection", "ending",
    *(f"recovery_{rung}" for rung in RUNGS),
}  # fmt: skip


def test_a_killed_rank_a_silent_one_and_a_lost_node_leave_the_loss_curve_bit_for_bit(
    broken, undisturbed
):
    assert broken.curve() == undisturbed
    assert list(broken.curve()) == list(range(1, 61))
    assert broken.rungs() == RUNGS
    faults = [view.ended.fault for view in broken.history.attempts]
    assert [(one.fault_class, one.node) for one in faults if one] == [
        ("hang", "node-0"), ("node_lost", "node-1"),
    ]  # fmt: skip
    assert broken.history.isolated == ("node-1",)
    assert len(broken.history.data) == 1
    broken.leave_nothing()


def test_containers_and_process_starts_are_counted_as_the_platform_does(broken):
    counts = [
        re.search(r"rank (\d) .*CNT=(\d+) .*CNT=(\d+)", line)
        for line in broken.worker_lines("MA_SCHEDULE_CNT")
    ]
    assert sorted(tuple(map(int, m.groups())) for m in counts if m) == [
        # node-0: one container; the second start was that of rank 1 alone, in another's place
        (0, 1, 1), (0, 1, 3), (0, 1, 4),
        (2, 1, 1), (2, 1, 2), (2, 2, 1),  # node-1, then a new container on node-2
    ]  # fmt: skip
    placements = broken.history.placements
    assert [[m.schedule_cnt for m in one.members] for one in placements] == [[1, 1], [1, 2]]


def test_a_new_process_for_a_rank_is_in_the_ledger_on_the_terminal_and_in_the_status(broken):
    (recovery,) = broken.history.attempts[0].recoveries
    began, ended = recovery.began, recovery.ended
    assert (began.fault.fault_class, began.fault.node, began.fault.rank) == (
        "native_crash", "node-0", 1,
    )  # fmt: skip
    assert (ended.succeeded, ended.replaced, ended.generation) == (True, (1,), 2)
    assert ended.steps_lost == 0
    assert 13 <= ended.step <= began.fault.step + 1

    rows = [line.split("\u2502")[1:-1] for line in broken.out.splitlines() if "\u2502" in line]
    cells = [[cell.strip() for cell in row] for row in rows]
    (row,) = [row for row in cells if row[1] == "1, generation 1"]
    assert (row[0], row[2], row[8]) == ("1", "node-0", "process_replace")
    assert float(row[9]) == round(ended.duration_s, 2)
    assert "recovery 1, generation 1: native_crash at rank 1 on node-0" in broken.out
    assert f"recovery 1: training continues from step {ended.step} after" in broken.out

    (recovery,) = broken.status()["recoveries"]
    assert (recovery["rung"], recovery["outcome"]) == ("process_replace", "recovered")


def test_every_second_of_a_broken_run_has_an_owner(broken):
    status = broken.status()
    spent = status["time_s"]
    assert set(spent) >= ACCOUNTS
    assert set(spent).isdisjoint({"unknown", "unsupervised"})
    assert sum(spent.values()) == pytest.approx(status["wall_s"], abs=0.01)
    assert status["ettr"] == pytest.approx(spent["productive_step"] / status["wall_s"], abs=1e-3)


def test_the_server_has_attempts_reports_and_events_of_a_broken_run(broken, api):
    api.wait_for_tasks("main-job", {
        "attempt 1.1 from step 0": "RestartAfterHang",
        "attempt 1.2 from step 20": "ReschedulePod",
        "placement 2 on node-0,node-2": "Completed",
    })  # fmt: skip
    keys = api.artifacts("main-job-")
    assert {
        "main-job-progress", "main-job-attempts", "main-job-checkpoints", "main-job-loss",
        "main-job-fault-p1-a1-r1", "main-job-fault-p1-a1", "main-job-fault-p1-a2",
    } <= set(keys)  # fmt: skip
    replaced = keys["main-job-fault-p1-a1-r1"]["data"]
    assert "killed by signal 9" in replaced
    assert "**What was done?** `process_replace` (a new process for a rank)" in replaced
    assert "a new process for rank 1" in replaced
    assert "**What was done?** `hang_restart`" in keys["main-job-fault-p1-a1"]["data"]
    assert "100" in str(keys["main-job-progress"]["data"])
    rows = json.loads(keys["main-job-attempts"]["data"])
    assert [(row["attempt"], row["answer"]) for row in rows[:3]] == [
        ("1.1", "hang_restart"), ("1.1, generation 1", "process_replace"),
        ("1.2", "pod_reschedule"),
    ]  # fmt: skip
    first, *others = api.wait_for_events("main-job", "recovery", count=3)
    assert (first["rung"], first["replaced"], first["outcome"]) == (
        "process_replace", [1], "recovered",
    )  # fmt: skip
    assert [one["rung"] for one in others] == RUNGS[1:]
    faults = api.wait_for_events("main-job", "fault", count=3)
    assert [fault["fault_class"] for fault in faults] == ["native_crash", "hang", "node_lost"]


@pytest.mark.long
def test_without_pod_retries_a_lost_node_reschedules_the_whole_job(bench, undisturbed_pair):
    running = bench.start(bench.apart("job-level", restart={"node_replace": False}))
    running.reach(12)
    assert running.local.kill_node("node-0")
    running.complete(undisturbed_pair)
    assert running.rungs() == ["job_reschedule_isolated"]
    members = [[(m.node, m.schedule_cnt) for m in p.members] for p in running.history.placements]
    assert members == [[("node-0", 1), ("node-1", 1)], [("node-2", 2), ("node-1", 2)]]


def test_an_error_in_the_users_program_stops_at_once_with_the_diagnosis(bench):
    job = bench.pair("broken")
    job["worker"] = {**job["worker"], "recipe": "paced:broken"}
    running = bench.start(job)
    assert running.finish() == 1
    assert running.rungs() == ["stop"]
    (attempt,) = running.history.attempts
    assert attempt.ended.fault.fault_class == "user_code_error"
    assert "forward() got an unexpected argument" in attempt.ended.fault.evidence
    assert "for the user to fix" in running.out
    running.leave_nothing()


@pytest.mark.long
def test_a_recipe_that_returns_without_training_is_a_fault_and_not_a_success(bench):
    job = bench.pair("lazy")
    del job["data"]  # a recipe of one's own may do without a corpus
    job["worker"] = {**job["worker"], "recipe": "paced:lazy"}
    running = bench.start(job)
    assert running.finish() == 1
    (attempt,) = running.history.attempts
    assert "the recipe returned at step 0 of 60" in attempt.ended.fault.evidence
    assert "rank-0000" in running.out, "where the output of the rank is"
    running.leave_nothing()


@pytest.mark.long
def test_without_a_healthy_spare_the_run_reports_it_and_follows_its_policy(bench):
    policy = {"spare_wait_s": 1, "allow_without_isolation": False, "node_replace": False}
    job = bench.apart("no-spare", restart=policy)
    job["engine"] = {**job["engine"], "spares": 0}
    running = bench.start(job)
    running.reach(3)
    assert running.local.kill_node("node-1")
    assert running.finish() == 1
    assert running.rungs()[-1] == "stop"
    assert "no healthy spare" in running.out
    running.leave_nothing()
