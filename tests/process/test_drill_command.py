"""`perdure drill` as a person or a script runs it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.process.harness import REPO

pytestmark = pytest.mark.process


def drill(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "perdure", "drill", *arguments],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


@pytest.mark.long
def test_a_drill_tells_a_script_what_it_did_and_what_came_of_it(tmp_path):
    done = drill("replace-rank", "--json", "--home", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (told,) = json.loads(done.stdout)
    assert told["name"] == "replace-rank"
    assert told["rungs"] == ["process_replace"]
    assert 0 < told["detected_s"] < 10
    assert 0 < told["recovered_s"] < 60
    assert (told["steps_lost"], told["left_over"]) == (0, 0)
    assert (told["curve_equal"], told["as_expected"]) == (True, True)
    assert "logs and ledgers of the drills" in done.stderr


@pytest.mark.parametrize(
    ("name", "rung"),
    [
        ("step-retry-hcce", "step_retry"),
        pytest.param("node-lost", "pod_reschedule", marks=pytest.mark.long),
    ],
)
def test_a_drill_runs_on_the_nodes_of_a_job_and_leaves_nothing_in_its_store(tmp_path, name, rung):
    store = tmp_path / "store"
    job = {
        "run_id": "weeks-long",
        "storage": {"address": f"file://{store}"},
        "data": {"sources": ["/not/here"]},  # the drill has a corpus of its own
        "parallelism": {"kind": "hsdp", "replicas": 2},
        "engine": {"nodes": 2, "slots_per_node": 2, "spares": 1},
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    done = drill(name, "--json", "--job", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    (told,) = json.loads(done.stdout)
    assert (told["parallelism"], told["rungs"]) == ("hsdp", [rung])
    assert (told["fired"], told["curve_equal"], told["as_expected"]) == (1, True, True)
    assert list(store.iterdir()) == []
    assert f"perdure: {name} (1 of 1)" in done.stderr.splitlines(), "told on the way"


@pytest.mark.long
def test_where_the_run_without_a_fault_has_left_its_logs_is_told(tmp_path):
    job = {
        "run_id": "weeks-long",
        "storage": {"address": f"file://{tmp_path}/store"},
        "data": {"sources": ["/not/here"]},
        "env": {"DRILL_PACE_S": "fast"},  # no number: the program ends with an error
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    done = drill("tre", "--job", str(path))
    assert done.returncode == 1
    assert re.search("the run without a fault ended: user_code_error .*: ValueError", done.stderr)
    told = re.findall("logs and ledgers of the drills: (.*)", done.stderr)
    assert len(told) == 2
    assert Path(told[0], "runs", "undisturbed-ddp").is_dir()
    shutil.rmtree(told[0])


def test_fields_of_a_job_are_set_where_there_is_one():
    done = drill("tre", "--set", "engine.nodes=3")
    assert done.returncode == 2
    assert "--set" in done.stderr
    assert "--job" in done.stderr


def test_a_drill_that_there_is_not_is_told_with_those_that_there_are():
    done = drill("no-such-drill")
    assert done.returncode == 2
    assert "no-such-drill" in done.stderr
    assert "replace-rank" in done.stderr
