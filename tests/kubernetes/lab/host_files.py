"""What a pod of the lab mounts of this machine, in place of an image with these files.

Programs and libraries, the interpreter, its environment and this checkout, all read-only and at
the paths they have here: a pod runs the very code that is tested.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.kubernetes.lab.images import PATH
from tests.kubernetes.lab.places import REPO

SYSTEM = (Path("/usr"), Path("/etc/alternatives"), Path("/etc/ld.so.cache"))


def paths() -> list[Path]:
    """The files and folders, none below another."""
    own = [Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), REPO]
    found: list[Path] = []
    for path in (*SYSTEM, *sorted(own, key=lambda one: len(one.parts))):
        if path.exists() and not any(path.is_relative_to(other) for other in found):
            found.append(path)
    return found


def volumes() -> list[dict[str, object]]:
    """For `spec.volumes` of a pod."""
    return [
        {"name": f"host-{index}", "hostPath": {"path": str(path)}}
        for index, path in enumerate(paths())
    ]


def mounts() -> list[dict[str, object]]:
    """For `volumeMounts` of a container."""
    return [
        {"name": f"host-{index}", "mountPath": str(path), "readOnly": True}
        for index, path in enumerate(paths())
    ]


def environment() -> dict[str, str]:
    """Variables with which a container finds them."""
    return {
        "PATH": f"{Path(sys.prefix) / 'bin'}:{PATH}",
        "PYTHONPATH": str(REPO),  # the environment may be that of another checkout
        "PYTHONDONTWRITEBYTECODE": "1",
        "PERDURE_FOLDER": str(REPO),  # as the image has it
    }
