"""A second flow run of a run that trains follows it to its end, and is no second supervisor."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from tests.process.deployment import (
    KEEP_SUPERVISED,
    PRETRAIN,
    FlowRun,
    kill_supervisor,
    start_flow_run,
    supervising,
)
from tests.process.harness import Running
from tests.process.truth import assert_true
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.process,
    pytest.mark.prefect,
    pytest.mark.long,
    pytest.mark.timeout(600),
]

FOLLOWS = "AlreadySupervised"


def begin(bench, api, run_id, **changes) -> tuple[Running, FlowRun, FlowRun]:
    """A deployed run that trains: itself, the flow run that supervises it, one that follows."""
    job = bench.pair(run_id, **{"steps": 4000, "env": {"PACE_S": "0.3"}, **changes})
    flow_run = start_flow_run(api, PRETRAIN, {"job": job})
    running = bench.look(job)
    running.reach(3)
    follower = start_flow_run(api, PRETRAIN, {"job": job})
    follower.wait_for(FOLLOWS)
    return running, flow_run, follower


def process_of(follower: FlowRun) -> int:
    """The process of a flow run that supervises nothing, as the worker has noted it."""
    return int(follower.facts["infrastructure_pid"].rsplit(":")[-1])


def wait_for_steps(running: Running) -> None:
    before = running.step()
    wait_for(lambda: running.step() > before + 2, what="further steps")


def kill_rank(running: Running) -> None:
    """Kill a rank, and wait for the next attempt or the end of the run."""
    number = len(running.history.attempts)
    for process in running.local.rank(1):
        process.kill()
    wait_for(
        lambda: running.history.ended is not None or len(running.history.attempts) > number,
        what="the answer to a killed rank",
    )


def test_a_flow_run_of_a_run_that_trains_follows_it_and_completes_as_it_completes(
    bench, deployed, api
):
    running, flow_run, follower = begin(bench, api, "followed", steps=60)
    state = follower.state
    assert state["type"] == "RUNNING"
    assert state["message"].startswith("follows run followed to its end, ")
    assert f"/runs/flow-run/{flow_run.id}" in state["message"]
    assert running.history.flow_runs == [flow_run.id], "the follower is not on record"
    running.pace(0)
    ends = [one.wait_for_end() for one in (flow_run, follower)]
    assert [end["type"] for end in ends] == ["COMPLETED", "COMPLETED"]
    assert ends[1]["message"].startswith(f"{ends[0]['message']}; was supervised by flow run ")
    assert follower.states[-3:] == ["Running", FOLLOWS, "Completed"]
    assert running.history.flow_runs == [flow_run.id]
    assert_true(api, running)
    running.leave_nothing()


def test_a_flow_run_that_follows_a_failing_run_fails_with_a_link_to_the_fault_report(
    bench, deployed, api
):
    off = {"in_place": False, "process_replace": False, "process_in_place": False, "pod_retries": 0}
    running, flow_run, follower = begin(
        bench, api, "followed-down", restart={**off, "unconditional": False, "max_restarts": 1}
    )
    for _ in range(4):
        if running.history.ended is not None:
            break
        kill_rank(running)
    ends = [one.wait_for_end() for one in (flow_run, follower)]
    assert [end["type"] for end in ends] == ["FAILED", "FAILED"]
    assert ends[1]["message"].startswith(ends[0]["message"])
    _, _, address = ends[1]["message"].partition("fault report: ")
    key = address.split(";")[0].rpartition("/artifacts/key/")[2]
    assert key in api.artifacts("followed-down-")
    assert "Traceback" not in follower.logs
    running.leave_nothing()


def test_a_follower_and_its_supervisor_crash_and_neither_takes_the_place_of_the_other(
    bench, deployed, api
):
    running, flow_run, follower = begin(bench, api, "followed-on")
    workers = {p.pid for rank in (0, 1) for p in running.local.rank(rank)}
    kill_supervisor(running)
    wait_for(lambda: running.history.epoch == 2, what="the next supervisor")
    assert supervising(api, running).id == flow_run.id
    assert follower.state["name"] == FOLLOWS

    os.kill(process_of(follower), signal.SIGKILL)
    follower.wait_for("Crashed")
    tick = start_flow_run(api, KEEP_SUPERVISED, {})
    assert tick.wait_for_end()["name"] == "NothingToDo"
    if follower.state["type"] == "CRASHED":  # SQLite may have lost the event of the crash (3.8.8)
        follower.set_state("SCHEDULED", "AwaitingRetry")
    follower.wait_for(FOLLOWS)
    assert "it only followed: run followed-on has lost no supervisor" in follower.logs
    assert follower.states.count(FOLLOWS) == 2

    follower.set_state("CANCELLING")
    assert follower.wait_for_end()["name"] == "Cancelled"
    wait_for(lambda: not psutil.pid_exists(process_of(follower)), what="the end of its process")
    wait_for_steps(running)
    assert running.history.ended is None
    assert running.history.epoch == 2
    assert {p.pid for rank in (0, 1) for p in running.local.rank(rank)} == workers
    assert flow_run.state["type"] == "RUNNING"
    running.bench.perdure("cancel", "followed-on")
    assert flow_run.wait_for_end()["name"] == "Cancelled"
    running.leave_nothing()


def test_a_follower_takes_the_run_over_when_nobody_comes_back_for_it(bench, deployed, api):
    running, flow_run, follower = begin(bench, api, "followed-up")
    workers = {p.pid for rank in (0, 1) for p in running.local.rank(rank)}
    kill_supervisor(running)
    flow_run.wait_for("Crashed")
    flow_run.set_state("FAILED")  # no automation brings it back
    wait_for(lambda: running.history.epoch == 2, what="the next supervisor")
    assert supervising(api, running).id == follower.id
    assert (follower.state["type"], follower.state["name"]) == ("RUNNING", "Running")
    assert {p.pid for rank in (0, 1) for p in running.local.rank(rank)} == workers
    wait_for_steps(running)

    follower.set_state("CANCELLING")  # it supervises: this is to cancel the run
    assert follower.wait_for_end()["name"] == "Cancelled"
    assert running.history.ended is not None
    assert running.history.ended.outcome == "cancelled"
    running.leave_nothing()
