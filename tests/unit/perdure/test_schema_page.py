"""`perdure schema`: the JSON schema of a job file, and the page docs/job.md made from it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from perdure.schema_page import job_page
from perdure.training.config.job import Job
from tests.unit.perdure.commands import perdure

PAGE = Path(__file__).parents[3] / "docs/job.md"


def test_the_page_shows_every_field_as_the_code_has_it():
    assert PAGE.read_text(encoding="utf-8").strip() == job_page(), (
        "docs/job.md is out of date: run `perdure schema --markdown > docs/job.md`"
    )


def test_the_command_prints_the_page_or_the_schema():
    assert perdure("schema", "--markdown").strip() == job_page()
    assert json.loads(perdure("schema")) == Job.model_json_schema()


def test_every_link_of_the_page_leads_to_a_heading():
    page = job_page()
    titles = re.findall(r"^#+ (.+)$", page, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    links = re.findall(r"\]\(#([^)]+)\)", page)
    assert len(links) > 20
    assert set(links) <= anchors


def test_the_rows_of_a_section_have_type_range_and_default():
    rows = {line.split(" | ")[0]: line for line in job_page().splitlines() if line[:3] == "| `"}
    assert "| number, 0.1 to 900 | `20.0` |" in rows["| `grace_s`"]
    assert "| number, above 0, up to 100 | `95.0` |" in rows["| `memory_high_percent`"]
    assert "| map of strings or integers | `{}` |" in rows["| `resources`"]
    assert (
        "| [local](#engine-kind-local), [kubernetes](#engine-kind-kubernetes), "
        "[launched](#engine-kind-launched) |" in (rows["| `engine`"])
    )


def test_variables_in_a_description_are_code_so_that_no_page_takes_them_for_formulas():
    worker = job_page().partition("## `worker`")[2]
    row = next(line for line in worker.splitlines() if line.startswith("| `command`"))
    assert "`${MASTER_ADDR}`" in row
    assert row.endswith("`$$` is a plain `$` |")
