"""The processes of a command: which of them are ranks, and what each is doing.

A launcher starts its ranks itself, in ways that the agent does not know. A process is a rank when
its environment has a number that its parent's has not (torchrun, msrun, mpirun), or when it writes
a heartbeat. The index of the node is never taken for a rank. Times are seconds of
CLOCK_MONOTONIC.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from perdure.training.liveness.heartbeat import Heartbeat, HeartbeatReader, rank_of_file
from perdure.training.processes import (
    StacksTarget,
    environment_of,
    process_state,
    read_rank,
    sort_by_start,
)

LOOK_S = 5.0  # a look reads /proc of the whole node
STOPPED = frozenset("Tt")
ENDED = "Z"
SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh"})


@dataclass(frozen=True, slots=True)
class CommandProcess:
    """One process below a command, or the command's own.

    Attributes:
        rank: of itself or of what started it; None: of no rank.
        is_rank: whether it is the rank, and not a helper of it.
    """

    pid: int
    name: str
    rank: int | None
    local_rank: int | None
    is_rank: bool
    state: str

    @property
    def text(self) -> str:
        """What it is, for people."""
        of = f" of rank {self.rank}" if self.rank is not None else ""
        return f"process {self.pid} ({self.name}){of}"


@dataclass(frozen=True, slots=True)
class RankReading:
    """A rank of a command; `beat` is None where it writes no heartbeat."""

    pid: int
    rank: int | None
    local_rank: int | None
    state: str
    beat: Heartbeat | None


@dataclass(slots=True)
class CommandRanks:
    """Reads the processes and heartbeats of one command.

    Attributes:
        pids: of the processes that the agent started.
        folder: of the heartbeats.
        helpers: pids of what ranks had started, as of the last look at the living command.
    """

    pids: Sequence[int]
    folder: Path
    helpers: frozenset[int] = frozenset()
    _looked_s: float = float("-inf")
    _processes: list[CommandProcess] = field(default_factory=list)
    _readers: dict[Path, HeartbeatReader] = field(default_factory=dict)
    _elsewhere: set[int] = field(default_factory=set)

    def processes(self, *, age_s: float = LOOK_S) -> list[CommandProcess]:
        """The command's processes that live, parents first, as of a look at most this old."""
        if time.monotonic() - self._looked_s > age_s:
            self._processes = [process for pid in self.pids for process in _below(pid)]
            self._looked_s = time.monotonic()
            self.helpers = _helpers(self._processes) if self._processes else self.helpers
        now = (replace(process, state=process_state(process.pid)) for process in self._processes)
        return [process for process in now if process.state != ENDED]

    def stopped(self) -> list[CommandProcess]:
        """Those that a signal has stopped, by now."""
        return [process for process in self.processes(age_s=0.0) if process.state in STOPPED]

    def heartbeats(self) -> dict[int, Heartbeat]:
        """The newest heartbeat of every process that lives and writes one, by its pid."""
        return {b.pid: b for _, b in self._beats() if process_state(b.pid) != ENDED}

    def rank_of(self, pid: int) -> int | None:
        """The rank of a process that writes a heartbeat."""
        return next((rank for rank, beat in self._beats() if beat.pid == pid), None)

    def ranks(self) -> list[RankReading]:
        """Every rank that is known, by its number; one that has ended as its heartbeat has it."""
        beats = list(self._beats())
        processes = self._processes_of(beats)
        by_pid = {process.pid: process for process in processes}
        leading = {process.rank: process for process in processes if process.is_rank}
        readings: dict[int | str, RankReading] = {}
        for process in leading.values():
            readings[process.rank if process.rank is not None else f"p{process.pid}"] = RankReading(
                process.pid, process.rank, process.local_rank, _worst(process, processes), None
            )
        for named, beat in beats:
            writer = by_pid.get(beat.pid)
            rank = writer.rank if writer is not None and writer.rank is not None else named
            led = leading.get(rank) if rank is not None else None
            state = process_state(beat.pid)
            if writer is None and led is not None:
                continue  # of a program that the rank ran before
            readings[rank if rank is not None else f"p{beat.pid}"] = RankReading(
                beat.pid,
                rank,
                led.local_rank if led is not None else None,
                _worst(led, processes) if led is not None else state,
                beat,
            )
        return sorted(
            readings.values(), key=lambda reading: (reading.rank is None, reading.rank, reading.pid)
        )

    def _processes_of(self, beats: Sequence[tuple[int | None, Heartbeat]]) -> list[CommandProcess]:
        """Those that live; a process may have written its first heartbeat since the last look."""
        processes = self.processes()
        new = (
            {beat.pid for _, beat in beats}
            - {process.pid for process in processes}
            - self._elsewhere
        )
        if new:
            processes = self.processes(age_s=0.0)
            # Those that have ended, or have left the command's tree, are not looked for again.
            self._elsewhere |= new - {process.pid for process in processes}
        return processes

    def stacks_targets(self) -> list[StacksTarget]:
        """All of its processes, those that are stopped first, then the ranks."""
        processes = self.processes(age_s=0.0)
        first = sorted(
            processes, key=lambda process: (process.state not in STOPPED, not process.is_rank)
        )
        return [
            StacksTarget(process.rank, process.local_rank, process.pid, None, name=_title(process))
            for process in first
        ]

    def _beats(self) -> Iterator[tuple[int | None, Heartbeat]]:
        with contextlib.suppress(OSError):
            for path in sorted(self.folder.glob("heartbeat-*")):
                beat = self._readers.setdefault(path, HeartbeatReader(path)).read()
                if beat is not None:
                    yield rank_of_file(path), beat


def _helpers(processes: Sequence[CommandProcess]) -> frozenset[int]:
    """What belongs to a rank; the program that a shell with a rank's variables runs is the rank."""
    led = {process.rank for process in processes if process.is_rank and process.name not in SHELLS}
    return frozenset(
        process.pid for process in processes if process.rank in led and not process.is_rank
    )


def _title(process: CommandProcess) -> str:
    if process.is_rank:
        return f"stacks of rank {process.rank}, process {process.pid} ({process.name})"
    return f"stacks of {process.text}"


def _worst(rank: CommandProcess, processes: Sequence[CommandProcess]) -> str:
    """The state of a rank: stopped, when one of its helpers is."""
    states = [rank.state, *(process.state for process in processes if process.rank == rank.rank)]
    return next((state for state in states if state in STOPPED), rank.state)


def _below(pid: int) -> Iterator[CommandProcess]:
    """A process and what descends from it, parents first."""
    try:
        first = psutil.Process(pid)
        below = first.children(recursive=True)
    except psutil.NoSuchProcess:
        return
    places: dict[int, tuple[int | None, int | None]] = {}
    for process in (first, *sort_by_start(below)):
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = places.get(process.ppid(), (None, None))
            place = read_rank(environment_of(process.pid))
            rank, local_rank = places[process.pid] = place if place[0] is not None else parent
            is_rank = rank is not None and rank != parent[0]
            state = process_state(process.pid)
            yield CommandProcess(process.pid, process.name(), rank, local_rank, is_rank, state)
