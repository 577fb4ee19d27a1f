"""The jobs and programs of examples/ are such that a user may run them as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from perdure.training.config.job_file import load_job
from perdure.training.errors import InputError
from perdure.training.preflight.job import check_without_store
from perdure.training.runtime.session import Session
from perdure.training.runtime.step_loop.step import Step

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGES = [ROOT / "README.md", ROOT / "docs" / "programs.md"]
JOBS = sorted(EXAMPLES.glob("*.yaml"))
PROGRAMS = sorted({*EXAMPLES.iterdir()} - {*JOBS})


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_every_job_passes_the_checks_from_the_folder_of_the_clone(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    if path.stem.startswith("mindspore") and not (ROOT / ".venv-mindspore/bin/msrun").exists():
        pytest.skip("no MindSpore: make test-mindspore installs it")
    check_without_store(load_job(path))


def test_a_program_is_looked_for_on_the_path_of_its_job(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    program = tmp_path / "bin" / "own-launcher"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    command = "worker={command: [own-launcher]}"
    with pytest.raises(InputError, match="no program on this machine"):
        check_without_store(load_job(EXAMPLES / "command.yaml", [command]))
    path = f"env={{PATH: '{program.parent}:/bin'}}"
    check_without_store(load_job(EXAMPLES / "command.yaml", [command, path]))


def test_a_job_whose_program_is_not_there_would_not(monkeypatch):
    monkeypatch.chdir(ROOT)
    job = load_job(EXAMPLES / "session.yaml", ["worker.recipe=session_train:train"])
    with pytest.raises(InputError, match="defines no 'train'"):
        check_without_store(job)


@pytest.mark.parametrize("path", [p for p in PROGRAMS if p.is_file()], ids=lambda path: path.name)
def test_every_program_is_short_and_started_by_a_job(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 120
    assert any(path.stem in job.read_text(encoding="utf-8") for job in JOBS)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_what_a_page_says_of_sessions_and_steps_exists(page):
    text = page.read_text(encoding="utf-8")
    for name, kind in (("session", Session), ("step", Step)):
        attributes = set(re.findall(rf"(?<![\w./]){name}\.(\w+)", text)) - {"py", "yaml"}
        own = {*dir(kind), *re.findall(r"self\.(\w+)", Path(source_of(kind)).read_text())}
        assert attributes, f"{page.name} speaks of {name}"
        assert attributes <= own


def source_of(kind: type) -> str:
    module = __import__(kind.__module__, fromlist=["__file__"])
    return str(module.__file__)
