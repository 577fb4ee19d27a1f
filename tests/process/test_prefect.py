"""Deployments, schedules, cancellation and outages, with a real server and a real worker."""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import time
from pathlib import Path

import pytest

from perdure import server_process
from perdure.storage.address import open_store
from perdure.storage.checkpoint import CheckpointStore
from tests.local_run import LocalRun
from tests.process.deployment import PRETRAIN, RETENTION, start_flow_run
from tests.process.rest import ask
from tests.process.truth import contradictions
from tests.waiting import wait_for

pytestmark = [pytest.mark.process, pytest.mark.prefect]


def test_the_pages_of_the_ui_ask_the_server_that_they_come_from(prefect_server):
    settings = ask("GET", f"{prefect_server.ui_url}/ui-settings").json()
    assert settings["api_url"] == prefect_server.api_url


def test_a_job_by_its_name_completes_at_the_step_that_is_given_beside_it(
    bench, deployed, api, undisturbed_pair
):
    job = bench.pair("deployed", env={"PACE_S": "0"})
    api.ask("POST", "variables/", {"name": "a-pair", "value": {**job, "steps": 4000}})
    start_flow_run(api, PRETRAIN, {"job": "a-pair", "steps": job["steps"]})
    running = bench.look(job)
    api.wait_for("deployed", "Completed")
    assert running.curve() == undisturbed_pair
    names = ("attempt 1.1 from step 0", "placement 1 on node-0")
    api.wait_for_tasks("deployed", dict.fromkeys(names, "Completed"))
    running.leave_nothing()


@pytest.mark.long
def test_the_pause_button_stops_the_ranks_and_resume_has_them_go_on(
    bench, deployed, api, undisturbed_pair
):
    job = bench.pair("suspended", env={"PACE_S": "0.3"})
    bench.prefect("deployment", "run", PRETRAIN, "-p", f"job={json.dumps(job)}")
    running = bench.look(job)
    running.reach(3)
    api.suspend("suspended")
    wait_for(lambda: running.history.pause is not None, what="a pause")
    stood_at = running.step()
    assert api.state("suspended") == "Suspended"
    api.resume("suspended")
    api.wait_for("suspended", "Completed")
    assert running.curve() == undisturbed_pair
    (attempt,) = running.history.attempts
    assert [pause.began.step for pause in attempt.pauses] == [stood_at]
    assert running.history.epoch == 2, "the process that Resume starts adopts the attempt"
    running.leave_nothing()


@pytest.mark.long
def test_a_schedule_starts_the_run_and_prepare_data_is_a_deployment(bench, deployed, api):
    job = bench.pair("scheduled", steps=10, env={"PACE_S": "0"})
    start_flow_run(api, "prepare-data/local", {"job": {**job, "run_id": "prepared"}})
    api.wait_for("prepared", "Completed")
    soon = (dt.datetime.now(dt.UTC) + dt.timedelta(seconds=30)).isoformat()
    deployment = api.deployment("pretrain/local")
    schedule = {
        "schedule": {"interval": 86_400, "anchor_date": soon},
        "active": True,
        "parameters": {"job": job},
    }
    url = f"{api.url}/deployments/{deployment['id']}/schedules"
    (made,) = ask("POST", url, [schedule]).json()
    api.wait_for("scheduled", "Completed")
    ask("DELETE", f"{url}/{made['id']}")
    # The corpus had been prepared by the other deployment: nothing was left to do.
    assert [data.skipped for data in bench.look(job).history.data] == [True]


@pytest.mark.long
def test_checkpoint_retention_gives_up_what_the_policy_does_not_keep(bench, deployed, api):
    kept = {"every_steps": 2, "keep_last": 1, "keep_best": 1}
    job = bench.pair("trimmed", steps=10, checkpoint=kept, env={"PACE_S": "0"})
    running = bench.start(job)
    assert running.finish() == 0, running.out
    checkpoints = CheckpointStore(open_store(running.job.storage), "trimmed")
    saved = [2, 4, 6, 8, 10]
    assert checkpoints.steps() == saved, "a run alone does not know which is the best"
    checkpoints.put_shard(7, "p0001-a0001-rank00000.safetensors", b"broken")

    def retain(*, dry_run: bool, reported: str) -> None:
        bench.prefect(
            "deployment", "run", RETENTION,
            "-p", f"job={json.dumps(job)}", "-p", "older_than_s=0",
            "-p", f"dry_run={json.dumps(dry_run)}",
        )  # fmt: skip
        wait_for(lambda: reported in str(api.artifacts("trimmed-retention")), what=reported)

    retain(dry_run=True, reported="Would be removed")
    assert list(checkpoints.states()) == [2, 4, 6, 7, 8, 10]
    retain(dry_run=False, reported="Removed")
    curve = running.curve()
    left = {min(saved, key=curve.__getitem__), 8, 10}
    assert checkpoints.steps() == sorted(left)
    assert 7 not in checkpoints.states()
    rows = json.loads(api.artifacts("trimmed-retention")["trimmed-retention"]["data"])
    given_up = [row["step"] for row in rows if row["what"] == "retention"]
    assert given_up == [step for step in saved if step not in left]
    assert [row["step"] for row in rows if row["what"] == "broken_save"] == [7]


@pytest.mark.long
def test_the_schedule_of_the_retention_works_as_it_is_deployed(bench, deployed, api):
    kept = {"every_steps": 2, "keep_last": 1, "keep_best": 1}
    job = bench.pair("hourly", steps=10, checkpoint=kept, env={"PACE_S": "0"})
    running = bench.start(job)
    assert running.finish() == 0, running.out
    (bench.home / "runs" / "broken").mkdir(parents=True)
    (bench.home / "runs" / "broken" / "job.json").write_text("{")
    deployment = api.deployment(RETENTION)
    api.set_schedule(deployment, active=True)
    try:
        wait_for(lambda: api.scheduled_runs(deployment), what="the scheduler")
        flow_run = api.scheduled_runs(deployment)[0]
        api.run_now(flow_run)
        wait_for(lambda: api.ended(flow_run), what="the end of the scheduled run")
    finally:
        api.set_schedule(deployment, active=False)
        (bench.home / "runs" / "broken" / "job.json").unlink()
    assert "broken" in api.ended(flow_run), "a run that fails is named, and the others go on"
    api.wait_for_tasks("all runs", {"hourly": "Completed", "broken": "Failed"})
    assert api.tags("all runs")["hourly"] == ["retention"]
    assert len(api.flow_runs("hourly")) == 1, "the training; retention makes no flow run of its own"
    rows = json.loads(api.artifacts("hourly-retention")["hourly-retention"]["data"])
    assert {row["what"] for row in rows} == {"retention"}
    curve, saved = running.curve(), [2, 4, 6, 8, 10]
    checkpoints = CheckpointStore(open_store(running.job.storage), "hourly")
    assert checkpoints.steps() == sorted({min(saved, key=curve.__getitem__), 8, 10})
    again = start_flow_run(api, RETENTION, {})
    state = again.wait_for_end()
    assert state["message"].endswith("of this machine looked after; with something to remove: none")
    body = {"flow_runs": {"id": {"any_": [again.id]}}}
    assert api.ask("POST", "task_runs/filter", body).json() == [], "nothing to remove, no task run"
    assert "hourly" not in again.logs


@pytest.mark.long
def test_drills_are_tasks_of_a_deployment_with_a_table(bench, deployed, api):
    job = bench.job("drilled", parallelism={"kind": "hsdp", "replicas": 2})
    name = "replace-rank"
    given = ["-p", f"name={name}", "-p", f"job={json.dumps(job)}"]
    bench.prefect("deployment", "run", "drill/local", *given)
    api.wait_for(name, "Completed")
    assert {"without a fault", name} <= set(api.task_runs(name))
    table = api.artifacts("drilled-drills")["drilled-drills"]
    assert table["description"] == "Drills on the nodes of drilled"
    (row,) = json.loads(table["data"])
    values = [row[column] for column in ("rung", "steps lost", "curve equal", "as expected")]
    assert values == ["process_replace", "0", "yes", "yes"]
    prefix = "logs and ledgers, until all was as expected: "
    (places,) = [one.removeprefix(prefix) for one in api.logs(name) if one.startswith(prefix)]
    home, store = places.split(", ")
    assert store == f"{job['storage']['address']}/{Path(home).name}"
    assert not Path(home).exists()
    assert not Path(store.removeprefix("file://")).exists()


@pytest.mark.long
def test_of_drills_that_are_cancelled_no_process_is_left(bench, deployed, api):
    name = "hang"
    bench.prefect("deployment", "run", "drill/local", "-p", f"name={name}")
    folder = bench.home / "drills"
    (home,) = wait_for(lambda: list(folder.glob("*")), what="the drills' folder")
    local = LocalRun(home, "hang-ddp")
    wait_for(lambda: local.rank(2), what="the drill at work")
    api.cancel(name)
    api.wait_for(name, "Cancelled")
    wait_for(lambda: not local.processes(), what="the end of its processes")


def test_cancelling_stops_every_process_behind_a_saved_step(bench, deployed, api):
    job = bench.pair("cancelled", steps=2000, env={"PACE_S": "0.2"})
    start_flow_run(api, PRETRAIN, {"job": job})
    running = bench.look(job)
    running.reach(4)
    api.cancel("cancelled")
    wait_for(lambda: not running.local.processes(), what="the end of all processes")
    api.wait_for("cancelled", "Cancelled")
    assert running.history.ended.outcome == "cancelled"
    # Saved at the step boundary where it was stopped: nothing that was trained is lost.
    assert max(running.curve()) >= 4
    assert running.step() == max(running.curve())
    # The flow's process may be ended before it has reported; the worker's hook does the rest.
    wait_for(lambda: not contradictions(api, running), what="the whole story")
    running.leave_nothing()


@pytest.mark.long
def test_a_run_in_the_foreground_can_be_cancelled_too(bench, api):
    running = bench.start(bench.pair("foreground", steps=2000, env={"PACE_S": "0.2"}))
    running.reach(4)
    api.cancel("foreground")
    assert running.finish(hurry=False) == 1
    assert "cancelled" in running.out
    running.leave_nothing()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_death_of_flow_server_and_worker_costs_no_step(
    bench, deployed, api, prefect_server, undisturbed_long, monkeypatch
):
    """All three are killed, one after the other, in one run."""
    monkeypatch.setenv("PERDURE_HOME", str(bench.home))
    restart = {"process_replace": False}  # or no supervisor would be needed
    job = bench.pair("outages", steps=LONG_STEPS, env={"PACE_S": "0.35"}, restart=restart)
    start_flow_run(api, PRETRAIN, {"job": job})
    running = bench.look(job)
    running.reach(5)
    workers = {p.pid for rank in (0, 1) for p in running.local.rank(rank)}

    supervisor = running.history.supervisor
    assert supervisor is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    # The worker reports Crashed, the automation schedules the same flow run again.
    wait_for(lambda: running.history.epoch == 2, what="the flow to come back")
    api.wait_for("outages", "Running")
    assert {p.pid for rank in (0, 1) for p in running.local.rank(rank)} == workers, "adopted"

    before = running.step()
    assert server_process.stop_server()
    down_s = time.monotonic()
    assert len(running.local.kill_rank(1)) == 1
    wait_for(
        lambda: len(running.history.attempts) == 2 and running.step() > before + 20,
        what="a recovery while the server is down",
    )
    wait_for(lambda: time.monotonic() - down_s > 60, what="a minute without server")
    server_process.start_server(port=prefect_server.port)

    workers = {p.pid for rank in (0, 1) for p in running.local.rank(rank)}
    os.kill(deployed[0].pid, signal.SIGKILL)
    api.wait_for("outages", "Completed", timeout_s=240)
    assert running.rungs() == ["in_place_restart"]
    assert len(running.history.attempts) == 2, "nothing was started twice"
    keys = api.artifacts("outages-")
    assert "outages-fault-p1-a1" in keys, (
        "what could not be reported during the outage was reported later"
    )
    api.wait_for_tasks("outages", {"attempt 1.1 (adopted)": "RestartInPlace"})
    assert running.curve() == undisturbed_long.curve()
    assert list(running.curve()) == list(range(1, LONG_STEPS + 1))
    running.leave_nothing()


LONG_STEPS = 330


@pytest.fixture(scope="module")
def undisturbed_long(bench):
    running = bench.start(bench.pair("undisturbed-long", steps=LONG_STEPS, env={"PACE_S": "0"}))
    assert running.finish() == 0, running.out
    return running
