"""A small file system of a test's own, to be filled."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FILLER = "filler"
NOT_HERE = "file systems cannot be mounted here: not root, or a container without the right"


@contextmanager
def small_disk(folder: Path, *, size: str) -> Iterator[bool]:
    """Mount a small disk at a folder; False: this user may not, or this container."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    is_mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave no room on the disk of a folder."""
    with (folder / FILLER).open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    assert shutil.disk_usage(folder).free < 4096


def make_room(folder: Path) -> None:
    """Give the room back that `fill` took."""
    (folder / FILLER).unlink()
