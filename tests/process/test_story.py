"""What the server shows of a run is what its ledger says, also when its supervisor died."""

from __future__ import annotations

import signal
from collections import Counter
from datetime import datetime

import pytest

from perdure.tasks.artifacts import GOES_ON
from perdure.training.recovery.rungs import RUNGS
from tests.process.rest import ask
from tests.process.test_restart_policy import states
from tests.process.truth import assert_true, task_runs
from tests.waiting import wait_for

pytestmark = [pytest.mark.process, pytest.mark.prefect]


def versions(api, name: str) -> Counter[tuple[str, str]]:
    """How many artifacts there are by flow run and key."""
    body = {"artifacts": {"key": {"like_": f"{name}-"}}, "limit": 200}
    found = ask("POST", f"{api.url}/artifacts/filter", body).json()
    return Counter((one["flow_run_id"], one["key"]) for one in found)


def assert_goes_on_elsewhere(api, flow_run_id: str) -> None:
    """That every artifact of a flow run says that the run goes on in another one."""
    body = {"artifacts": {"flow_run_id": {"any_": [flow_run_id]}}, "limit": 200}
    found = ask("POST", f"{api.url}/artifacts/filter", body).json()
    assert found
    assert all(one["description"].startswith(GOES_ON) for one in found)


@pytest.mark.long
def test_after_the_death_of_a_supervisor_nothing_stays_open_and_nothing_is_double(bench, api):
    name = "adopted-late"
    job = bench.pair(name, steps=40, restart={"process_replace": False})
    first = bench.start(job)
    first.reach(12)
    wait_for(lambda: f"{name}-attempts" in api.artifacts(f"{name}-"), what="a table")
    first.pace(2.0)
    first.kill_supervisor()
    second = bench.start(job)
    wait_for(lambda: second.history.epoch == 2, what="the adoption")
    wait_for(
        lambda: "Adopted" in {one["state_name"] for one in task_runs(api, name)},
        what="the end of its task runs",
    )
    assert len(second.local.kill_rank(1)) == 1
    second.pace(0)
    wait_for(lambda: len(second.history.attempts) == 2, what="the second attempt")
    second.complete()
    assert second.rungs() == ["in_place_restart"], "the fault fired"

    assert_true(api, second)
    states = {one["name"]: one["state"] for one in task_runs(api, name)}
    left = states["attempt 1.1 from step 0"]
    assert (left["type"], left["name"]) == ("CANCELLED", "Adopted")
    assert "went on and was adopted by supervisor 2" in left["message"]
    assert states["attempt 1.1 (adopted)"]["name"] == "RestartInPlace"
    assert set(versions(api, name).values()) == {1}
    assert_goes_on_elsewhere(api, api.flow_runs(name)[-1]["id"])
    (flow_run, former) = api.flow_runs(name)
    assert former["state"]["name"] == "Adopted"
    assert flow_run["id"] in former["state"]["message"]
    message = flow_run["state"]["message"]
    for part in ("step 40 reached", "2 attempts on 1 placement", "1 native_crash", "ETTR "):
        assert part in message


def test_events_of_an_attempt_that_ended_have_class_node_and_the_time_of_the_fault(broken, api):
    """On the run that others look at, too."""
    body = {"event": {"name": ["perdure.recovery"]}, "resource": {"id": ["perdure.run.main-job"]}}
    events = ask("POST", f"{api.url}/events/filter", {"filter": body}).json()["events"]
    lost = next(one for one in events if one["payload"]["fault_class"] == "node_lost")
    assert lost["resource"]["perdure.fault_class"] == "node_lost"
    assert lost["resource"]["perdure.node"] == "node-1"
    body["event"]["name"] = ["perdure.fault"]
    events = ask("POST", f"{api.url}/events/filter", {"filter": body}).json()["events"]
    occurred = {
        one["payload"]["fault_class"]: datetime.fromisoformat(one["occurred"]).timestamp()
        for one in events
    }
    faults = [v.ended.fault for v in broken.history.attempts if v.ended and v.ended.fault]
    assert {fault.fault_class.value for fault in faults} == {"hang", "node_lost"}
    for fault in faults:
        assert occurred[fault.fault_class] == pytest.approx(fault.at_s, abs=0.01)


def test_artifacts_are_changed_without_an_event(broken, api):
    body = {"event": {"name": ["prefect.artifact.updated"]}}
    events = ask("POST", f"{api.url}/events/filter", {"filter": body}).json()["events"]
    assert events == []


def test_a_finished_run_is_told_as_its_ledger_has_it(broken, api):
    assert_true(api, broken)
    for view in broken.history.attempts[:-1]:
        (name,) = [
            name for name in api.task_runs("main-job") if "attempt {}.{} ".format(*view.key) in name
        ]
        passed = states(api, "main-job", name)
        assert passed[:3] == ["Pending", "Running", "Undecided"], "the hook has decided"
        assert passed[3:] == [RUNGS[view.decision.rung].state_name]
    (flow_run,) = api.flow_runs("main-job")
    message = flow_run["state"]["message"]
    assert "faults: 1 hang, 1 native_crash and 1 node_lost" in message
    assert "isolated: node-1" in message
    logs = "\n".join(api.logs("main-job"))
    assert "NoneType: None" not in logs
    assert "Retry 1/" not in logs
    assert logs.count("attempt 1.2 ended: node_lost on node-1") == 1


@pytest.mark.long
@pytest.mark.parametrize("how", ["cancel", "interrupt"])
def test_a_run_that_is_cancelled_in_the_middle_of_a_recovery_keeps_its_story(bench, api, how):
    name = f"stopped-by-{how}"
    engine = {"nodes": 2, "slots_per_node": 1, "spares": 0, "grace_s": 10}
    restart = {"pod_retries": 1, "spare_wait_s": 600, "node_replace": False}
    running = bench.start(bench.apart(name, engine=engine, restart=restart))
    running.reach(12)
    assert running.local.kill_node("node-1")
    wait_for(lambda: running.history.isolated, what="the isolation of node-1")
    if how == "cancel":
        api.cancel(name)
    else:
        assert running.process is not None
        running.process.send_signal(signal.SIGINT)
    assert running.finish(hurry=False) == 1
    history = running.history
    assert history.ended is not None
    assert history.ended.outcome == "cancelled"
    assert history.isolated == ("node-1",)
    assert_true(api, running)
    shown = api.artifacts(f"{name}-")
    assert "Node node-1 is isolated" in shown[f"{name}-needs-you"]["data"]
    assert "(not mended)" in shown[f"{name}-fault-p1-a1"]["description"]
    assert "No, the run was cancelled first" in shown[f"{name}-fault-p1-a1"]["data"]
    assert f"{name}-loss" in shown
    running.leave_nothing()
