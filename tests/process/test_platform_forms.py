"""Documents of a platform, from `perdure policy import` to what ledger and UI have of the run."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.values import not_none

pytestmark = [pytest.mark.process, pytest.mark.prefect, pytest.mark.long]

ANNOTATIONS = {
    "metadata": {
        "annotations": {
            "fault-tolerance/job-retry-num": "8",
            "fault-tolerance/pod-retry-num": "4",
        }
    }
}
CHECKLIST = """fault_tolerance_config = {
    "max_restarts": 8,
    "checkpoint": {"interval": 1000},
    "log_level": "warning",
}
"""


def imported(bench, name: str, text: str) -> dict:
    """The sections of a job that a platform's document becomes."""
    file = bench.home / name
    file.write_text(text)
    sections = yaml.safe_load(bench.perdure("policy", "import", str(file)))
    assert isinstance(sections, dict)
    return sections


def test_an_isolation_that_failed_for_one_node_is_asked_for_when_another_one_is_lost(
    bench, undisturbed_pair, api
):
    """No node is free: each pod is tried, for its own node, and the job goes back as it was."""
    annotations = imported(bench, "annotations.json", json.dumps(ANNOTATIONS))
    checklist = imported(bench, "checklist.py", CHECKLIST)
    restart = {**annotations["restart"], "node_replace": False, "spare_wait_s": 0}
    job = bench.apart(
        "imported",
        restart=restart,
        checkpoint=checklist["checkpoint"],
        env=checklist["env"],
        engine={"nodes": 2, "slots_per_node": 1, "spares": 0, "grace_s": 10},
    )
    running = bench.start(job)
    for number, node in enumerate(("node-0", "node-1"), start=1):
        running.reach(7 * number)
        assert running.local.kill_node(node)
    assert running.finish() == 0, running.out
    history = running.history
    first, second, _ = history.attempts
    for view, node in ((first, "node-0"), (second, "node-1")):
        assert not_none(view.fault).node == node
        assert view.failed_rungs == ("pod_reschedule",)
        assert not_none(view.decision).rung == "job_reschedule"
    assert history.isolated == ("node-0", "node-1"), "each by its own pod's rescheduling"
    there = [[member.node for member in placed.members] for placed in history.placements]
    assert there == [["node-0", "node-1"]] * 3
    assert running.curve() == undisturbed_pair
    tasks = {
        task: "RescheduleJob"
        for task in api.task_runs("imported")
        if task.startswith(("attempt 1.1 ", "attempt 2.1 "))
    }
    assert len(tasks) == 2
    api.wait_for_tasks("imported", tasks)
    running.leave_nothing()
