"""The folder of a node's disk that outlives containers, one for each life of a run's name."""

from __future__ import annotations

import shutil
from pathlib import Path

LIFE_PREFIX = "life-"


def node_folder(base: Path, created_s: float) -> Path:
    """The folder of a run below the one of its name.

    Args:
        base: folder of the run's name on the node.
        created_s: when the run was created, seconds since the epoch.
    """
    return base / f"{LIFE_PREFIX}{created_s:.0f}"


def forget_other_lives(folder: Path) -> None:
    """Free the node's disk of a run of the same name that is no more."""
    for other in folder.parent.glob(f"{LIFE_PREFIX}*"):
        if other.name != folder.name:
            shutil.rmtree(other, ignore_errors=True)
