"""Folders of the emulator: where its sources are, and where what is built of them goes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE.parent / "emulator"
SITE = HERE / "site"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "perdure"
OBJECTS = CACHE / "ascend-objects"
PACKAGES = ("torch", "torch_npu")


def built() -> Path:
    """The folder of what these sources and these versions of torch and torch_npu make."""
    digest = hashlib.sha256(repr(versions()).encode())
    for path in [*sources(), *sorted(SITE.glob("*.py")), HERE / "build.py"]:
        digest.update(str(path.relative_to(HERE.parent)).encode() + b"\0" + path.read_bytes())
    return CACHE / f"ascend-{digest.hexdigest()[:16]}"


def sources() -> list[Path]:
    """All C++ of the emulator."""
    return sorted(path for path in SOURCES.rglob("*") if path.suffix in (".cpp", ".hpp"))


def versions() -> dict[str, str]:
    """What the emulator is built against."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def package(name: str) -> Path:
    """The folder of an installed package, which is not imported: that would need the emulator.

    Raises:
        FileNotFoundError: it is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"{name} is not installed in this environment")
    return Path(spec.origin).parent
