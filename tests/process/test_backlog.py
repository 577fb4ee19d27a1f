"""What a worker starts that comes back after many ticks of a schedule were due."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.flows.automations import MAX_TICKS
from tests.process.deployment import (
    KEEP_SUPERVISED,
    due_ticks,
    kill_worker,
    open_ticks,
    start_worker,
    stop_schedule,
    ticking,
    train_backlog,
)
from tests.waiting import wait_for

pytestmark = [pytest.mark.process, pytest.mark.prefect]


def without_automations(api) -> None:
    """Switch the automations off: a server that was restarted may hold events back."""
    for automation in api.ask("POST", "automations/filter", {}).json():
        api.ask("PATCH", f"automations/{automation['id']}", {"enabled": False})


def processes(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in runs if one["infrastructure_pid"] is not None]


@pytest.mark.long
def test_of_a_backlog_of_ticks_one_does_the_work_and_few_processes_start(bench, deployed, api):
    kill_worker(deployed.pop())
    without_automations(api)
    with ticking(api, KEEP_SUPERVISED, {}, every_s=1, in_s=1) as schedule:
        wait_for(lambda: len(due_ticks(api, schedule)) >= 20, what="a backlog")
        backlog = due_ticks(api, schedule)
        stop_schedule(api, KEEP_SUPERVISED, schedule)
        deployed.append(start_worker(bench))
        wait_for(lambda: not open_ticks(api, schedule), what="the end of all ticks", period_s=0.5)
        ended = due_ticks(api, schedule)
    assert len(ended) >= len(backlog) - 1
    started = processes(ended)
    assert len(started) <= 2 * MAX_TICKS, [one["state"]["message"] for one in started]
    at_work = [one for one in started if "does the work" not in one["state"]["message"]]
    assert [one["name"] for one in at_work] == [ended[-1]["name"]]


@pytest.mark.long
def test_of_a_backlog_of_a_users_own_schedule_one_run_is_trained(bench, deployed, api):
    job = bench.pair("backlog-{date}-{time}", steps=4, env={"PACE_S": "0.2"})
    ended = train_backlog(bench, api, deployed, job)
    trained = [one["name"] for one in ended if one["state_type"] == "COMPLETED"]
    assert trained == [ended[-1]["name"]]
