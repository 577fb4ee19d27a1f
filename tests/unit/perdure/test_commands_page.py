"""docs/commands.md: the reference of the command line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer

from perdure.cli import app
from tests.unit.perdure.commands import perdure

PAGE = Path(__file__).parents[3].joinpath("docs/commands.md").read_text(encoding="utf-8")
SECTIONS = dict(
    re.findall(r"^## (perdure [a-z ]+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
)


def leaves(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every command without subcommands, by its full name."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for part, inner in command.commands.items():
        yield from leaves(inner, f"{name} {part}")


COMMANDS = dict(leaves(typer.main.get_command(app), "perdure"))


def test_the_page_has_a_section_for_every_command_and_for_no_other():
    assert set(SECTIONS) == set(COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_section_lists_every_option_of_its_command_and_no_other(name):
    options = {
        text for parameter in COMMANDS[name].params for text in parameter.opts if text[:1] == "-"
    }
    rows = [line.split(" | ")[0] for line in SECTIONS[name].splitlines() if line[:3] == "| `"]
    listed = {text for row in rows for text in re.findall(r"`(-[a-z-]+)", row)}
    assert listed == options


def test_every_command_of_the_overview_has_a_section():
    links = set(re.findall(r"\]\(#(perdure-[a-z-]+)\)", PAGE))
    assert links == {name.replace(" ", "-") for name in COMMANDS}


def test_the_version_is_that_of_the_installed_package():
    assert perdure("--version").strip() == f"perdure {version('perdure')}"
