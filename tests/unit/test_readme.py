"""The README's commands and job files are what the program takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from perdure.cli import app
from training.job import parse_job

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS)
def test_every_job_in_the_readme_is_one(block):
    document = yaml.safe_load(block)
    complete = {"run_id": "readme", "data": {"sources": ["/corpus"]}, **document}
    parse_job(complete)


@pytest.mark.parametrize("command", sorted(set(re.findall(r"perdure ([a-z]+)", README))))
def test_every_command_in_the_readme_exists(command):
    assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0


def test_every_make_target_and_file_in_the_readme_exists():
    root = Path(__file__).parents[2]
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"make ([a-z-]+)", README):
        assert f"\n{target}:" in makefile or target == "demo"
    for path in re.findall(r"\]\(([\w/.-]+)\)|`((?:training|flows)/[\w/]+\.py)`", README):
        assert (root / (path[0] or path[1])).exists(), path
