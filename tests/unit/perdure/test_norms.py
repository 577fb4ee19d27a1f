"""`perdure status RUN --norms`: a threshold from the run's own gradient norms."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from perdure.storage.address import open_store
from perdure.training.journal.events import StepRecord
from perdure.training.journal.steps import metrics_prefix
from perdure.training.supervisor.job_registry import remember_job
from perdure.training.supervisor.run_handle import RunHandle
from tests.jobs import small_job
from tests.unit.journal.histories import BEGINNING
from tests.unit.perdure.commands import append, error_line, perdure


@pytest.fixture
def put_steps(tmp_path, perdure_home):
    job = small_job(tmp_path, run_id="small", restart={"abnormal_grad_norm": 9.0})
    remember_job(perdure_home, job)
    append(RunHandle(job, home=perdure_home), *BEGINNING)

    def put(num_steps: int) -> None:
        steps = [
            StepRecord(step, 2.0, 1.0 + step % 10 / 10, 1e-3, 1.0, None, 1.0, 0.5, 8, 0, 1, 1)
            for step in range(1, num_steps + 1)
        ]
        lines = "".join(json.dumps(asdict(step)) + "\n" for step in steps)
        key = f"{metrics_prefix('small', 1, 1)}{1:08d}-{num_steps:08d}.jsonl"
        open_store(job.storage).put(key, lines.encode())

    return put


def test_the_proposal_names_field_value_and_picture(put_steps, perdure_home):
    put_steps(400)
    document = json.loads(perdure("status", "small", "--norms", "--json"))
    assert (document["quantile"], document["threshold"], document["present"]) == (1.9, 3.8, 9.0)
    picture = perdure_home / "runs" / "small" / "norms.png"
    assert document["picture"] == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = perdure("status", "small", "--norms")
    assert "restart: {abnormal_grad_norm: 3.8}" in text
    assert "0 of these steps would be abnormal" in text


def test_too_few_steps_and_no_run_are_one_line(put_steps, capsys):
    put_steps(50)
    line = error_line(capsys, "status", "small", "--norms")
    assert "gradient norms of 50 steps, at least 100" in line
    assert "--norms needs the name of a run" in error_line(capsys, "status", "--norms")
