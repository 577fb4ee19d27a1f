"""`perdure submit`: a job is handed to the platform, or refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.jobs import job_document
from tests.unit.perdure.commands import error_line, perdure

SLURM = ("--platform", "slurm")


def write_job(folder: Path, **engine: object) -> Path:
    path = folder / "job.yaml"
    section = {"kind": "launched", "nodes": 2, "spares": 1, **engine}
    path.write_text(yaml.safe_dump(job_document(folder, engine=section)))
    return path


@pytest.fixture
def job_file(tmp_path) -> Path:
    return write_job(tmp_path)


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """A stand-in for Slurm's command, which keeps the script and ends as it is told."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def install(answer: str, code: int = 0) -> Path:
        program, kept = tmp_path / "bin" / "sbatch", tmp_path / "script"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n/bin/cat > {kept}\n{answer}\nexit {code}\n")
        program.chmod(0o755)
        return kept

    return install


def test_print_hands_nothing_in(job_file, sbatch):
    kept = sbatch("echo Submitted batch job 7")
    script = perdure("submit", job_file, *SLURM, "--print", "--option=--time=2-0")
    assert script.startswith("#!/bin/bash\n#SBATCH --job-name=run\n")
    assert "\n#SBATCH --time=2-0\n" in script
    assert not kept.exists()


def test_slurm_gets_the_script_that_is_printed(job_file, sbatch):
    kept = sbatch("echo Submitted batch job 7")
    words = ("submit", job_file, *SLURM, "--set", "steps=500")
    assert perdure(*words) == "Submitted batch job 7\n"
    assert kept.read_text() == perdure(*words, "--print")
    assert f"launch {job_file} --set steps=500 --secret-file" in kept.read_text()


def test_what_slurm_refuses_is_told_in_its_words(job_file, sbatch, capsys):
    sbatch("echo 'sbatch: error: invalid partition specified: npu' >&2", 1)
    line = error_line(capsys, "submit", job_file, *SLURM, "--option=-p npu", code=1)
    assert line.endswith("sbatch refuses the job: sbatch: error: invalid partition specified: npu")


def test_without_slurm_it_says_so(job_file, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "sbatch is not installed here" in error_line(capsys, "submit", job_file, *SLURM, code=1)


@pytest.mark.parametrize("option", ["time=1-0", "1-0", "", "--time=1-0\nrm -r /data"])
def test_an_option_that_is_none_is_refused(job_file, capsys, option):
    line = error_line(capsys, "submit", job_file, *SLURM, "--print", f"--option={option}")
    assert line.startswith("perdure: --option: ")


@pytest.mark.parametrize("kind", ["local", "kubernetes"])
def test_a_job_of_another_engine_is_refused(tmp_path, capsys, kind):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_document(tmp_path, engine={"kind": kind, "nodes": 2})))
    line = error_line(capsys, "submit", path, *SLURM)
    assert line.startswith(f"perdure: engine.kind: {kind}") or "engine." in line
