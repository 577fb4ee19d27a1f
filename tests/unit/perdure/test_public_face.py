"""The names that a program imports from `perdure`, as its author uses them."""

from __future__ import annotations

import inspect

import pytest
import yaml

import perdure
from perdure.training.errors import InputError
from tests.jobs import job_document


def test_a_job_file_is_read_and_overridden(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_document(tmp_path, steps=5)))
    job = perdure.load_job(str(path), ["steps=7", "batch.global_batch_size=16"])
    assert isinstance(job, perdure.Job)
    assert (job.run_id, job.steps, job.batch.global_batch_size) == ("run", 7, 16)
    with pytest.raises(InputError, match="step: no such field; did you mean steps"):
        perdure.load_job(path, ["step=7"])


def test_a_layout_of_a_programs_own_groups_says_how_many_ranks_it_has():
    layout = perdure.ParallelLayout(dp=2, tp=2, pp=3)
    assert layout.world_size == 12
    with pytest.raises(ValueError, match="tp=0 must be 1 or more"):
        perdure.ParallelLayout(tp=0)


def test_a_program_that_joins_outside_of_a_run_is_told_how_to_start_it(monkeypatch):
    monkeypatch.delenv("PERDURE_JOB", raising=False)
    with pytest.raises(InputError) as refused:
        perdure.join()
    assert "perdure run" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert perdure.Session.current is None


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'perdure' has no attribute 'jion'"):
        _ = perdure.jion


@pytest.mark.parametrize("name", perdure.__all__)
def test_every_public_name_is_listed_and_says_what_it_is(name):
    assert name in dir(perdure)
    assert inspect.getdoc(getattr(perdure, name))
