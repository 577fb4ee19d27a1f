"""What the server shows of a run is what the run does, whichever process of it is killed."""

from __future__ import annotations

import datetime as dt
import shutil
import time
from zoneinfo import ZoneInfo

import pytest

from perdure import server_process
from perdure.training.supervisor.run_supervisor import RunSupervisor
from tests.process.deployment import (
    KEEP_SUPERVISED,
    PRETRAIN,
    FlowRun,
    kill_supervisor,
    kill_worker,
    start_flow_run,
    start_worker,
    supervising,
    ticking,
    ticks,
)
from tests.process.rest import ask
from tests.waiting import wait_for

pytestmark = [pytest.mark.process, pytest.mark.prefect, pytest.mark.long]

ADOPTED_S = 300.0  # it looks each minute


def begin(bench, api, run_id, **changes):
    """A deployed run that trains: itself, and its flow run."""
    job = bench.pair(run_id, steps=4000, **{"env": {"PACE_S": "0.3"}, **changes})
    flow_run = start_flow_run(api, PRETRAIN, {"job": job})
    running = bench.look(job)
    running.reach(3)
    return running, flow_run


def wait_for_epoch(running, epoch, *, timeout_s=ADOPTED_S):
    wait_for(
        lambda: running.history.epoch == epoch, timeout_s=timeout_s, what="the next supervisor",
        period_s=0.5,
    )  # fmt: skip


def keep(api) -> FlowRun:
    """One tick of keep-supervised; its flow run, when it is over."""
    flow_run = start_flow_run(api, KEEP_SUPERVISED, {})
    assert flow_run.wait_for_end()["type"] == "COMPLETED", flow_run.logs
    return flow_run


def keep_until(api, done) -> None:
    """Ticks of keep-supervised until one has done what is waited for."""
    deadline_s = time.monotonic() + ADOPTED_S
    while done not in (message := keep(api).state["message"]):
        assert time.monotonic() < deadline_s, message
        time.sleep(5)


def first_tick(api, schedule) -> FlowRun:
    found = wait_for(lambda: ticks(api, schedule), what="a tick", period_s=0.5)
    assert len(found) == 1
    return found[0]


def finish(running, flow_run) -> None:
    """Have the run end, and see that both say so."""
    running.bench.perdure("cancel", running.job.run_id)
    assert flow_run.wait_for_end()["name"] == "Cancelled"
    assert running.history.ended.outcome == "cancelled"
    running.leave_nothing()


def test_one_killed_flow_process_is_one_crash_and_its_living_run_is_never_failed(
    bench, deployed, api
):
    running, flow_run = begin(bench, api, "killed-once")
    workers = {p.pid for rank in (0, 1) for p in running.local.rank(rank)}
    assert supervising(api, running).id == flow_run.id
    kill_supervisor(running)
    flow_run.wait_for("Crashed")
    wait_for_epoch(running, 2)
    time.sleep(20)  # the worker's second report comes 12 to 20 s after its first
    assert flow_run.state["type"] == "RUNNING", flow_run.states
    assert flow_run.states.count("AwaitingRetry") == 1, flow_run.states
    assert "Failed" not in flow_run.states

    flow_run.set_state("CRASHED")  # a second report that comes later than any
    flow_run.wait_for("Running")
    assert flow_run.state["message"] == "the supervisor lives"
    flow_run.set_state("SCHEDULED", "AwaitingRetry")
    wait_for(
        lambda: "an earlier process of this flow run supervises the run" in flow_run.logs,
        what="a second process of the same flow run",
        period_s=1.0,
    )
    assert flow_run.state["type"] == "RUNNING", flow_run.states

    other = start_flow_run(api, PRETRAIN, {"job": running.job.model_dump(mode="json")})
    other.wait_for("AlreadySupervised")
    assert other.state["type"] == "RUNNING"
    assert flow_run.id in other.state["message"]

    assert running.history.epoch == 2, "nobody took it in the meantime"
    assert {p.pid for rank in (0, 1) for p in running.local.rank(rank)} == workers
    finish(running, flow_run)
    assert other.wait_for_end()["name"] == "Cancelled", "as the run has ended"
    wait_for(lambda: "Finished in state" in other.logs, what="its last line", period_s=1.0)
    assert "Traceback" not in other.logs


@pytest.mark.timeout(900)
def test_what_cannot_be_started_fails_with_the_reason_and_is_not_tried_for_ever(
    bench, deployed, api
):
    job = bench.pair("wrong")
    with (
        ticking(api, PRETRAIN, {}, every_s=86_400) as without_job,
        ticking(api, PRETRAIN, {"job": {**job, "steps": -1}}, every_s=86_400) as impossible,
    ):
        for schedule, reason in ((without_job, "job: is missing"), (impossible, "steps: -1: ")):
            tick = first_tick(api, schedule)
            state = tick.wait_for_end()
            assert state["type"] == "FAILED"
            assert reason in state["message"]
            assert "Crashed" not in tick.states
            assert "Traceback" not in tick.logs

    # Its program ends before any flow can say why.
    known = api.deployment(PRETRAIN)
    broken = {
        "name": "broken", "flow_id": known["flow_id"], "entrypoint": "flows/nowhere.py:pretrain",
        "tags": known["tags"], "work_pool_name": "perdure", "pull_steps": known["pull_steps"],
        "job_variables": known["job_variables"],
    }  # fmt: skip
    made = ask("POST", f"{api.url}/deployments/", broken).json()
    flow_run = start_flow_run(api, "pretrain/broken", {})
    deployment = api.deployment(KEEP_SUPERVISED)
    api.set_schedule(deployment, active=True)
    try:
        wait_for(
            lambda: flow_run.state["type"] == "FAILED", timeout_s=600, what="the end of the loop",
            period_s=2.0,
        )  # fmt: skip
    finally:
        api.set_schedule(deployment, active=False)
    assert flow_run.state["message"].startswith("given up: "), flow_run.state
    starts = flow_run.states.count("Running") + flow_run.states.count("Crashed")
    assert 5 <= starts <= 8, flow_run.states
    time.sleep(35)
    assert flow_run.state["type"] == "FAILED", "no automation brings it back"
    # A run whose flow run is deleted may be given one of any deployment of this pool.
    ask("DELETE", f"{api.url}/deployments/{made['id']}")


@pytest.mark.timeout(600)
def test_a_flow_run_whose_worker_died_when_it_had_just_taken_it_is_started(bench, deployed, api):
    kill_worker(deployed[-1])
    job = bench.pair("taken", steps=10, env={"PACE_S": "0"})
    flow_run = start_flow_run(api, PRETRAIN, {"job": job})
    flow_run.set_state("PENDING")  # all that the worker has left
    deployed.append(start_worker(bench))
    keep_until(api, "taken: its flow run was Pending, nobody supervised the run")
    assert flow_run.wait_for_end()["name"] == "Completed"
    assert flow_run.states.count("Pending") == 2
    bench.look(job).leave_nothing()


@pytest.mark.timeout(600)
def test_after_a_restart_of_the_server_a_crash_is_answered_within_two_minutes(
    bench, deployed, api, prefect_server, monkeypatch
):
    monkeypatch.setenv("PERDURE_HOME", str(bench.home))
    running, flow_run = begin(bench, api, "restarted-server")
    assert server_process.stop_server()
    server_process.start_server(port=prefect_server.port)
    deployment = api.deployment(KEEP_SUPERVISED)
    api.set_schedule(deployment, active=True)
    try:
        kill_supervisor(running)
        wait_for_epoch(running, 2)
        flow_run.wait_for("Running")
    finally:
        api.set_schedule(deployment, active=False)
    assert supervising(api, running).id == flow_run.id
    finish(running, flow_run)


@pytest.mark.timeout(900)
def test_a_living_attempt_is_taken_up_whatever_has_become_of_its_flow_run(bench, deployed, api):
    running, flow_run = begin(bench, api, "whatever")
    workers = {p.pid for rank in (0, 1) for p in running.local.rank(rank)}
    kill_supervisor(running)
    flow_run.wait_for("Crashed")
    flow_run.set_state("FAILED")  # so that no automation has anything to do
    keep_until(api, "whatever: its flow run was Failed")
    wait_for_epoch(running, 2)
    assert supervising(api, running).id == flow_run.id

    kill_supervisor(running)
    flow_run.wait_for("Crashed")
    flow_run.delete()
    keep_until(api, "it had no flow run to start again")
    wait_for_epoch(running, 3)
    new = supervising(api, running)
    assert new.id != flow_run.id
    assert new.facts["name"] == "whatever"
    assert {p.pid for rank in (0, 1) for p in running.local.rank(rank)} == workers

    kill_supervisor(running)
    new.wait_for("Crashed")
    new.set_state("CANCELLED")  # of a user, while nobody is there to do it
    keep_until(api, "whatever: cancelled while nobody supervised it")
    assert running.history.ended.outcome == "cancelled"
    assert new.state["name"] == "Cancelled"
    running.leave_nothing()


def test_each_tick_of_a_schedule_trains_a_run_of_its_own_and_overlapping_ones_are_skipped(
    bench, deployed, api
):
    job = bench.pair("tick-{date}-{n}", steps=4000, env={"PACE_S": "0.3"})
    del job["env"]["PACE_FILE"]
    with ticking(api, PRETRAIN, {"job": job}, every_s=25) as schedule:
        first, second = wait_for(
            lambda: (found := ticks(api, schedule))[1:] and found[:2], what="two"
        )
        state = second.wait_for_end()
    today = dt.datetime.now(dt.UTC).astimezone(ZoneInfo("Asia/Shanghai")).date()
    name = f"tick-{today}-1"
    assert first.facts["name"] == name
    assert (state["type"], state["name"]) == ("CANCELLED", "Skipped")
    assert state["message"].startswith(f"run {name} is still training")
    running = bench.look({**job, "run_id": name})
    running.reach(2)
    kill_supervisor(running)
    first.wait_for("Crashed")
    first.set_state("SCHEDULED", "AwaitingRetry")
    wait_for_epoch(running, 2)
    assert first.facts["name"] == name, "started again, it is the same run"
    finish(running, first)

    short = {**job, "steps": 4, "env": {"PACE_S": "0"}}
    with ticking(api, PRETRAIN, {"job": short}, every_s=86_400) as schedule:
        third = first_tick(api, schedule)
        assert third.wait_for_end()["name"] == "Completed"
    assert third.facts["name"] == f"tick-{today}-2"
    fixed = {**short, "run_id": third.facts["name"]}
    with ticking(api, PRETRAIN, {"job": fixed}, every_s=86_400) as schedule:
        fourth = first_tick(api, schedule)
        state = fourth.wait_for_end()
    assert state["name"] == "Skipped"
    assert "was completed before" in state["message"]


def test_the_nightly_schedule_trains_as_it_is_in_the_file(bench, deployed, api):
    deployment = api.deployment(PRETRAIN)
    (nightly,) = deployment["schedules"]
    assert (nightly["slug"], nightly["active"]) == ("nightly", False)
    with ticking(api, PRETRAIN, nightly["parameters"], every_s=86_400) as schedule:
        tick = first_tick(api, schedule)
        state = tick.wait_for_end()
    assert (state["type"], tick.facts["name"][:8]) == ("COMPLETED", "nightly-"), state


def test_of_ticks_that_came_due_without_a_worker_the_newest_trains(bench, deployed, api):
    job = bench.pair("late-{n}", steps=4000, env={"PACE_S": "0.3"})
    kill_worker(deployed[0])
    with ticking(api, PRETRAIN, {"job": job}, every_s=10, in_s=3) as schedule:
        time.sleep(30)
        deployed[0] = start_worker(bench)
        running = bench.look({**job, "run_id": "late-1"})
        running.reach(2)
        (trains,) = [tick for tick in ticks(api, schedule) if tick.state["type"] == "RUNNING"]
    earlier = [tick for tick in ticks(api, schedule) if tick.due < trains.due]
    assert len(earlier) >= 2
    assert {tick.wait_for_end()["type"] for tick in earlier} == {"CANCELLED"}
    finish(running, trains)


@pytest.mark.timeout(900)
def test_ticks_of_the_keeper_that_came_due_without_a_worker_are_not_made_up_for(
    bench, deployed, api
):
    kill_worker(deployed[0])

    def ended() -> list[FlowRun]:
        # The newest one may have been due for so short a time that a worker may still take it.
        return [tick for tick in ticks(api, schedule) if tick.state["type"] == "CANCELLED"]

    # The server holds events back that follow a state which is younger than five minutes (3.8.8).
    with ticking(api, KEEP_SUPERVISED, {}, every_s=10, in_s=310) as schedule:
        wait_for(lambda: len(ended()) >= 4, timeout_s=450, period_s=1, what="four late ticks")
    late = ended()
    deployed[0] = start_worker(bench)
    assert keep(api).state["name"] == "NothingToDo"
    for tick in late:
        assert tick.states[-2:] == ["Late", "Cancelled"]
        assert tick.state["message"] == "no worker took it in time"


@pytest.mark.timeout(900)
def test_an_older_flow_run_of_the_same_name_ends_no_living_run(bench, deployed, api):
    running, older = begin(bench, api, "older")
    finish(running, older)
    flow_run = start_flow_run(api, PRETRAIN, {"job": running.job.model_dump(mode="json")})
    running.reach(running.history.committed_step + 3)
    workers = {p.pid for rank in (0, 1) for p in running.local.rank(rank)}
    assert supervising(api, running).id == flow_run.id
    adopted = FlowRun(api, flow_run_named(api, "older"))
    adopted.set_state("CANCELLED", "Adopted")
    assert older.state["name"] == "Cancelled"

    kill_supervisor(running)
    flow_run.wait_for("Crashed")
    flow_run.delete()
    keep_until(api, "it had no flow run to start again")
    wait_for_epoch(running, 3)
    new = supervising(api, running)
    assert new.id not in {older.id, adopted.id, flow_run.id}
    assert {p.pid for rank in (0, 1) for p in running.local.rank(rank)} == workers
    assert (older.state["name"], adopted.state["name"]) == ("Cancelled", "Adopted")
    finish(running, new)


def flow_run_named(api, name) -> str:
    """The id of a new flow run of `pretrain` that nothing starts."""
    flow_id = api.deployment(PRETRAIN)["flow_id"]
    body = {"flow_id": flow_id, "name": name, "state": {"type": "PENDING"}}
    return str(ask("POST", f"{api.url}/flow_runs/", body).json()["id"])


@pytest.mark.timeout(600)
def test_a_flow_run_trains_the_run_that_it_has_taken_although_its_variable_holds_another(
    bench, deployed, api
):
    job = bench.pair("taken-first", steps=4000, env={"PACE_S": "0.3"})
    ask("POST", f"{api.url}/variables/", {"name": "changing", "value": job})
    flow_run = start_flow_run(api, PRETRAIN, {"job": "changing"})
    running = bench.look(job)
    running.reach(3)
    other = bench.pair("taken-never", steps=4000)
    ask("PATCH", f"{api.url}/variables/name/changing", {"value": other})
    kill_supervisor(running)
    flow_run.wait_for("Crashed")
    flow_run.set_state("SCHEDULED", "AwaitingRetry")
    wait_for_epoch(running, 2)
    assert supervising(api, running).id == flow_run.id
    assert flow_run.facts["name"] == "taken-first"
    wait_for(lambda: "goes on with run taken-first" in flow_run.logs, what="the warning")
    flow_run.set_state("CANCELLING")
    assert flow_run.wait_for_end()["name"] == "Cancelled"
    assert running.history.ended.outcome == "cancelled"
    running.leave_nothing()
    assert bench.look(other).history.job is None


@pytest.mark.timeout(600)
def test_a_run_that_cannot_be_helped_keeps_no_other_from_its_supervisor(bench, deployed, api):
    running, flow_run = begin(bench, api, "helped")
    damaged = bench.look(bench.pair("a-damaged"))
    cancelled = FlowRun(api, flow_run_named(api, "a-damaged"))
    own = RunSupervisor(damaged.job, home=bench.home, flow_run=cancelled.id)
    own.take()
    own.ledger.release()
    own.store.put("runs/a-damaged/supervisor.json", b"{")  # it cannot be taken to be taken down
    cancelled.set_state("CANCELLED")
    try:
        time.sleep(40)
        kill_supervisor(running)
        flow_run.wait_for("Crashed")
        flow_run.set_state("FAILED")
        time.sleep(40)
        tick = start_flow_run(api, KEEP_SUPERVISED, {})
        state = tick.wait_for_end()
    finally:
        shutil.rmtree(bench.home / "runs" / "a-damaged")
    assert state["type"] == "FAILED"
    assert "a-damaged: " in state["message"]
    assert "is not a supervisor lease" in state["message"]
    assert "helped: its flow run was Failed" in state["message"]
    wait_for_epoch(running, 2)
    finish(running, flow_run)
