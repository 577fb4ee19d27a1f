"""`perdure drill` before a drill starts: what can run where, and input that is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.unit.perdure.commands import error_line, perdure


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    """A job whose nodes have no spare."""
    path = tmp_path / "job.yaml"
    job = {
        "run_id": "weeks-long",
        "storage": {"address": f"file://{tmp_path}/store"},
        "data": {"sources": ["/not/here"]},
        "engine": {"nodes": 2, "slots_per_node": 2, "spares": 0},
    }
    path.write_text(yaml.safe_dump(job))
    return path


def test_a_script_is_told_which_drills_can_run_on_a_job_and_why_others_cannot(job_file):
    rows = json.loads(perdure("drill", "list", "--json", "--job", job_file))
    answers = {row["drill"]: row["can run"] for row in rows}
    cannot = {name: why for name, why in answers.items() if why != "yes"}
    assert cannot.pop("two-nodes-lost") == "engine.nodes=2: it needs 4 nodes"
    assert set(cannot) == {
        *("node-lost", "node-lost-cold", "first-node-lost", "node-lost-partner"),
        *("node-rescheduled", "node-rescheduled-cold", "node-isolated"),
    }
    assert set(cannot.values()) == {"engine.spares=0: it leaves a node and needs another one"}


def test_a_drill_that_cannot_run_on_a_job_is_refused(job_file, capsys):
    line = error_line(capsys, "drill", "node-lost", "--job", job_file)
    assert "node-lost: engine.spares=0" in line


def test_fields_of_a_job_can_only_be_set_with_a_job(capsys):
    line = error_line(capsys, "drill", "tre", "--set", "engine.nodes=3")
    assert "--set" in line
    assert "--job" in line


def test_an_unknown_drill_is_refused_with_the_names_of_the_known_ones(capsys):
    line = error_line(capsys, "drill", "no-such-drill")
    assert "no-such-drill" in line
    assert "replace-rank" in line
