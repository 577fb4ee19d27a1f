"""The job that the parameters of a flow run stand for."""

from __future__ import annotations

from typing import Any

import pytest
from prefect import flow

from perdure.tasks.job_parameter import JobParameter, template_of
from perdure.training.config.job import JobTemplate, parse_job
from perdure.training.errors import InputError, PerdureError

JOB: dict[str, Any] = {
    "run_id": "nightly-{date}",
    "storage": {"address": "file:///store"},
    "steps": 100,
    "worker": {"command": ["true"]},
}


def test_steps_and_nodes_take_the_place_of_the_jobs_and_leave_the_rest():
    job = {**JOB, "engine": {"kind": "local", "nodes": 2, "spares": 3}}
    template = template_of({"job": job, "steps": 7, "nodes": 4})
    assert (template.steps, template.engine.nodes, template.engine.spares) == (7, 4, 3)
    assert template.run_id == "nightly-{date}"
    untouched = template_of({"job": job, "steps": None, "nodes": None})
    assert (untouched.steps, untouched.engine.nodes) == (100, 2)
    assert template_of({"job": JOB, "nodes": 3}).engine.nodes == 3


def test_a_job_that_was_validated_before_is_taken_too():
    job = parse_job({**JOB, "run_id": "one"})
    assert template_of({"job": job, "steps": 9}) == JobTemplate.of(
        job.model_copy(update={"steps": 9})
    )


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "job: is missing: give the flow run"),
        ({"job": None, "steps": 3}, "job: is missing"),
        ({"job": ["a", "list"]}, "job: is missing"),
        ({"job": JOB, "steps": 0}, "steps: 0: "),
        ({"job": JOB, "nodes": "two"}, r"engine\.(local\.)?nodes: .two.: "),
    ],
)
def test_what_cannot_be_is_refused_with_its_field(parameters, message):
    with pytest.raises(InputError, match=message):
        template_of(parameters)


TOKEN = "hf_abcdefghijklmnopqrstuvwx"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"env": [{"name": "X", "value": TOKEN}]}, "job.env: must be a section of variables"),
        ({"env": {"X": [TOKEN]}}, "job.env.X: must be a text"),
        ({"env": {"X": TOKEN}, "steps": 0}, "job.steps: 0: "),
        ({"env": {"X": TOKEN}, "env_from": {"X": {"file": "/a"}}}, "job: X is in env and in env_f"),
    ],
)
def test_a_flow_that_is_given_a_wrong_job_shows_no_value_of_a_variable(caplog, changes, words):
    @flow
    def takes_a_job(job: JobParameter) -> None:
        """Only its parameter counts."""

    with pytest.raises(PerdureError, match=words) as refused:
        takes_a_job.validate_parameters({"job": {**JOB, "run_id": "one", **changes}})
    assert not isinstance(refused.value, ValueError)
    assert TOKEN not in str(refused.value) + caplog.text
    with pytest.raises(InputError) as of_template:
        template_of({"job": {**JOB, **changes}})
    assert TOKEN not in str(of_template.value)


def test_a_text_that_can_be_no_name_of_a_variable_is_not_shown():
    with pytest.raises(InputError, match="no name of a Prefect Variable") as refused:
        template_of({"job": f'{{"env": {{"X": "{TOKEN}"}}}}'})
    assert TOKEN not in str(refused.value)
