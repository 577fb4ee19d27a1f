"""The drills and the chaos on emulated NPUs, as a user starts them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.training.drill.table import DRILLS
from tests.ascend.product import runs

DRILL_S = 240.0  # at most, for one
OF_DEVICES = [drill.name for drill in DRILLS if not drill.is_of_gloo]
SHORT = ("node-lost",)


def drilled(name: str, home: Path, *options: str) -> list[dict[str, object]]:
    """The outcomes of `perdure drill NAME`."""
    done = subprocess.run(
        [sys.executable, "-m", "perdure", "drill", name, "--json", "--home", str(home), *options],
        cwd=runs.ROOT,
        capture_output=True,
        text=True,
        timeout=DRILL_S * (len(OF_DEVICES) if name == "all" else 2),
        check=False,
    )
    outcomes = json.loads(done.stdout or "[]")
    problems = {one["name"]: one["problems"] for one in outcomes if not one["as_expected"]}
    assert (problems, done.returncode) == ({}, 0), done.stderr
    assert all(one["curve_equal"] or one["differs_from"] is not None for one in outcomes)
    return outcomes


@pytest.mark.timeout(2 * DRILL_S)
@pytest.mark.parametrize("name", SHORT)
def test_a_drill_ends_as_expected(tmp_path, name):
    assert [one["name"] for one in drilled(name, tmp_path)] == [name]


@pytest.mark.long
@pytest.mark.timeout(DRILL_S * len(OF_DEVICES))
def test_every_drill_ends_as_expected(tmp_path):
    assert [one["name"] for one in drilled("all", tmp_path)] == OF_DEVICES


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_sharded_models_are_replaced_rank_by_rank(tmp_path):
    drilled("replace-rank", tmp_path, "--parallelism", "hsdp")
    drilled("node-lost", tmp_path, "--parallelism", "fsdp2")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_thirty_faults_at_random_leave_the_curve_as_it_was(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "perdure.training.drill.chaos", "--seed", "1", "--faults", "30"],
        cwd=runs.ROOT,
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "faults fired (30 planned)" in done.stdout
