"""The subsystem that raised an exception, by the packages of its files (`subsystems.toml`)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from enum import StrEnum
from functools import cache
from importlib import resources

from perdure.storage.frozen_model import FrozenModel

_LIB = r"/(?:(?:site|dist)-packages|lib)/"
_INSTALLED = re.compile(r"/(?:site|dist)-packages/")
# The language itself, and code without a file: the caller speaks through them.
_LANGUAGE = re.compile(r"/python3\.\d+/(?!(?:site|dist)-packages/)|^<")


class Subsystem(StrEnum):
    """The part of the software that raised an exception."""

    CHECKPOINT = "checkpoint"
    STORAGE = "storage"
    LOADER = "loader"
    COLLECTIVE = "collective"
    DEVICE = "device"
    FRAMEWORK = "framework"
    PYTHON = "python"
    LIBRARY = "library"
    USER = "user"


class _SubsystemRow(FrozenModel):
    name: Subsystem
    paths: tuple[str, ...]


@cache
def _load_patterns() -> tuple[tuple[Subsystem, re.Pattern[str]], ...]:
    folder = resources.files("perdure.training.diagnosis")
    rows = tomllib.loads(folder.joinpath("subsystems.toml").read_text("utf-8"))["subsystem"]
    each = (_SubsystemRow.model_validate(row) for row in rows)
    return tuple(
        (row.name, re.compile("|".join(path.replace("LIB/", _LIB) for path in row.paths)))
        for row in each
    )


@cache
def find_subsystem(path: str) -> Subsystem:
    """Find the subsystem to which a file belongs."""
    plain = f"/{path}".replace("\\", "/").replace("//", "/")
    default = Subsystem.LIBRARY if _INSTALLED.search(plain) else Subsystem.USER
    return next((name for name, paths in _load_patterns() if paths.search(plain)), default)


def find_raiser(frames: Sequence[str]) -> Subsystem | None:
    """Find the subsystem that raised an exception; None without a traceback.

    Args:
        frames: files of the traceback, innermost last.
    """
    for path in reversed(frames):
        subsystem = find_subsystem(path)
        if subsystem is not Subsystem.USER or not _LANGUAGE.search(path.replace("\\", "/")):
            return subsystem
    return Subsystem.USER if frames else None
