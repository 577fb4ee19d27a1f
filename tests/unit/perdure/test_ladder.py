"""`perdure ladder`: the tables, and what they come to in a job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from perdure.training.recovery.faults import FaultClass
from perdure.training.recovery.ladder import ladder_markdown
from tests.jobs import job_document
from tests.unit.perdure.commands import error_line, perdure


@pytest.fixture
def job_file(tmp_path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_document(tmp_path)), encoding="utf-8")
    return path


def test_without_a_job_the_tables_are_printed():
    assert perdure("ladder", "--markdown").strip() == ladder_markdown()
    found = json.loads(perdure("ladder", "--json"))
    assert list(found["ladder"]) == list(FaultClass)


def test_with_a_job_its_policy_is_what_answers(job_file):
    def crash(*options: str) -> str:
        text = perdure("ladder", "--job", job_file, "--markdown", *options)
        (line,) = [one for one in text.splitlines() if one.startswith("| `unknown`")]
        return line.split("|")[2].strip()

    first = "`in_place_restart` x 3"
    assert crash() == f"{first} -> `job_reschedule` x 3 -> `stop`"
    assert crash("--set", "restart.max_restarts=1") == f"{first} -> `job_reschedule` -> `stop`"
    assert crash("--set", "restart.unconditional=false") == f"{first} -> `stop`"


def test_the_row_that_the_page_shows_is_the_row_of_a_job_without_settings(job_file):
    page = Path(__file__).parents[3].joinpath("docs/ladder.md").read_text(encoding="utf-8")
    rows = perdure("ladder", "--job", job_file).splitlines()
    (shown,) = [row for row in page.splitlines() if " x 3 ->" in row]
    assert shown in rows


def test_scripts_get_rungs_budgets_and_reasons(job_file):
    found = json.loads(perdure("ladder", "--job", job_file, "--json", "--code", "80E18402"))
    assert [one["fault_class"] for one in found["faults"][:-1]] == list(FaultClass)
    assert found["faults"][-1]["code"] == "80E18402"
    (hang,) = [one for one in found["faults"] if one["fault_class"] == "hang"]
    restart, stop = hang["answers"]
    assert (restart["rung"], restart["times"], restart["budget"]) == ("hang_restart", 3, 3)
    assert "used 3 of 3 in a row" in stop["reason"]


def test_a_wrong_question_is_one_line(job_file, capsys):
    line = error_line(capsys, "ladder", "--set", "steps=3")
    assert line == "perdure: --set: needs --job"
    assert "is no known code" in error_line(capsys, "ladder", "--job", job_file, "--code", "12")
    missing = job_file.with_name("none.yaml")
    assert "none.yaml" in error_line(capsys, "ladder", "--job", missing)
