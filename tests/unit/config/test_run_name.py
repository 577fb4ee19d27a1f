"""Names of scheduled runs: each tick has one, and a flow run that starts again keeps it."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from perdure.training.config.job import JobTemplate, parse_job, parse_template
from perdure.training.config.run_name import NAME, TEMPLATE, is_of, is_template, name_of, problem_of
from perdure.training.errors import InputError
from tests.jobs import job_document

DUE = datetime(2026, 11, 23, 18, 0, tzinfo=UTC)


def named(template: str, *known: str, now_named: str = "fuzzy-otter", due: datetime = DUE) -> str:
    return name_of(template, due=due, run_names=known, now_named=now_named)


def test_a_name_without_fields_is_the_name():
    assert named("nightly", "nightly") == "nightly"
    assert not is_template("nightly")


def test_date_and_time_are_those_at_which_the_tick_was_due_in_the_zone_of_its_schedule():
    assert named("nightly-{date}") == "nightly-2026-11-23"
    there = DUE.astimezone(ZoneInfo("Asia/Shanghai"))
    assert named("nightly-{date}-{time}", due=there) == "nightly-2026-11-24-0200"


def test_a_number_is_one_more_than_the_highest_known():
    assert named("exp-{n}") == "exp-1"
    assert named("exp-{n}", "exp-2", "exp-10", "other-99", "exp-11-b") == "exp-11"
    assert named("{date}-{n}", "2026-11-22-7", "2026-11-23-1") == "2026-11-23-2"


def test_a_flow_run_that_has_the_name_of_a_run_keeps_it():
    assert named("exp-{n}", "exp-3", now_named="exp-3") == "exp-3"
    assert named("nightly-{date}", now_named="nightly-2026-11-20") == "nightly-2026-11-20"
    assert named("nightly-{date}", now_named="nightly-tuesday") == "nightly-2026-11-23"


def test_a_field_that_occurs_twice_has_one_value():
    assert named("{n}-of-{n}", "3-of-4", "2-of-2") == "3-of-3"
    assert not is_of("{n}-of-{n}", "3-of-4")


@pytest.mark.parametrize("run_id", ["nightly-{day}", "{date", "Nightly-{date}", "-{n}"])
def test_only_the_fields_that_there_are_may_be_used(run_id):
    with pytest.raises(InputError, match="run_id"):
        parse_template(job_document(run_id=run_id))


def test_a_template_becomes_a_job_and_is_none():
    template = parse_template(job_document(run_id="nightly-{date}"))
    assert template.named("nightly-2026-11-24") == parse_job(
        job_document(run_id="nightly-2026-11-24")
    )
    with pytest.raises(InputError, match=r"run_id.*--set run_id="):
        parse_job(job_document(run_id="nightly-{date}"))
    with pytest.raises(InputError, match="run_id"):
        template.named("n" * 64)


def test_the_name_is_the_first_field_of_the_form():
    assert next(iter(JobTemplate.model_json_schema()["properties"])) == "run_id"


def test_what_a_name_may_be_is_said_in_words():
    assert problem_of("nightly-A", NAME) == (
        '"nightly-A": must be up to 63 lower-case letters, digits and hyphens, not beginning with '
        "a hyphen"
    )
    assert problem_of("Night-{date}", TEMPLATE).endswith("and of {date}, {time} and {n}")
    assert "is a template, for deployments" in problem_of("night-{date}", NAME)
