"""The heartbeat of a worker: one record in a memory-mapped file.

The writer is the training process, the reader the node agent; the record stays readable when
the writer is stopped or dead, and writing it takes microseconds because nothing leaves memory.
Times are nanoseconds of CLOCK_MONOTONIC, which all processes of one host share.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Self

_RECORD = struct.Struct("<QIIqqQQQQ")
_SEQUENCE = struct.Struct("<Q")
_SIZE = 4096


class Phase(IntEnum):
    """What a worker is doing."""

    START = 0
    RESTORE = 1
    DATA = 2
    STEP = 3
    SAVE = 4
    DONE = 5
    STOPPED = 6
    RECOVER = 7
    PAUSED = 8


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One reading.

    Attributes:
        pid: process that wrote it.
        phase: what it was doing.
        generation: life of the process groups, from 0.
        step: completed optimizer steps; -1 before the state was restored.
        entered: collectives entered since the process started.
        left: collectives left.
        beat_ns: when it was last written.
        stepped_ns: when a step was last completed, 0 before this process's first one.
    """

    pid: int
    phase: Phase
    generation: int
    step: int
    entered: int
    left: int
    beat_ns: int
    stepped_ns: int


class HeartbeatWriter:
    """Writes this process's heartbeat."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, _SIZE)
            self._map = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        self._pid = os.getpid()
        self._sequence = 0
        self._phase = Phase.START
        self._step = -1
        self._stepped_ns = 0
        self._entered = 0
        self._left = 0
        self.generation = 0
        self._write()

    def beat(self, *, phase: Phase | None = None, step: int | None = None) -> None:
        """Record a new phase or a new step, or merely that the process lives."""
        if phase is not None:
            self._phase = phase
        if step is not None and step != self._step:
            # The first one is the restored step: none has been completed here yet.
            if self._step >= 0:
                self._stepped_ns = time.monotonic_ns()
            self._step = step
        self._write()

    def enter_collective(self) -> None:
        """Record that a collective begins."""
        self._entered += 1
        self._write()

    def leave_collective(self) -> None:
        """Record that the collective has returned."""
        self._left += 1
        self._write()

    def _write(self) -> None:
        # An odd sequence number marks a record under construction (seqlock), so a reader never
        # takes half of one for whole, even if the writer was killed in between.
        now_ns = time.monotonic_ns()
        fields = (self._pid, self._phase, self.generation, self._step)
        counts = (self._entered, self._left, now_ns, self._stepped_ns)
        _SEQUENCE.pack_into(self._map, 0, self._sequence + 1)
        _RECORD.pack_into(self._map, 0, self._sequence + 1, *fields, *counts)
        self._sequence += 2
        _SEQUENCE.pack_into(self._map, 0, self._sequence)


class HeartbeatReader:
    """Reads another process's heartbeat."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: Heartbeat | None = None

    def read(self) -> Heartbeat | None:
        """The newest whole record, None before the first one was written."""
        try:
            data = self._path.read_bytes()[: _RECORD.size]
        except FileNotFoundError:
            return self._last
        if len(data) < _RECORD.size:
            return self._last
        sequence, pid, phase, generation, step, *rest = _RECORD.unpack(data)
        if sequence and sequence % 2 == 0:
            self._last = Heartbeat(pid, Phase(phase), generation, step, *rest)
        return self._last

    @classmethod
    def of(cls, folder: Path, local_rank: int) -> Self:
        """The reader for one local rank of the attempt whose folder this is."""
        return cls(folder / f"heartbeat-{local_rank}")
