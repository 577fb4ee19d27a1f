"""The README's commands and job files are what the program takes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from perdure.cli import app
from perdure.training.config.job import parse_job

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "perdure").glob("*.py"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
PAGES = sorted((ROOT / "docs").glob("*.md"))
MAX_README_LINES = 150  # three minutes of reading


@pytest.mark.parametrize("block", BLOCKS)
def test_every_job_in_the_readme_is_one(block):
    document = yaml.safe_load(block)
    complete = {"run_id": "readme", "data": {"sources": ["/corpus"]}, **document}
    parse_job(complete)


def test_the_readme_can_be_read_in_three_minutes():
    assert len(README.splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_whole_job_on_a_page_is_one(page):
    blocks = re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for block in blocks:
        if block.startswith("run_id:") and "\nstorage:" in block:
            parse_job({"data": {"sources": ["/corpus"]}, **yaml.safe_load(block)})


def test_the_index_lists_every_page():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    assert {page.name for page in PAGES} - {"index.md"} <= listed


def test_the_readme_names_every_make_target_of_continuous_integration():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    targets = re.findall(r"^make ([a-z-]+)$", script, flags=re.MULTILINE)
    assert targets
    assert all(f"make {target}" in README for target in targets)


@pytest.mark.parametrize("command", sorted(set(re.findall(r"perdure ([a-z]+)", README))))
def test_every_command_in_the_readme_exists(command):
    found = CliRunner().invoke(app, [command, "--help"]).exit_code == 0
    assert found, f"perdure/cli.py registers no command {command!r}"


def test_every_public_function_of_the_command_line_is_a_command_or_called():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in MODULES]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    defined = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    unused = {
        one.name for one in defined
        if not (one.name.startswith("_") or one.decorator_list or one.name in used)
    }  # fmt: skip
    assert not unused, "perdure/cli.py registers no such command, and nothing calls it"


def test_every_make_target_and_file_in_the_readme_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"make ([a-z-]+)", README):
        assert f"\n{target}:" in makefile or target == "demo"
    for path in re.findall(r"\]\(([\w/.-]+)\)|`((?:training|flows|examples)/[\w/]+\.py)`", README):
        assert (ROOT / (path[0] or path[1])).exists(), path


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_every_file_that_a_page_of_the_documentation_names_exists(page):
    text = page.read_text(encoding="utf-8")
    rooms = "perdure|flows|tasks|training|storage|tests|docs|dashboards|examples"
    for path in re.findall(rf"`((?:{rooms})/[\w./*-]*)`", text):
        assert any(ROOT.glob(path.rstrip("/"))), path
