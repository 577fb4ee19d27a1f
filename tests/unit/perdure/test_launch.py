"""`perdure launch`: its place by options and variables, and one line where they contradict."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from tests.jobs import job_document
from tests.unit.perdure.commands import error_line, perdure

SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "n[1-3]", "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURMD_NODENAME": "n2",
}  # fmt: skip
KUBEFLOW = {"PET_NNODES": "4", "PET_NODE_RANK": "3"}


@pytest.fixture(autouse=True)
def no_platform(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "PERDURE_LAUNCH_SECRET"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def job_file(tmp_path) -> Path:
    path = tmp_path / "job.yaml"
    engine = {"kind": "launched", "nodes": 2, "spares": 1}
    path.write_text(yaml.safe_dump(job_document(tmp_path, engine=engine)))
    return path


def explained(job_file: Path, *options: str) -> dict[str, str]:
    """The facts that `--explain` prints, with the place that each was read from."""
    lines = perdure("launch", job_file, "--explain", *options).splitlines()
    cells = [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in lines]
    return {row[0]: f"{row[1]} from {row[2]}" for row in cells if row}


def given(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_the_variables_of_slurm_are_explained(job_file, monkeypatch):
    given(monkeypatch, SLURM)
    facts = explained(job_file)
    assert facts["node rank"] == "1 from SLURM_NODEID=1"
    assert facts["nodes"] == "3 from SLURM_STEP_NUM_NODES=3"
    assert facts["node"] == "n2 from SLURMD_NODENAME=n2"


def test_options_win_over_variables(job_file, monkeypatch):
    given(monkeypatch, SLURM)
    facts = explained(job_file, "--node-rank", "0", "--nodes", "9", "--node-name", "login")
    assert facts["node rank"] == "0 from --node-rank"
    assert facts["nodes"] == "9 from --nodes"
    assert facts["node"] == "login from --node-name"


@pytest.mark.parametrize(
    ("variables", "options", "words"),
    [
        ({**SLURM, "SLURM_STEP_NODELIST": "n[1-4]"}, (), ("SLURM_STEP_NUM_NODES=3", "4")),
        ({**SLURM, "SLURM_NODEID": "3"}, (), ("SLURM_STEP_NODELIST", "more than 3")),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8(x3)"}, (), ("8 commands", "ntasks-per-node=1")),
        ({**SLURM, "SLURM_NODEID": "one"}, (), ("SLURM_NODEID=one", "whole number")),
        (SLURM, ("--node-rank", "3"), ("--node-rank", "below the number of nodes, 3")),
        (KUBEFLOW, ("--nodes", "3"), ("PET_NODE_RANK=3", "below the number of nodes, 3")),
        ({}, ("--node-rank", "2", "--nodes", "2"), ("--node-rank", "(--nodes)")),
        ({}, ("--node-rank", "0", "--nodes", "1"), ("engine.nodes", "2", "has 1 nodes")),
        ({"SLURM_JOB_ID": "7"}, (), ("--node-rank", "batch script", "srun perdure launch")),
        ({}, (), ("--node-rank", "give this node's number")),
        ({}, ("--node-rank", "0", "--set", "engine.kind=local"), ("engine",)),
        ({}, ("--node-rank", "0", "--secret-file", "/no/such"), ("--secret-file", "No such file")),
        ({"PERDURE_LAUNCH_SECRET": "short"}, ("--node-rank", "0"), ("5 characters", "16")),
    ],
)
def test_a_contradiction_is_one_line(job_file, monkeypatch, capsys, variables, options, words):
    given(monkeypatch, variables)
    line = error_line(capsys, "launch", job_file, *options)
    assert all(word in line for word in words), line


@pytest.mark.parametrize("option", ["--nodes=0", "--node-rank=-1", "--leave-before=-5"])
def test_a_number_out_of_range_is_refused(job_file, option):
    perdure("launch", job_file, option, code=2)
