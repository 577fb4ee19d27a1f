"""The job as a parameter: what the server refuses, and jobs by the name of a Prefect Variable."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.variables import Variable

from perdure.flows.pretrain import pretrain
from tests.process.rest import Api, ask
from tests.waiting import apart

pytestmark = [pytest.mark.process, pytest.mark.prefect]

JOB = {"run_id": "refused", "storage": {"address": "file:///nowhere"}}


@pytest.fixture(scope="module")
def deployment(api) -> dict:
    """The pretrain flow as the server knows it once it is deployed; no worker serves it."""
    with temporary_settings({PREFECT_API_URL: api.url}):
        made: Any = apart(lambda: pretrain.to_deployment(name="parameters"))
        apart(made.apply)
    return api.deployment("pretrain/parameters")


def refusal(api: Api, deployment: dict, parameters: dict) -> str:
    """Why the server makes no flow run with these parameters; "" when it does."""
    url = f"{api.url}/deployments/{deployment['id']}/create_flow_run"
    answer = httpx.post(url, json={"parameters": parameters}, timeout=240)
    if answer.status_code == 409:
        return str(answer.json()["detail"])
    made = answer.raise_for_status().json()
    ask("DELETE", f"{api.url}/flow_runs/{made['id']}")
    return ""


@pytest.mark.parametrize(
    ("parameters", "field", "reason"),
    [
        ({}, "", "'job' is a required property"),
        ({"job": JOB, "steps": 0}, "'steps'", "0 is less than the minimum of 1"),
        ({"job": {**JOB, "steps": 0}}, "'job.steps'", "0 is less than the minimum of 1"),
        ({"job": {**JOB, "stepps": 9}}, "'job'", "'stepps' was unexpected"),
        ({"job": {**JOB, "run_id": "No_Name"}}, "'job.run_id'", "does not match"),
        ({"job": {"run_id": "x"}}, "'job'", "'storage' is a required property"),
        ({"job": {**JOB, "precision": "fp8"}}, "'job.precision'", "is not one of"),
        ({"job": {**JOB, "optimizer": {"lr": -1}}}, "'job.optimizer.lr'", "-1 is less than"),
        (
            {"job": {**JOB, "engine": {"nodes": "two"}}},
            "'job.engine",
            "{'nodes': 'two'} is not valid",
        ),
        ({"job": "No Such"}, "'job'", "does not match"),
    ],
)
def test_what_the_server_can_know_to_be_wrong_makes_no_flow_run(
    api, deployment, parameters, field, reason
):
    why = refusal(api, deployment, parameters)
    assert field in why
    assert reason in why


@pytest.mark.parametrize("given", [JOB, "llama-8b", {**JOB, "run_id": "nightly-{date}"}])
def test_a_job_in_full_and_the_name_of_one_are_taken(api, deployment, given):
    assert refusal(api, deployment, {"job": given, "steps": 20, "nodes": 2}) == ""


def fields_in_order(schema: dict) -> list[str]:
    """The fields of a section as the forms of both UIs order them."""
    properties = schema["properties"]
    return sorted(properties, key=lambda name: properties[name]["position"])


def test_the_form_begins_with_what_has_no_default_whatever_order_the_database_keeps(deployment):
    schema = deployment["parameter_openapi_schema"]
    assert fields_in_order(schema) == ["job", "steps", "nodes"]
    sections = schema["definitions"]
    assert fields_in_order(sections["JobTemplate"])[:4] == ["run_id", "storage", "steps", "seed"]
    assert fields_in_order(sections["StorageSpec"])[0] == "address"
    assert sections["JobTemplate"]["properties"]["storage"]["title"] == "storage"
    numbered = [s for s in sections.values() if "properties" in s]
    assert len(numbered) > 10
    for section in numbered:
        assert len(fields_in_order(section)) == len(section["properties"])


def with_variable(api: Api, name: str, value: Any) -> None:
    with temporary_settings({PREFECT_API_URL: api.url}):
        apart(lambda: Variable.set(name, value, overwrite=True))


def started(bench, **parameters) -> tuple[int, str]:
    """The flow, started in a process of its own with these parameters; how its process ended."""
    program = (
        "import json, sys; from perdure.flows.pretrain import pretrain\n"
        "state = pretrain(**json.loads(sys.argv[1]), return_state=True)\n"
        "print(state.name, state.message)\n"
    )
    done = bench.python("-c", program, json.dumps(parameters))
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("nobody", None, "job: 'nobody': there is no such Prefect Variable"),
        ("a-text", "not a job", "job: 'a-text': this Prefect Variable holds no job"),
        ("a-list", ["not", "a", "job"], "job: 'a-list': this Prefect Variable holds no job"),
        ("half", {"run_id": "half"}, "storage: is missing"),
        ("uneven", {**JOB, "steps": 3, "worker": {"command": ["true"]}}, "steps"),
    ],
)
def test_a_variable_that_holds_no_job_fails_the_flow_run_in_one_line(
    bench, api, name, value, reason
):
    if value is not None:
        with_variable(api, name, value)
    _, out = started(bench, job=name, steps=-1 if name == "uneven" else None)
    (line,) = [one for one in out.splitlines() if one.startswith("Failed ")]
    assert reason in line
    assert "Traceback" not in out


@pytest.mark.long
def test_a_secret_in_a_variable_is_refused_and_not_shown(bench, api):
    job = {**bench.pair("leaky"), "env": {"HF_TOKEN": "hf_thisisasecretvalue0123456789abcdef"}}
    with_variable(api, "leaky", job)
    _, out = started(bench, job="leaky")
    assert "HF_TOKEN" in out
    assert "env_from" in out
    assert "hf_thisisasecret" not in out
    assert bench.look({**job, "env": {}}).history.job is None, "nothing was put on record"


@pytest.mark.long
@pytest.mark.parametrize(
    ("flow", "env"),
    [
        ("perdure.flows.pretrain:pretrain", [{"name": "HF_TOKEN", "value": "hf_thisisasecret"}]),
        ("perdure.flows.pretrain:prepare", [{"name": "HF_TOKEN", "value": "hf_thisisasecret"}]),
        ("perdure.flows.retention:retain", {"HF_TOKEN": ["hf_thisisasecret"]}),
    ],
)
def test_a_secret_in_an_env_of_the_wrong_shape_is_in_no_line_of_a_flow(bench, api, flow, env):
    with_variable(api, "misshapen", {**bench.pair("misshapen"), "env": env})
    module, name = flow.split(":")
    program = (
        f"from {module} import {name}\n"
        f"state = {name}(job='misshapen', return_state=True)\n"
        "print(state.name, state.message)\n"
    )
    done = bench.python("-c", program)
    out = done.stdout + done.stderr
    assert any(line.startswith("Failed ") for line in out.splitlines()), out
    assert "env: must be a section" in out or "env.HF_TOKEN: must be a text" in out
    assert "hf_thisisasecret" not in out
