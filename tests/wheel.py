"""The wheel that a checkout is built into, without network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
FOLDERS = ("flows", "storage", "tasks", "training")  # of the root, linked into perdure/
FILES = ("pyproject.toml", "README.md", "LICENSE")
BUILD = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"


def copy_checkout(folder: Path) -> Path:
    """What a wheel is made of, links as links: a build leaves its folders in the checkout."""
    for name in ("perdure", *FOLDERS):
        caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPO / name, folder / name, symlinks=True, ignore=caches)
    for name in FILES:
        shutil.copy(REPO / name, folder / name)
    return folder


def build_wheel(checkout: Path, out: Path) -> Path:
    """Build a wheel as pip does, with the setuptools of this Python."""
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)],
        cwd=checkout, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel
