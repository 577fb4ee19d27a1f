"""The restart policy of a job as the retries of a Prefect task, on a real server."""

from __future__ import annotations

import pytest

from tests.process.rest import ask
from tests.waiting import wait_for

pytestmark = [pytest.mark.process, pytest.mark.prefect]

# Notes each start, and crashes until it has been started more than so often.
PROGRAM = "echo >>{notes}; [ $(wc -l <{notes}) -gt {crashes} ] || kill -SEGV $$"


def crashing(bench, run_id: str, *, crashes: int, **restart) -> dict:
    """A job whose program crashes so often before it ends well."""
    script = bench.home / f"{run_id}.sh"
    script.write_text(PROGRAM.format(notes=script.with_suffix(".starts"), crashes=crashes))
    return {
        "run_id": run_id,
        "storage": {"address": f"file://{bench.home}/store"},
        "worker": {"command": ["sh", str(script)]},
        "restart": {"hang": False, **restart},
        "preflight": {"nodes": False},
        "engine": {"nodes": 1, "slots_per_node": 1, "grace_s": 2},
    }


def states(api, run: str, task: str) -> list[str]:
    """Every state that a task of a run was in."""
    task_run = api.task_run_ids(run)[task]
    found = ask("GET", f"{api.url}/task_run_states/?task_run_id={task_run}").json()
    return [state["name"] for state in found]


@pytest.mark.long
def test_the_retries_of_a_placement_are_the_restarts_that_the_policy_allows(bench, api):
    # Each attempt counts as progress, so restarts are free, and more than one is decided for.
    policy = {"in_place_retries": 1, "delay_s": 0.3, "progress_after_s": 0.01}
    running = bench.start(crashing(bench, "policy", crashes=3, **policy))
    assert running.finish() == 0, running.out
    assert running.rungs() == ["in_place_restart"] * 3
    api.wait_for_tasks("policy", {
        "attempt 1.1 from step 0": "RestartInPlace",
        "attempt 1.2 from step 0": "RestartInPlace",
        "placement 1 on node-0": "Continued",
        "attempt 1.3 from step 0": "RestartInPlace",
        "attempt 1.4 from step 0": "Completed",
        "placement 1 on node-0, continued": "Completed",
    })  # fmt: skip
    waited = ["Pending", "Running", "AwaitingRetry", "Retrying"]
    assert states(api, "policy", "placement 1 on node-0") == [*waited, "Continued"]
    assert states(api, "policy", "placement 1 on node-0, continued") == [*waited, "Completed"]
    (line,) = [line for line in api.logs("policy") if line.startswith("attempt 1.1 ")]
    assert line.startswith("attempt 1.1 ended: native_crash on node-0: in_place_restart")
    assert not [line for line in api.logs("policy") if "Retry 1/" in line]
    reported = api.wait_for_events("policy", "recovery", count=3)
    assert len(reported) == 3, "each attempt's hook has reported it once"


@pytest.mark.long
def test_a_run_that_is_cancelled_while_it_waits_to_restart_starts_nothing_more(bench, api):
    running = bench.start(crashing(bench, "waiting", crashes=1, delay_s=3600))
    placement = "placement 1 on node-0"
    wait_for(
        lambda: api.flow_runs("waiting") and api.task_runs("waiting").get(placement),
        what=placement,
    )
    wait_for(
        lambda: api.task_runs("waiting")[placement] == "AwaitingRetry",
        what="the wait before the restart",
    )
    api.cancel("waiting")
    assert running.finish() == 1
    assert running.history.ended.outcome == "cancelled"
    assert len(running.history.attempts) == 1
    assert api.state("waiting") == "Cancelled"
    expected = {placement: "StoppedOnRequest", "attempt 1.1 from step 0": "RestartInPlace"}
    api.wait_for_tasks("waiting", expected)
    log = "\n".join(api.logs("waiting"))
    assert "stopped on request before the restart" in log
    assert "Crash detected!" not in log
    running.leave_nothing()
