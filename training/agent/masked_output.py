"""The output of workers on its way to their logs, with secrets masked.

Only jobs that have secrets need it. A worker then prints into a pipe instead of its file, and a
thread of the agent writes the text into the file, with `MASK` in place of every known value. Text
is held back only while it may be the beginning of a value, so that a log is never late. The pipes
have names, because a fork server opens them by path; they end with the attempt. Sizes are bytes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import selectors
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from perdure.training.files import write_whole
from perdure.training.masking import MASK, literal_forms

PIECE_BYTES = 64 << 10
PIPE_BYTES = 1 << 20  # so that a worker rarely waits for the agent
_log = logging.getLogger("perdure.agent")


class LiteralMask:
    """Mask of known values in text that comes in pieces.

    Args:
        secrets: values; a value of several lines is masked line by line.
    """

    def __init__(self, secrets: Collection[str]) -> None:
        self._literals = literal_forms(secrets)
        self._pattern = re.compile(b"|".join(map(re.escape, self._literals)) or rb"(?!)")
        self._longest = max(map(len, self._literals), default=0)
        self._held_back = b""

    def feed(self, piece: bytes) -> bytes:
        """Return the text that is certain after one more piece."""
        text = self._held_back + piece
        cut = self._cut(text)
        self._held_back = text[cut:]
        return self._pattern.sub(MASK, text[:cut])

    def end(self) -> bytes:
        """Return the text that was held back."""
        text, self._held_back = self._held_back, b""
        return self._pattern.sub(MASK, text)

    def _cut(self, text: bytes) -> int:
        """Return where to cut a text: in no value, and before the possible beginning of one."""
        cut = len(text)
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            end = text[start:]
            if any(literal.startswith(end) and literal != end for literal in self._literals):
                cut = start
                break
        for match in self._pattern.finditer(text):
            if match.start() < cut < match.end():
                return match.start()
        return cut


@dataclass(slots=True)
class _Pipe:
    path: Path
    log_path: Path
    reader: int
    log: IO[bytes]
    mask: LiteralMask


@dataclass(slots=True)
class MaskedOutput:
    """The pipes of an attempt's workers on this node.

    Attributes:
        folder: the attempt's folder, where the pipes get their names.
        secrets: values that no log may have.
    """

    folder: Path
    secrets: frozenset[str]
    _pipes: dict[Path, _Pipe] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _selector: selectors.DefaultSelector = field(default_factory=selectors.DefaultSelector)
    _closing: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _wake: int = -1  # in the selector as well: tells the thread at once to end

    def pipe_of(self, log: Path) -> Path:
        """Return the pipe into a log, the same for all processes that print into it.

        Raises:
            OSError: pipe or log cannot be made.
        """
        with self._lock:
            if log not in self._pipes:
                self._pipes[log] = self._open(log)
            if self._thread is None:
                self._wake = os.eventfd(0, os.EFD_CLOEXEC)
                self._selector.register(self._wake, selectors.EVENT_READ)
                self._thread = threading.Thread(target=self._run, daemon=True, name="output")
                self._thread.start()
            return self._pipes[log].path

    def flush(self) -> None:
        """Write into the logs what was printed until now."""
        with self._lock:
            for pipe in self._pipes.values():
                while _move_piece(pipe):
                    pass

    def close(self) -> None:
        """Write the rest into the logs and remove the pipes: no process prints any more."""
        self._closing.set()
        # Without the lock, which the thread needs for the piece that it is moving.
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            self._thread = None
            os.close(self._wake)
        self.flush()
        for pipe in self._pipes.values():
            # A full disk costs the end of a log, never the agent.
            try:
                _close_pipe(pipe)
            except OSError as error:
                _log.warning(f"{pipe.log_path}: the end is lost: {error.strerror}")
        self._pipes.clear()
        self._selector.close()

    def _open(self, log: Path) -> _Pipe:
        path = self.folder / f"{log.name}.pipe"
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        # For writing as well: a pipe without any writer would be at its end, again and again.
        reader = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        with suppress(OSError):  # the limit of this user may be lower
            fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        pipe = _Pipe(path, log, reader, log.open("ab", buffering=0), LiteralMask(self.secrets))
        self._selector.register(reader, selectors.EVENT_READ, pipe)
        return pipe

    def _run(self) -> None:
        while not self._closing.is_set():
            ready = self._selector.select()
            with self._lock:
                for key, _ in ready:
                    if key.data is not None:
                        _move_piece(key.data)


def scrub(path: Path, secrets: frozenset[str]) -> None:
    """Mask known values in a small file that a program wrote by itself."""
    try:
        text = path.read_bytes()
        mask = LiteralMask(secrets)
        clean = mask.feed(text) + mask.end()
        if clean != text:
            write_whole(path, clean, private=True)
    except OSError:
        return  # mostly there is none


def _move_piece(pipe: _Pipe) -> bool:
    """Move a piece into the log. Returns whether there was any."""
    try:
        piece = os.read(pipe.reader, PIECE_BYTES)
    except BlockingIOError:
        return False
    # A log that cannot be written loses text, as it does without the pipe; the worker goes on.
    with suppress(OSError):
        pipe.log.write(pipe.mask.feed(piece))
    return bool(piece)


def _close_pipe(pipe: _Pipe) -> None:
    os.close(pipe.reader)
    with pipe.log:
        pipe.path.unlink(missing_ok=True)
        pipe.log.write(pipe.mask.end())
