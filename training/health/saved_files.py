"""A checkpoint of a program by its files. Sizes are bytes, times seconds since the epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete checkpoint of a program.

    Attributes:
        step: at which it was saved.
        path: file or folder.
        size_bytes: of all of its files.
        written_s: when the newest of them was written.
    """

    step: int
    path: Path
    size_bytes: int
    written_s: float


def measured(step: int, path: Path) -> Iterator[Saved]:
    """What is at a path; nothing, if it goes away meanwhile: programs keep the newest ones only."""
    try:
        files = [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path]
        stats = [one.stat() for one in files]
    except FileNotFoundError:
        return
    size = sum(one.st_size for one in stats)
    if size:
        yield Saved(step, path, size, max(one.st_mtime for one in stats))


def is_unchanged(saved: Saved) -> bool:
    """Whether a checkpoint is as it was found; one without bytes has none yet."""
    now = next(measured(saved.step, saved.path), None) if saved.path.exists() else None
    return now == (saved if saved.size_bytes else None)
