"""Automations on faults: a real server acts for the class that was asked for, and for no other."""

from __future__ import annotations

import logging
import time
from uuid import UUID, uuid4

import pytest
from prefect.events.actions import SuspendFlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings

from perdure.flows.automations import automations, ensure, on_fault, put
from perdure.tasks.reporting import Reporter
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.rungs import Decision, Rung
from perdure.training.reporting.rows import fault_facts
from tests.process.rest import Api, ask
from tests.unit.journal.histories import failed
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.process,
    pytest.mark.prefect,
    # The flow that would create them is not there.
    pytest.mark.filterwarnings("ignore:Artifact creation outside of a flow:FutureWarning"),
]


@pytest.fixture
def api(prefect_server):
    with temporary_settings({PREFECT_API_URL: prefect_server.api_url}):
        yield Api(prefect_server.api_url)


def start_flow_run(api) -> UUID:
    """A flow run of a deployment that is running, as far as the server knows."""
    flow = ask("POST", f"{api.url}/flows/", {"name": "automations"}).json()
    body = {"flow_id": flow["id"], "name": "local", "entrypoint": "perdure.flows.pretrain.pretrain"}
    deployment = ask("POST", f"{api.url}/deployments/", body).json()
    made = ask("POST", f"{api.url}/deployments/{deployment['id']}/create_flow_run", {}).json()
    for state in ("PENDING", "RUNNING"):
        url = f"{api.url}/flow_runs/{made['id']}/set_state"
        ask("POST", url, {"state": {"type": state}})
    return UUID(made["id"])


def state_of(api, flow_run: UUID) -> str:
    return ask("GET", f"{api.url}/flow_runs/{flow_run}").json()["state"]["name"]


def fail(run_id: str, flow_run: UUID, *classes: FaultClass) -> None:
    """Report faults of a run to the server, as its supervisor does."""
    reporter = Reporter(run_id, flow_run, logging.getLogger("test"))
    reporter.start()
    for number, fault_class in enumerate(classes, 1):
        fault = Fault(fault_class, time.time(), "made by a test", node="node-1", step=7)
        decision = Decision(Rung.IN_PLACE_RESTART, None, "a test")
        view = failed(fault, decision, number=number)
        reporter.event("fault", fault_facts(view, fault), at_s=fault.at_s)
    reporter.close()


def seen(api, run_id: str) -> list[str]:
    """Classes of the faults that the server knows."""
    return [fault["fault_class"] for fault in api.events(run_id, "fault")]


def wait_for_suspension(api, flow_run: UUID) -> None:
    wait_for(
        lambda: state_of(api, flow_run) == "Suspended", timeout_s=60, what="the automation to act"
    )


def test_an_automation_answers_the_class_it_is_for_and_no_other(api):
    run_id, last = f"automated-{uuid4().hex[:8]}", f"last-{uuid4().hex[:8]}"
    flow_run, flow_run_of_last = start_flow_run(api), start_flow_run(api)
    suspend = [SuspendFlowRun()]
    named = put([on_fault(FaultClass.NODE_LOST, suspend, run_id=run_id)])
    assert named == {"automations": f"perdure: node_lost in {run_id}"}
    put([on_fault(FaultClass.NODE_LOST, suspend, run_id=last)])

    fail(run_id, flow_run, FaultClass.NATIVE_CRASH, FaultClass.HANG)
    wait_for(lambda: len(seen(api, run_id)) == 2, timeout_s=60, what="two faults on the server")
    fail(f"{run_id}-other", flow_run, FaultClass.NODE_LOST)
    wait_for(lambda: seen(api, f"{run_id}-other"), timeout_s=60, what="a fault of another run")
    # Events are answered in their order: once the last one is, so were those before it.
    fail(last, flow_run_of_last, FaultClass.NODE_LOST)
    wait_for_suspension(api, flow_run_of_last)
    time.sleep(1.0)
    assert state_of(api, flow_run) == "Running", "another class, and the class in another run"

    fail(run_id, flow_run, FaultClass.NODE_LOST)
    wait_for_suspension(api, flow_run)


def test_an_automation_that_is_put_again_is_changed_and_not_doubled(api):
    for _ in range(2):
        put([on_fault(FaultClass.HANG, [SuspendFlowRun()], run_id="twice")])
    found = ask("POST", f"{api.url}/automations/filter", {}).json()
    named = [one["name"] for one in found if one["name"] == "perdure: hang in twice"]
    assert len(named) == 1


def test_what_is_deployed_again_unchanged_is_not_touched(api):
    """An update makes the server count anew, and act once more for what it has acted for."""

    def updated() -> dict[str, str]:
        found = ask("POST", f"{api.url}/automations/filter", {}).json()
        names = {one.name for one in automations()}
        return {one["name"]: one["updated"] for one in found if one["name"] in names}

    ensure()
    before = updated()
    assert len(before) == len(automations())
    ensure()
    assert updated() == before
