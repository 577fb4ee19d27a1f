"""Perdure as its wheel installs it, in a folder that knows nothing of a checkout."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.wheel import build_wheel, copy_checkout

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture
def installed(tmp_path) -> Path:
    """The Python of an environment with the wheel, and with this one's dependencies."""
    wheel = build_wheel(copy_checkout(tmp_path / "checkout"), tmp_path / "out")
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    packages = sysconfig.get_path("purelib", vars={"base": str(folder)})
    # Of a folder that is named here, Python reads no .pth file: no checkout gets in.
    Path(packages, "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    options = ["--no-deps", "--no-index", "--ignore-installed", "--quiet"]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    subprocess.run([*pip, *options, str(wheel)], check=True)
    return python


def test_an_installation_plays_the_demo_in_an_empty_folder(bench, installed, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = {k: v for k, v in bench.environment.items() if k != "PYTHONPATH"}
    where = "import perdure, perdure.training as t; print(perdure.__file__, t.__file__)"
    found = subprocess.run(
        [installed, "-c", where],
        cwd=empty, env=environment, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert all(Path(path).is_relative_to(installed.parents[1]) for path in found)
    done = subprocess.run(
        [installed.with_name("perdure"), "demo"],
        cwd=empty, env=environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "completed: step 120 reached" in done.stdout
    assert "faults: 1 native_crash and 1 node_lost" in done.stdout
    assert list(empty.iterdir()) == []
