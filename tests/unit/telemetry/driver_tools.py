"""Programs that stand where those of a device's driver would be."""

from __future__ import annotations

import os
import stat
from pathlib import Path

SAMPLES = Path(__file__).parent / "samples"


def install(folder, name, script):
    """A shell script under the name of a tool."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def only_tools_of(folder, monkeypatch):
    """Have no tools in PATH but those of the folder and the system's own. Returns the folder."""
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin:/bin")
    return folder
