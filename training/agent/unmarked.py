"""The processes of a container that do not carry its mark, as after `env -i`.

While their agent lives they are its descendants. Whoever ends the container after the agent's death
finds them by this record alone. Times are seconds.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from perdure.training.files import write_whole
from perdure.training.processes import MARKER, Recorded, environment_of, list_descendants

RECORD = "unmarked.json"
FIRST_POLL_S, POLL_S = 0.25, 5.0


@dataclass(slots=True)
class UnmarkedRecord:
    """The record of a container's unmarked processes.

    Attributes:
        folder: the container's.
    """

    folder: Path
    marker: str
    _written: tuple[Recorded, ...] = ()
    _next_s: float = 0.0
    _pause_s: float = FIRST_POLL_S

    def update(self) -> None:
        """Write the record, where it has changed; a poll reads /proc of the whole node."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, POLL_S)
        unmarked = tuple(_list_unmarked(self.marker))
        if unmarked != self._written:
            with contextlib.suppress(OSError):  # of a full disk; it is tried again
                write_whole(self.folder / RECORD, json.dumps(unmarked))
                self._written = unmarked


def read_unmarked(folder: Path) -> list[Recorded]:
    """Read the record of a container; empty where there is none.

    Raises:
        OSError: it cannot be read.
    """
    try:
        pairs = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return [(int(pid), float(started_s)) for pid, started_s in pairs]
    except (FileNotFoundError, ValueError, TypeError):
        return []


def _list_unmarked(marker: str) -> Iterator[Recorded]:
    for process in list_descendants(psutil.Process()):
        # Without any, it may be in the middle of an exec, which the next look shows.
        if environment_of(process.pid).get(MARKER) != marker:
            with contextlib.suppress(psutil.NoSuchProcess):
                yield process.pid, process.create_time()
