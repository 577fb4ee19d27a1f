"""Concurrency limits that somebody sets to keep two trainings apart: no training stops for one."""

from __future__ import annotations

import pytest

from tests.process.deployment import (
    KEEP_SUPERVISED,
    POOL,
    PRETRAIN,
    kill_supervisor,
    start_flow_run,
    supervising,
)
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.process, pytest.mark.prefect, pytest.mark.long, pytest.mark.timeout(900)
]  # fmt: skip

BACK_S = 400.0  # the slot of a crashed flow run is free once its lease has run out


@pytest.fixture(params=["deployment", "work pool", "work queue"])
def limited(request, deployed, api):
    """A limit of one flow run on the deployment, its pool or its queue."""
    path = {
        "deployment": f"deployments/{api.deployment(PRETRAIN)['id']}",
        "work pool": f"work_pools/{POOL}",
        "work queue": f"work_pools/{POOL}/queues/default",
    }[request.param]
    api.ask("PATCH", path, {"concurrency_limit": 1})
    keeper = api.deployment(KEEP_SUPERVISED)
    api.set_schedule(keeper, active=True)
    yield request.param
    api.set_schedule(keeper, active=False)
    api.ask("PATCH", path, {"concurrency_limit": None})


def test_a_supervisor_that_was_killed_comes_back_under_a_limit_of_one_and_the_limit_is_named(
    bench, api, limited
):
    name = f"limited-{limited.replace(' ', '-')}"
    job = bench.pair(name, steps=3000, env={"PACE_S": "0.3"})
    flow_run = start_flow_run(api, PRETRAIN, {"job": job})
    running = bench.look(job)
    running.reach(3)
    needs = f"{name}-needs-you"
    wait_for(
        lambda: f"{limited} " in str(api.artifacts(needs).get(needs)),
        what="the limit among what needs a person", period_s=0.5,
    )  # fmt: skip
    kill_supervisor(running)
    before = running.step()
    wait_for(
        lambda: running.history.epoch > 1, timeout_s=BACK_S, what="the next supervisor",
        period_s=0.5,
    )  # fmt: skip
    assert running.step() > before, "training goes on meanwhile"
    assert len(running.history.attempts) == 1
    assert supervising(api, running).state["type"] == "RUNNING"
    assert "cancels it" in bench.perdure("cancel", name)
    flow_run.wait_for_end()
    running.leave_nothing()
