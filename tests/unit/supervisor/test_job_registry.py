"""Runs that were started on this machine, by their name."""

from __future__ import annotations

import os

import pytest

from perdure.training.errors import InputError
from perdure.training.supervisor.job_registry import (
    job_path,
    known_job,
    known_runs,
    mark_ended,
    remember_job,
    unended_runs,
    unmark_ended,
)
from tests.jobs import small_job


def job(run_id):
    return small_job(run_id=run_id)


def test_what_was_started_is_known_by_its_name(tmp_path):
    assert known_runs(tmp_path) == []
    for run_id in ("second", "first"):
        remember_job(tmp_path, job(run_id))
    assert known_runs(tmp_path) == ["first", "second"]
    assert known_job(tmp_path, "first") == job("first")


def test_a_run_that_has_ended_is_known_and_left_out_until_it_is_taken_again(tmp_path):
    for run_id in ("first", "second"):
        remember_job(tmp_path, job(run_id))
    mark_ended(tmp_path, "first")
    assert unended_runs(tmp_path) == ["second"]
    assert known_runs(tmp_path) == ["first", "second"]
    remember_job(tmp_path, job("first"))
    assert unended_runs(tmp_path) == ["first", "second"]
    mark_ended(tmp_path, "second")
    unmark_ended(tmp_path, "second")
    assert unended_runs(tmp_path) == ["first", "second"]


def test_an_unknown_name_is_reported_with_the_known_ones(tmp_path):
    remember_job(tmp_path, job("first"))
    with pytest.raises(InputError, match="'other': no such run on this machine; known: first"):
        known_job(tmp_path, "other")


@pytest.mark.parametrize("content", [b"{", b"{}", b"\xff"])
def test_a_file_without_a_job_is_wrong_input(tmp_path, content):
    remember_job(tmp_path, job("first"))
    job_path(tmp_path, "first").write_bytes(content)
    with pytest.raises(InputError):
        known_job(tmp_path, "first")


def test_a_file_that_cannot_be_read_is_wrong_input(tmp_path):
    job_path(tmp_path, "first").mkdir(parents=True)
    with pytest.raises(InputError, match=r"job\.json: Is a directory"):
        known_job(tmp_path, "first")


def test_a_job_is_there_whole_or_not_at_all(tmp_path):
    remember_job(tmp_path, job("first"))
    old_file = job_path(tmp_path, "first").open()
    remember_job(tmp_path, job("first"))
    with old_file:
        assert job_path(tmp_path, "first").stat().st_ino != os.fstat(old_file.fileno()).st_ino
    assert [path.name for path in job_path(tmp_path, "first").parent.iterdir()] == ["job.json"]
