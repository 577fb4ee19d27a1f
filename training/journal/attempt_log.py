"""The log of an attempt: a JSON line per event, in a file on the first node.

The first rank, its checkpoint server and the coordinator write it, each in a process of its own
that may be killed at any moment; the coordinator and, through the node's agent, supervisors
follow it. None of them waits for the object store. Offsets and sizes are bytes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from perdure.training.journal.events import EVENT, Event

FILE_NAME = "metrics.jsonl"
MAX_READ_BYTES = 1 << 20


class AttemptLog:
    """A writer of events. A line is a single write, which no other writer's line splits."""

    def __init__(self, path: Path) -> None:
        # O_APPEND: a write goes to the end in a single step, beside other writers too (POSIX).
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)

    def append(self, event: Event) -> None:
        """Write an event as a line of its own.

        Raises:
            OSError: the disk is full, or failed.
        """
        line = EVENT.dump_json(event) + b"\n"
        # A writer that was killed in mid-line leaves half a line, which spoils the next line. The
        # search for it follows the write, or half a line could come between the two.
        while self._write(line) not in (b"", b"\n"):
            pass

    def _write(self, line: bytes) -> bytes:
        """Write a line. Return the byte before it, empty at the start of the file."""
        if os.write(self._fd, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        start = os.lseek(self._fd, 0, os.SEEK_CUR) - len(line)
        return os.pread(self._fd, 1, start - 1) if start else b""

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_lines(path: Path, offset: int) -> tuple[str, int]:
    """Read whole lines from `offset` on, at most 1 MiB, and the offset after them."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(MAX_READ_BYTES)
    except FileNotFoundError:
        return "", offset  # no event yet
    whole = data[: data.rfind(b"\n") + 1]
    # A killed writer may have cut its line within a character.
    return whole.decode(errors="replace"), offset + len(whole)


def parse_lines(text: str) -> Iterator[Event]:
    """Parse the events of whole lines.

    It skips a line that was cut, or of an unknown kind: writers are killed while they write, and
    may be of another version.
    """
    for line in text.split("\n"):
        try:
            yield EVENT.validate_json(line)
        except ValidationError:
            continue


class Follower:
    """A reader of the events of a log from its beginning on.

    Args:
        read: gives lines as `read_lines` does.
    """

    def __init__(self, read: Callable[[int], tuple[str, int]]) -> None:
        self._read = read
        self._offset = 0

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """Follow a file of this node; it need not be there yet."""
        return cls(partial(read_lines, path))

    def read(self) -> list[Event] | None:
        """Read the next events; None when there are no more lines yet."""
        text, offset = self._read(self._offset)
        if offset == self._offset:  # no lines at all: lines of unknown kinds give an empty list
            return None
        self._offset = offset
        return list(parse_lines(text))
