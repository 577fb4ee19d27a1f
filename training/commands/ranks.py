"""The processes of a command: which of them are ranks, and what each is doing.

A launcher starts its ranks itself, in ways that the agent does not know. A process is a rank when
its environment has a number that its parent's has not (torchrun, msrun, mpirun), or when it writes
a heartbeat. The index of the node is never taken for a rank. Times are seconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from perdure.training.liveness.culprit import STOPPED
from perdure.training.liveness.heartbeat import Heartbeat, HeartbeatReader, rank_of_file
from perdure.training.processes import (
    StacksTarget,
    environment_of,
    process_state,
    read_rank,
    read_world_size,
    sort_by_start,
)
from perdure.training.wire.agent_status import FormerRank, Pulse, RankStatus

POLL_S = 5.0  # a poll reads /proc of the whole node
START_POLL_S = 1.0  # until ranks are known, in the first minute: they may be there for seconds
START_S = 60.0
ENDED = "Z"
SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh"})


@dataclass(frozen=True, slots=True)
class CommandProcess:
    """One process below a command, or the command's own.

    Attributes:
        rank: rank of the process or of what started it; None: it belongs to no rank.
        is_rank: whether it is the rank, and not a helper of it.
        state: the kernel's letter.
        world_size: number of ranks that its launcher has told it of.
    """

    pid: int
    name: str
    rank: int | None
    local_rank: int | None
    is_rank: bool
    state: str
    world_size: int | None = None

    @property
    def text(self) -> str:
        """The process for people."""
        rank = f" of rank {self.rank}" if self.rank is not None else ""
        return f"process {self.pid} ({self.name}){rank}"


@dataclass(slots=True)
class CommandRanks:
    """Processes and heartbeats of a command.

    Attributes:
        pids: processes that the agent started.
        folder: folder of the heartbeats.
        helpers: pids of what ranks had started, as of the last poll of the living command.
        known_pids: pids of all processes that a poll has ever found.
        world_size: of the largest gang so far; 0: none is known.
    """

    pids: Sequence[int]
    folder: Path
    helpers: frozenset[int] = frozenset()
    known_pids: set[int] = field(default_factory=set)
    world_size: int = 0
    _began_s: float = field(default_factory=time.monotonic)
    _polled_s: float = float("-inf")
    _processes: list[CommandProcess] = field(default_factory=list)
    _readers: dict[Path, HeartbeatReader] = field(default_factory=dict)
    _foreign_pids: set[int] = field(default_factory=set)
    _leaders: dict[int, CommandProcess] = field(default_factory=dict)
    _former: dict[int, FormerRank] = field(default_factory=dict)

    def former(self, *, is_over: bool = False) -> tuple[FormerRank, ...]:
        """List the ranks that the launcher started whose processes have ended.

        Args:
            is_over: whether the launcher itself has ended.
        """
        if is_over and self._leaders.keys() - self._former.keys():
            self.processes(age_s=0.0)
        return tuple(self._former[rank] for rank in sorted(self._former))

    def processes(self, *, age_s: float | None = None) -> list[CommandProcess]:
        """List the living processes, parents first, as of a poll at most this old."""
        age_s = self._poll_s if age_s is None else age_s
        if time.monotonic() - self._polled_s > age_s:
            self._processes = [process for pid in self.pids for process in _process_tree(pid)]
            self.known_pids.update(process.pid for process in self._processes)
            self._polled_s = time.monotonic()
            self.helpers = _helpers(self._processes) if self._processes else self.helpers
            self._note_former()
            sizes = (process.world_size or 0 for process in self._processes)
            self.world_size = max((self.world_size, *sizes))
        now = (replace(process, state=process_state(process.pid)) for process in self._processes)
        return [process for process in now if process.state != ENDED]

    @property
    def _poll_s(self) -> float:
        is_start = not self.world_size and time.monotonic() - self._began_s < START_S
        return START_POLL_S if is_start else POLL_S

    def _note_former(self) -> None:
        """Note the ranks that have ended since the last poll; a launcher may start them again."""
        leaders = {
            process.rank: process
            for process in self._processes
            if process.is_rank and process.rank is not None and process.state != ENDED
        }
        steps = [beat.step for _, beat in self._beats() if beat.step >= 0] if leaders else []
        for rank, process in self._leaders.items():
            if rank not in leaders and rank not in self._former:
                self._former[rank] = FormerRank(
                    rank=rank,
                    local_rank=process.local_rank,
                    ended_s=time.time() if leaders else None,
                    step=max(steps, default=None),
                )
        for rank in leaders:
            self._former.pop(rank, None)
        self._leaders |= leaders

    def stopped(self) -> list[CommandProcess]:
        """List the processes that a signal has stopped by now."""
        return [process for process in self.processes(age_s=0.0) if process.state in STOPPED]

    def heartbeats(self) -> dict[int, Heartbeat]:
        """Read the newest heartbeat of every process that lives and writes one, by its pid."""
        return {b.pid: b for _, b in self._beats() if process_state(b.pid) != ENDED}

    def statuses(self) -> list[RankStatus]:
        """List every known rank by its number; an ended rank is as its last heartbeat says."""
        beats = list(self._beats())
        processes = self._processes_of(beats)
        by_pid = {process.pid: process for process in processes}
        leaders = {process.rank: process for process in processes if process.is_rank}
        statuses = {
            _key(leader.rank, leader.pid): _status(
                leader.rank, leader.pid, leader.local_rank, _worst_state(leader, processes)
            )
            for leader in leaders.values()
        }
        for named, beat in beats:
            writer = by_pid.get(beat.pid)
            rank = writer.rank if writer is not None and writer.rank is not None else named
            leader = leaders.get(rank) if rank is not None else None
            if writer is None and leader is not None:
                continue  # a program that the rank ran before wrote it
            local_rank = leader.local_rank if leader is not None else None
            state = _worst_state(leader, processes) if leader else process_state(beat.pid)
            statuses[_key(rank, beat.pid)] = _status(rank, beat.pid, local_rank, state, beat)
        return sorted(statuses.values(), key=lambda rank: (rank.rank is None, rank.rank, rank.pid))

    def _processes_of(self, beats: Sequence[tuple[int | None, Heartbeat]]) -> list[CommandProcess]:
        """List living processes, also those whose first heartbeat is newer than the last poll."""
        processes = self.processes()
        pids = {process.pid for process in processes}
        new = {beat.pid for _, beat in beats} - pids - self._foreign_pids
        if new:
            processes = self.processes(age_s=0.0)
            # Processes that have ended, or have left the command's tree, are not looked for again.
            self._foreign_pids |= new - {process.pid for process in processes}
        return processes

    def stacks_targets(self) -> list[StacksTarget]:
        """List all processes: stopped ones first, then the ranks."""
        processes = self.processes(age_s=0.0)
        processes.sort(key=lambda process: (process.state not in STOPPED, not process.is_rank))
        return [StacksTarget(p.rank, p.local_rank, p.pid, None, name=_title(p)) for p in processes]

    def _beats(self) -> Iterator[tuple[int | None, Heartbeat]]:
        with contextlib.suppress(OSError):
            for path in sorted(self.folder.glob("heartbeat-*")):
                beat = self._readers.setdefault(path, HeartbeatReader(path)).read()
                if beat is not None:
                    yield rank_of_file(path), beat


def _key(rank: int | None, pid: int) -> int | str:
    return rank if rank is not None else f"p{pid}"


def _status(
    rank: int | None, pid: int, local_rank: int | None, state: str, beat: Heartbeat | None = None
) -> RankStatus:
    if beat is None:
        pulse = Pulse(entered=0, left=0, process_state=state)
        return RankStatus(rank=rank, local_rank=local_rank, pid=pid, pulse=pulse)
    return RankStatus(
        rank=rank,
        local_rank=local_rank,
        pid=pid,
        step=beat.step,
        phase=beat.phase.name.lower(),
        generation=beat.generation,
        pulse=beat.to_pulse(state),
    )


def _helpers(processes: Sequence[CommandProcess]) -> frozenset[int]:
    """List what ranks have started; the program that a rank's shell runs is the rank itself."""
    led = {p.rank for p in processes if p.is_rank and p.name not in SHELLS}
    return frozenset(p.pid for p in processes if p.rank in led and not p.is_rank)


def _title(process: CommandProcess) -> str:
    if process.is_rank:
        return f"stacks of rank {process.rank}, process {process.pid} ({process.name})"
    return f"stacks of {process.text}"


def _worst_state(rank: CommandProcess, processes: Sequence[CommandProcess]) -> str:
    """Return the state of a rank: stopped, when one of its helpers is."""
    states = [rank.state, *(process.state for process in processes if process.rank == rank.rank)]
    return next((state for state in states if state in STOPPED), rank.state)


def _process_tree(pid: int) -> Iterator[CommandProcess]:
    """List a process and its descendants, parents first."""
    try:
        first = psutil.Process(pid)
        descendants = first.children(recursive=True)
    except psutil.NoSuchProcess:
        return
    places: dict[int, tuple[int | None, int | None]] = {}
    for process in (first, *sort_by_start(descendants)):
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = places.get(process.ppid(), (None, None))
            environment = environment_of(process.pid)
            place = read_rank(environment)
            rank, local_rank = places[process.pid] = place if place[0] is not None else parent
            is_rank = rank is not None and rank != parent[0]
            state = process_state(process.pid)
            yield CommandProcess(
                process.pid,
                process.name(),
                rank,
                local_rank,
                is_rank,
                state,
                read_world_size(environment),
            )
