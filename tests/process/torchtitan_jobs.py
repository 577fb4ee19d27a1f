"""Jobs that run torchtitan itself, from an environment of its own, and what it prints."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

from tests.process.harness import REPO
from tests.process.program_jobs import printed

VENV = REPO / ".venv-titan"
PYTHON = VENV / "bin/python"
needs_torchtitan = pytest.mark.skipif(
    not PYTHON.exists(), reason="no torchtitan: make test-torchtitan"
)

STEPS = 40
PACE = ("--checkpoint.interval=10", f"--training.steps={STEPS}")
LOADED = "Loading the checkpoint from"
_LINE = re.compile(r"step: +(\d+) .*?loss: +([\d.]+) ")
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


def losses(lines: Iterable[str]) -> dict[int, str]:
    """What was printed of every step, by whichever rank."""
    return printed((_COLOURS.sub("", line) for line in lines), _LINE)
