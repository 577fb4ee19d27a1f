"""`perdure drill` as a user or a script runs it."""

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

from perdure.training.drill.job import HANG_TIMEOUT_S
from tests.process.harness import REPO

pytestmark = pytest.mark.process


def drill(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "perdure", "drill", *arguments],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


@pytest.mark.long
def test_a_drill_reports_to_a_script_what_it_did_and_how_it_ended(tmp_path):
    done = drill("replace-rank", "--json", "--home", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads(done.stdout)
    assert result["name"] == "replace-rank"
    assert result["rungs"] == ["process_replace"]
    assert 0 < result["detected_s"] < 10
    assert 0 < result["recovered_s"] < 60
    assert (result["steps_lost"], result["left_over"]) == (0, 0)
    assert (result["curve_equal"], result["as_expected"]) == (True, True)
    assert "logs and ledgers of the drills" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("name", ["hang-at-start", "hang-in-recovery"])
def test_a_rank_that_stops_outside_of_a_step_is_found_long_before_the_limit_of_the_start(
    tmp_path, name
):
    done = drill(name, "--json", "--parallelism", "hsdp", "--home", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads(done.stdout)
    assert (result["as_expected"], result["rungs"]) == (True, ["hang_restart"])
    assert result["fired"] == (1 if name == "hang-at-start" else 2)
    assert HANG_TIMEOUT_S < result["detected_s"] < HANG_TIMEOUT_S + 30
    assert (result["curve_equal"], result["left_over"]) == (True, 0)


@pytest.mark.parametrize(
    ("name", "rung"),
    [
        pytest.param("step-retry-hcce", "step_retry", marks=pytest.mark.long),
        pytest.param("node-rescheduled", "pod_reschedule", marks=pytest.mark.long),
        pytest.param("node-lost-partner", "pod_reschedule", marks=pytest.mark.long),
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
    (result,) = json.loads(done.stdout)
    assert (result["parallelism"], result["rungs"]) == ("hsdp", [rung])
    assert (result["fired"], result["curve_equal"], result["as_expected"]) == (1, True, True)
    assert list(store.iterdir()) == []
    assert f"perdure: {name} (1 of 1)" in done.stderr.splitlines(), "reported on the way"


@pytest.mark.long
def test_the_logs_of_the_run_without_a_fault_are_named(tmp_path):
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
    folders = re.findall("logs and ledgers of the drills: (.*)", done.stderr)
    assert len(folders) == 2
    assert Path(folders[0], "runs", "undisturbed-ddp").is_dir()
    shutil.rmtree(folders[0])


def test_a_script_is_told_which_drills_can_run_on_a_job_and_why_others_cannot(tmp_path):
    path = tmp_path / "job.yaml"
    job = {
        "run_id": "weeks-long",
        "storage": {"address": f"file://{tmp_path}/store"},
        "data": {"sources": ["/not/here"]},
        "engine": {"nodes": 2, "slots_per_node": 2, "spares": 0},
    }
    path.write_text(yaml.safe_dump(job))
    done = drill("list", "--json", "--job", str(path))
    assert done.returncode == 0, done.stderr
    found = {row["drill"]: row["can run"] for row in json.loads(done.stdout)}
    cannot = {name: why for name, why in found.items() if why != "yes"}
    assert cannot.pop("two-nodes-lost") == "engine.nodes=2: it needs 4 nodes"
    assert set(cannot) == {
        *("node-lost", "node-lost-cold", "first-node-lost", "node-lost-partner"),
        *("node-rescheduled", "node-rescheduled-cold", "node-isolated"),
    }
    assert set(cannot.values()) == {"engine.spares=0: it leaves a node and needs another one"}
    refused = drill("node-lost", "--job", str(path))
    assert refused.returncode == 2
    assert "node-lost: engine.spares=0" in refused.stderr


def test_fields_of_a_job_can_only_be_set_with_a_job():
    done = drill("tre", "--set", "engine.nodes=3")
    assert done.returncode == 2
    assert "--set" in done.stderr
    assert "--job" in done.stderr


def test_an_unknown_drill_is_refused_with_the_names_of_the_known_ones():
    done = drill("no-such-drill")
    assert done.returncode == 2
    assert "no-such-drill" in done.stderr
    assert "replace-rank" in done.stderr
