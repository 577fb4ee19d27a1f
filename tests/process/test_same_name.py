"""Two runs of one name, on machines that share only a server, leave each other alone."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling

from perdure.tasks.artifacts import GOES_ON, Artifact, ArtifactKind, Artifacts
from perdure.tasks.hooks import _set_flow_runs
from perdure.tasks.orphaned_task_runs import close_orphaned_task_runs
from perdure.tasks.runs import flow_runs_of
from perdure.training.journal.history import RunHistory
from tests.process.deployment import FlowRun
from tests.process.truth import task_runs
from tests.waiting import wait_for
from tests.workplace import make_bench

pytestmark = [pytest.mark.process, pytest.mark.prefect]

NAME = "twin-1"


def training(api) -> FlowRun:
    """A flow run that trains an attempt, as far as the server knows."""
    flow = api.ask("POST", "flows/", {"name": "pretrain"}).json()
    body = {"flow_id": flow["id"], "name": NAME, "state": {"type": "RUNNING"}}
    flow_run = FlowRun(api, api.ask("POST", "flow_runs/", body).json()["id"])
    task = {
        "flow_run_id": flow_run.id,
        "name": "attempt 1.1 from step 0",
        "task_key": "attempt",
        "dynamic_key": "0",
        "state": {"type": "RUNNING", "name": "Running"},
    }
    api.ask("POST", "task_runs/", task)
    return flow_run


def attempt_of(api, flow_run: FlowRun) -> str:
    """The name of the state of its task run."""
    (found,) = (one for one in task_runs(api, NAME) if one["flow_run_id"] == flow_run.id)
    name: str = found["state_name"]
    return name


def described(api, flow_run: FlowRun) -> list[str]:
    """What its artifacts are described as."""
    body = {"artifacts": {"flow_run_id": {"any_": [flow_run.id]}}}
    return [one["description"] for one in api.ask("POST", "artifacts/filter", body).json()]


def test_a_supervisor_changes_nothing_of_a_run_of_the_same_name_that_its_ledger_does_not_name(api):
    other, former, own = training(api), training(api), training(api)
    history = RunHistory(flow_runs=[former.id])
    flow_runs = flow_runs_of(history, UUID(own.id))
    table = Artifact("attempts", ArtifactKind.TABLE, [{"attempt": "1.1"}], "one attempt")
    with temporary_settings({PREFECT_API_URL: api.url}):
        for one in (former, other):
            Artifacts(NAME, UUID(one.id)).put(table)
        Artifacts(NAME, UUID(own.id), lambda: flow_runs).put(table)
        with get_client(sync_client=True) as client:
            now = datetime.now(UTC)
            num_ended = close_orphaned_task_runs(
                client, history, flow_run_id=None, began=now, adopted_by="supervisor 2"
            )
        num_cancelled = _set_flow_runs(history, Cancelling())

    assert described(api, other) == ["one attempt"]
    assert described(api, former) == [GOES_ON + "one attempt"]
    assert described(api, own) == ["one attempt"]
    assert num_ended == 1
    assert (attempt_of(api, former), attempt_of(api, other)) == ("SupervisorLost", "Running")
    assert num_cancelled == 1
    assert (former.state["name"], other.state["name"]) == ("Cancelling", "Running")


@pytest.mark.long
def test_perdure_cancel_on_one_machine_leaves_the_run_of_the_other_alone(bench, api, tmp_path):
    elsewhere = make_bench(tmp_path, api.url)
    here = bench.start(bench.pair("shared-1", steps=2000))
    here.reach(4)
    (first,) = api.flow_runs("shared-1")
    there = elsewhere.start(elsewhere.pair("shared-1", steps=2000))
    there.reach(4)
    cancelled = elsewhere.perdure("cancel", "shared-1")
    assert "its supervisor cancels it" in cancelled
    assert there.finish(hurry=False) == 1
    assert there.history.ended is not None
    assert there.history.ended.outcome == "cancelled"

    flow_run = FlowRun(api, first["id"])
    assert flow_run.state["name"] == "Running"
    open_ones = [one for one in task_runs(api, "shared-1") if one["flow_run_id"] == first["id"]]
    assert {one["state_name"] for one in open_ones if one["name"].startswith("attempt")} == {
        "Running"
    }
    before = here.step()
    wait_for(lambda: here.step() > before, what="a further step of the other run")
    assert "its supervisor cancels it" in bench.perdure("cancel", "shared-1")
    assert here.finish(hurry=False) == 1
    assert flow_run.state["name"] == "Cancelled"
    for running in (here, there):
        running.leave_nothing()
