"""Jobs that the Prefect server keeps: what a pod learns of runs that it has not begun itself."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import ArtifactCollection

from perdure.tasks.remote_jobs import _note, artifact_of, is_kept
from perdure.training.config.job import Job, parse_job
from perdure.training.supervisor.job_registry import known_job, known_runs, mark_ended, unended_runs
from tests.jobs import small_job

NOW = datetime(2026, 11, 24, tzinfo=UTC)
ID = uuid4()


def cluster_job(tmp_path, **changes) -> Job:
    document = small_job(tmp_path, **changes).model_dump(mode="json")
    return parse_job({**document, "engine": {"kind": "kubernetes", "image": "perdure"}})


def kept(
    job: Job, epoch: int = 1, *, key: str | None = None, artifact_id: UUID = ID, later_s: float = 0
) -> ArtifactCollection:
    """As the server gives it back."""
    made = artifact_of(job, epoch)
    return ArtifactCollection(
        key=key or f"{job.run_id}-{made.name}",
        latest_id=artifact_id,
        updated=NOW + timedelta(seconds=later_s),
        **made.document,
    )


def test_a_job_comes_back_from_the_server_as_it_was_taken(tmp_path):
    job = cluster_job(tmp_path)
    _note(tmp_path, kept(job))
    assert known_job(tmp_path, "run") == job
    assert unended_runs(tmp_path) == ["run"]


def test_a_run_that_was_seen_to_end_is_looked_at_again_when_a_supervisor_has_taken_it(tmp_path):
    job = cluster_job(tmp_path)
    _note(tmp_path, kept(job))
    mark_ended(tmp_path, "run")
    _note(tmp_path, kept(job))
    assert unended_runs(tmp_path) == [], "the same as before is no news"
    _note(tmp_path, kept(job, 2, later_s=60))
    assert unended_runs(tmp_path) == ["run"]


def test_the_newest_settings_of_a_run_are_taken(tmp_path):
    _note(tmp_path, kept(cluster_job(tmp_path)))
    _note(tmp_path, kept(cluster_job(tmp_path, steps=7), 2, artifact_id=uuid4()))
    assert known_job(tmp_path, "run").steps == 7


def test_runs_whose_nodes_are_of_one_machine_are_left_to_it(tmp_path):
    job = small_job(tmp_path)
    assert not is_kept(job)
    assert is_kept(cluster_job(tmp_path))
    _note(tmp_path, kept(job))
    assert known_runs(tmp_path) == []


@pytest.mark.parametrize("data", [None, "no job", "```json\n{]\n```", '```json\n{"steps": 1}\n```'])
def test_an_artifact_that_holds_no_job_of_this_version_teaches_nothing(tmp_path, data):
    other = kept(cluster_job(tmp_path)).model_copy(update={"data": data})
    _note(tmp_path, other)
    assert known_runs(tmp_path) == []


def test_an_artifact_of_another_run_with_such_a_name_is_not_taken_for_it(tmp_path):
    _note(tmp_path, kept(cluster_job(tmp_path), key="another-job"))
    assert known_runs(tmp_path) == []
