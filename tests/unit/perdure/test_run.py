"""`perdure run` checks its job once, and its flow run relies on that."""

from __future__ import annotations

from collections import Counter

import pytest
import yaml
from prefect.logging import disable_run_logger
from prefect.states import Completed

from perdure.storage.address import StorageSpec
from perdure.tasks.pretrain import preflight
from perdure.training.config.job import parse_job
from perdure.training.preflight import job as job_checks
from tests.jobs import job_document
from tests.unit.perdure.commands import perdure


@pytest.fixture
def checks(monkeypatch):
    """How often each half of the check was made."""
    counts: Counter[str] = Counter()

    def count(name):
        real = getattr(job_checks, name)

        def counted(*arguments):
            counts[name] += 1
            return real(*arguments)

        monkeypatch.setattr(job_checks, name, counted)

    count("check_without_store")
    count("_check_storage")
    return counts


@pytest.fixture
def run_command(monkeypatch, tmp_path):
    """`perdure run` of a job, with the engine of Prefect left out of its flow run."""

    def flow(template, *, return_state):
        assert return_state
        with disable_run_logger():
            preflight.fn(template.named(template.run_id))
        return Completed(message="trained")

    def command(job, *options):
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(job))
        return perdure("run", path, *options)

    monkeypatch.setattr("perdure.server.use_server", lambda **_: "http://127.0.0.1:1")
    monkeypatch.setattr("perdure.flows.pretrain.pretrain", flow)
    return command


@pytest.fixture
def job(tmp_path):
    return job_document(tmp_path, run_id="small", steps=20, worker={"command": ["true"]})


ONCE = {"check_without_store": 1, "_check_storage": 1}


def test_a_job_is_checked_once_by_the_command_and_its_flow_run(run_command, job, checks):
    assert "completed: trained" in run_command(job, "--set", "steps=30")
    assert checks == ONCE


def test_a_job_whose_keys_are_in_a_block_is_checked_once_as_well(
    run_command, job, checks, monkeypatch
):
    asked: list[StorageSpec] = []
    monkeypatch.setattr("perdure.tasks.credentials.credentials_of", asked.append)
    monkeypatch.setattr("perdure.tasks.supervision.credentials_of", asked.append)
    monkeypatch.setattr("perdure.tasks.runs.credentials_of", asked.append)
    run_command({**job, "storage": {**job["storage"], "credentials_block": "keys"}})
    assert asked
    assert checks == ONCE


def test_a_flow_run_of_another_process_checks_its_job_itself(job, checks):
    with disable_run_logger():
        assert preflight.fn(parse_job(job)).job == parse_job(job)
    assert checks == ONCE


def test_a_flow_run_checks_a_job_that_differs_from_the_one_of_the_command(
    run_command, job, checks, monkeypatch
):
    def flow(template, **_):
        with disable_run_logger():
            preflight.fn(template.named(template.run_id).model_copy(update={"steps": 5}))
        return Completed()

    monkeypatch.setattr("perdure.flows.pretrain.pretrain", flow)
    run_command(job)
    assert checks == dict.fromkeys(ONCE, 2)
