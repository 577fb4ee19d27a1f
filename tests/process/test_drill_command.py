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

from perdure.training.config.recovery import RestartSpec
from perdure.training.drill.job import HANG_TIMEOUT_S
from tests.process.harness import REPO

pytestmark = [pytest.mark.process, pytest.mark.long]


def drill(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "perdure", "drill", *arguments],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip


def test_a_drill_reports_to_a_script_what_it_did_and_how_it_ended(tmp_path):
    done = drill("replace-rank", "--json", "--home", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads(done.stdout)
    assert result["name"] == "replace-rank"
    assert result["rungs"] == ["process_replace"]
    assert result["detected_s"] > 0
    assert result["recovered_s"] > 0
    assert (result["steps_lost"], result["left_over"]) == (0, 0)
    assert (result["curve_equal"], result["as_expected"]) == (True, True)
    assert "logs and ledgers of the drills" in done.stderr


@pytest.mark.parametrize("name", ["hang-at-start", "hang-in-recovery"])
def test_a_rank_that_stops_outside_of_a_step_is_found_long_before_the_limit_of_the_start(
    tmp_path, name
):
    done = drill(name, "--json", "--parallelism", "hsdp", "--home", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads(done.stdout)
    assert (result["as_expected"], result["rungs"]) == (True, ["hang_restart"])
    assert result["fired"] == (1 if name == "hang-at-start" else 2)
    assert HANG_TIMEOUT_S < result["detected_s"] < RestartSpec().start_timeout_s
    assert (result["curve_equal"], result["left_over"]) == (True, 0)


@pytest.mark.parametrize(
    ("name", "rung"),
    [
        ("step-retry-hcce", "step_retry"),
        ("node-rescheduled", "pod_reschedule"),
        ("node-lost-partner", "pod_reschedule"),
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
