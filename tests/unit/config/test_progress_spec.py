"""`worker.progress` of a job: what is refused, and in which words."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.training.config.job import parse_job
from perdure.training.errors import InputError
from tests.jobs import job_document


def refused(**progress: Any) -> str:
    document = job_document(worker={"command": ["true"], "progress": progress})
    with pytest.raises(InputError) as caught:
        parse_job(document)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_job_with_a_format_comes_back_from_its_own_text():
    worker = {"command": ["true"], "progress": {"kind": "nanogpt"}}
    job = parse_job(job_document(worker=worker))
    assert parse_job(job.model_dump(mode="json")) == job


def test_a_format_or_patterns_must_be_given():
    wanted = "give either kind, one of megatron, transformers, lightning, nanogpt, torchtitan"
    assert wanted in refused()
    assert wanted in refused(kind="nanogpt", patterns=[r"(?P<step>\d+)"])


def test_a_pattern_that_is_no_expression_is_named():
    assert r"worker.progress.patterns: '(?P<step>\\d+' is no regular expression" in refused(
        patterns=[r"(?P<step>\d+"]
    )


def test_a_group_that_is_not_known_is_named():
    text = refused(patterns=[r"(?P<step>\d+) (?P<los>\S+)"])
    assert "has the group 'los', which must be one of step, target, loss" in text


def test_patterns_without_a_step_are_refused():
    assert "none has a group (?P<step>...)" in refused(patterns=[r"loss (?P<loss>\S+)"])
    assert "has no named group" in refused(patterns=[r"loss \S+"])


def test_a_known_format_counts_as_it_does():
    assert "kind=nanogpt has its own" in refused(kind="nanogpt", counts_from=1)


def test_a_recipe_has_no_progress_to_be_read():
    document = job_document(worker={"recipe": "a:b", "progress": {"kind": "nanogpt"}})
    with pytest.raises(InputError, match=r"progress is for worker\.command"):
        parse_job(document)
