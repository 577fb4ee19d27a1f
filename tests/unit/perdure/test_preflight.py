"""`perdure preflight` of a job for a cluster: what is wrong with its values is one line."""

from __future__ import annotations

import json

import pytest

from tests.jobs import job_document
from tests.unit.perdure.commands import error_line


@pytest.fixture
def job_file(tmp_path):
    def write(**section):
        engine = {"kind": "kubernetes", "image": "perdure:1", **section}
        path = tmp_path / "job.yaml"
        storage = {"address": "s3://bucket/runs"}
        path.write_text(json.dumps(job_document(tmp_path, engine=engine, storage=storage)))
        return path

    return write


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({"resources": {"cpu": "two"}}, "engine.resources: cpu: 'two' is no quantity"),
        ({"pod": {"spec": {"restartPolicy": "Always"}}}, "spec.restartPolicy cannot be replaced"),
        ({"labels": {"perdure.io/run": "x"}}, "'perdure.io/run' is the engine's own"),
    ],
)
def test_a_wrong_value_of_the_engine_section_ends_it_with_2(capsys, job_file, section, line):
    assert line in error_line(capsys, "preflight", job_file(**section))


def test_a_context_that_is_not_there_ends_it_with_2(capsys, job_file, tmp_path, monkeypatch):
    empty = tmp_path / "kubeconfig"
    known = {"apiVersion": "v1", "kind": "Config", "clusters": [], "users": [], "contexts": []}
    empty.write_text(json.dumps(known))
    monkeypatch.setenv("KUBECONFIG", str(empty))
    assert "engine.context: 'mars'" in error_line(capsys, "preflight", job_file(context="mars"))


def test_reentry_is_tried_where_the_program_is_started(capsys, job_file):
    line = error_line(capsys, "preflight", job_file(), "--reentry")
    assert line.endswith(
        "--reentry: starts the program on this machine, but the job's nodes are elsewhere"
    )


def test_devices_take_no_job_and_a_job_is_needed_otherwise(capsys, job_file):
    assert "takes no job" in error_line(capsys, "preflight", job_file(), "--device")
    assert "give a job file, or --device" in error_line(capsys, "preflight")
