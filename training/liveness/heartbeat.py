"""The heartbeat of a worker: one record in a memory-mapped file.

The writer is the training process, the reader the node agent; the record stays readable when
the writer is stopped or dead, and writing it takes microseconds because nothing leaves memory.
Times are nanoseconds of CLOCK_MONOTONIC, which all processes of one host share.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Self

from perdure.training.processes import read_rank
from perdure.training.wire.agent_status import Pulse

_log = logging.getLogger("perdure.heartbeat")
_OPERATION_BYTES = 48
_RECORD = struct.Struct(f"<QIIqqQQQQQQQ{_OPERATION_BYTES}s")
_SEQUENCE = struct.Struct("<Q")
_SIZE = 4096
# Ranks that a command starts itself inherit the same path: each fills its own rank in.
ANY_RANK = "{rank}"


class Phase(IntEnum):
    """The activity of a worker.

    AGREE is the part of a save in which the ranks only talk to each other.
    """

    START = 0
    RESTORE = 1
    DATA = 2
    STEP = 3
    SAVE = 4
    DONE = 5
    STOPPED = 6
    RECOVER = 7
    PAUSED = 8
    EVALUATE = 9
    AGREE = 10


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A reading of a worker's record.

    Attributes:
        pid: process that wrote it.
        generation: life of the process groups, from 0.
        step: completed optimizer steps; -1 before the state was restored.
        entered: collectives entered since the newest step was completed. Every rank goes
            through the same collectives, so that counts of a step compare.
        left: those of them that have come to their end.
        beat_ns: when the training thread last wrote it.
        stepped_ns: when a step was last completed, 0 before the first of this process.
        waited_ns: time between entering and end of collectives, in the whole life of the process.
            The rank that comes last to each waits least.
        data_ns: time that it waited for the data loader, in the whole life of the process.
        latency_ns: duration of the newest vote, the collective that ends a step.
        operation: the newest collective or transfer, with its group; ASCII.
        stride: steps from one known step to the next, where some are not known.
    """

    pid: int
    phase: Phase
    generation: int
    step: int
    entered: int
    left: int
    beat_ns: int
    stepped_ns: int
    waited_ns: int = 0
    data_ns: int = 0
    latency_ns: int = 0
    operation: str = ""
    stride: int = 1

    def to_pulse(self, process_state: str, *, cpu_s: float = 0.0, io_bytes: int = 0) -> Pulse:
        """Describe it for a supervisor, with ages in place of times.

        Args:
            process_state: the kernel's letter for the state of its process.
            cpu_s: processor time of its session.
            io_bytes: bytes that its session has read and written.
        """
        now_ns = time.monotonic_ns()
        return Pulse(
            entered=self.entered,
            left=self.left,
            operation=self.operation,
            waited_s=self.waited_ns / 1e9,
            data_s=self.data_ns / 1e9,
            latency_s=self.latency_ns / 1e9,
            beat_s=max(0.0, (now_ns - self.beat_ns) / 1e9),
            step_age_s=max(0.0, (now_ns - self.stepped_ns) / 1e9) if self.stepped_ns else None,
            process_state=process_state,
            cpu_s=cpu_s,
            io_bytes=io_bytes,
        )


class HeartbeatWriter:
    """Writer of this process's heartbeat; threads of their own record ends of collectives.

    Args:
        path: PERDURE_HEARTBEAT; `{rank}` in it becomes the rank of this process, or its pid where
            no launcher gave it one.
    """

    def __init__(self, path: Path) -> None:
        path = path.with_name(path.name.replace(ANY_RANK, _rank_name()))
        self._map = _map_file(path)
        self._pid = os.getpid()
        self._sequence = 0
        self._phase = Phase.START
        self._step = -1
        self._stepped_ns = 0
        self._entered = 0
        self._left = 0
        self._beat_ns = 0
        self._waited_ns = 0
        self._waits_from_ns = 0
        self._data_ns = 0
        self._latency_ns = 0
        self._operation = b""
        self._lock = threading.Lock()
        self.generation = 0
        self.beat()

    def beat(self, *, phase: Phase | None = None, step: int | None = None) -> None:
        """Record a new phase or a new step, or merely that the process lives."""
        with self._lock:
            if phase is not None:
                self._phase = phase
            if step is not None and step != self._step:
                # The first is the restored step: this process has completed none yet.
                if self._step >= 0:
                    self._stepped_ns = time.monotonic_ns()
                self._step = step
                self._entered = self._left = 0
            self._write()

    def enter_collective(self, operation: str = "") -> None:
        """Record that a collective begins."""
        with self._lock:
            if self._left == self._entered:
                self._waits_from_ns = time.monotonic_ns()
            self._entered += 1
            self._operation = operation.encode("ascii", "replace")[:_OPERATION_BYTES]
            self._write()

    def leave_collective(self) -> None:
        """Record that a collective has come to its end; no sign that the training thread lives."""
        with self._lock:
            if self._left < self._entered:  # a collective of the previous step may end late
                self._left += 1
                if self._left == self._entered:
                    self._waited_ns += time.monotonic_ns() - self._waits_from_ns
            self._write(is_beat=False)

    def begin_transfer(self, operation: str) -> None:
        """Record that a transfer between two ranks begins, which the others do not have."""
        with self._lock:
            self._operation = operation.encode("ascii", "replace")[:_OPERATION_BYTES]
            self._write()

    def record_vote(self, took_ns: int) -> None:
        """Record that the vote of a step is taken, and with it every collective before it."""
        with self._lock:
            if self._left < self._entered:
                self._left = self._entered
                self._waited_ns += time.monotonic_ns() - self._waits_from_ns
            self._latency_ns = took_ns
            self._write()

    def record_data_wait(self, took_ns: int) -> None:
        """Record how long the loader took for a batch."""
        with self._lock:
            self._data_ns += took_ns
            self._write()

    def _write(self, *, is_beat: bool = True) -> None:
        # An odd sequence number marks a record under construction (seqlock), so a reader never
        # takes half a record for a whole one, even if the writer was killed in between.
        if is_beat:
            self._beat_ns = time.monotonic_ns()
        _SEQUENCE.pack_into(self._map, 0, self._sequence + 1)
        _RECORD.pack_into(
            self._map,
            0,
            self._sequence + 1,
            self._pid,
            self._phase,
            self.generation,
            self._step,
            self._entered,
            self._left,
            self._beat_ns,
            self._stepped_ns,
            self._waited_ns,
            self._data_ns,
            self._latency_ns,
            self._operation,
        )
        self._sequence += 2
        _SEQUENCE.pack_into(self._map, 0, self._sequence)


def _map_file(path: Path) -> mmap.mmap:
    """Map the file of a heartbeat, or memory that nobody reads where the disk has no room."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # A page without a block would end this process by SIGBUS once the disk is full.
            os.posix_fallocate(descriptor, 0, _SIZE)
            return mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _log.warning(f"no heartbeat, so that no hang is found: {path}: {error.strerror}")
        return mmap.mmap(-1, _SIZE)


class HeartbeatReader:
    """Reader of another process's heartbeat."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: Heartbeat | None = None

    def read(self) -> Heartbeat | None:
        """Read the newest whole record, or keep the previous one; None before the first."""
        try:
            data, second = (self._path.read_bytes()[: _RECORD.size] for _ in range(2))
        except FileNotFoundError:
            return self._last
        # The writer may have begun between the sequence and what follows it.
        if len(data) < _RECORD.size or data != second:
            return self._last
        sequence, pid, phase, *numbers, operation = _RECORD.unpack(data)
        if sequence and sequence % 2 == 0:
            text = operation.rstrip(b"\0").decode("ascii", "replace")
            values = (*numbers, text)
            self._last = Heartbeat(pid, Phase(phase), *values)
        return self._last

    @classmethod
    def of(cls, folder: Path, local_rank: int) -> Self:
        """Open the heartbeat of a local rank in the folder of its attempt."""
        return cls(folder / f"heartbeat-{local_rank}")


def _rank_name() -> str:
    rank, _ = read_rank(os.environ)
    return str(rank) if rank is not None else f"pid{os.getpid()}"


def rank_of_file(path: Path) -> int | None:
    """Parse the rank from a heartbeat's file name; None for a process without a rank."""
    number = path.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else None


def stacks_file(folder: Path, local_rank: int) -> Path:
    """Return the file into which a local rank prints its stacks on SIGUSR2."""
    return folder / f"stacks-{local_rank}.txt"
