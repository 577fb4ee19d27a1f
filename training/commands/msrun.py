"""The processes that MindSpore's launcher has started: their logs, and their ends.

msrun starts a scheduler and the workers, each with a log of its own, and with `--join=False` it
ends at once while they train. With `--join=True` it ends the other workers once one of them has
failed, but then waits half a minute for its scheduler, which waits for the worker: ending the
scheduler lets msrun end. Times are seconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import logging
import re
import signal
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from perdure.training.processes import container_processes, environment_of, signal_all

POLL_S = 1.0  # a poll reads /proc of the whole node
MAX_POLL_S = 8.0  # of a launcher that has shown no process of msrun
ROLE, WORKER, SCHEDULER = "MS_ROLE", "MS_WORKER", "MS_SCHED"
_NUMBERS = ("RANK_ID", "MS_NODE_ID")
_TAIL_BYTES = 64 << 10
SCHEDULER_LOST = "perdure: the scheduler of msrun has ended, and its workers live"
_FAILED = re.compile(rb"Worker process \d+ exit with exception")
_STDOUT = 1
_log = logging.getLogger("perdure.agent")


@dataclass(frozen=True, slots=True)
class MsrunProcess:
    """A worker or the scheduler.

    Attributes:
        rank: None: the scheduler.
        log: its output; None where that is no file.
    """

    pid: int
    rank: int | None
    log: Path | None

    @property
    def title(self) -> str:
        """The process for people."""
        name = f"worker {self.rank}" if self.rank is not None else "scheduler"
        return f"{name} of msrun, process {self.pid}"

    @property
    def line(self) -> str:
        """The line from which the diagnosis learns which process is which worker."""
        return f"[INFO] perdure: {self.title}"


@dataclass(slots=True)
class MsrunGang:
    """What msrun has started on this node in one attempt.

    Attributes:
        marker: mark of all processes of the container.
        outputs: logs of the launcher itself, where msrun reports an end, and the agent, too.
        processes: all that were ever seen, by pid.
    """

    marker: str
    outputs: Sequence[Path]
    processes: dict[int, MsrunProcess] = field(default_factory=dict)
    _living: list[psutil.Process] = field(default_factory=list)
    _polled_s: float = float("-inf")
    _pause_s: float = POLL_S
    _is_joined: bool = True
    _has_failed: bool = False
    _is_ended: bool = False

    def poll(self, exits: Mapping[int, int], *, spare: Collection[int], is_joined: bool) -> None:
        """Look for new processes and for ends.

        Args:
            exits: exit codes of processes that the agent has adopted, by pid.
            spare: pids that do not belong to the attempt.
            is_joined: whether msrun itself still runs.
        """
        if exits.keys() & self.processes.keys():
            self._note_exits(exits)
        if not self._is_due(time.monotonic(), is_joined=is_joined):
            return
        self._living = container_processes(self.marker, spare=spare)
        for process in self._living:
            if process.pid not in self.processes:
                self._add(process.pid)
        if self.processes and not self._is_ended:
            self._end_remains(is_joined=is_joined)

    def _is_due(self, now_s: float, *, is_joined: bool) -> bool:
        """Whether to look now: each second at what msrun has started, rarely at other launchers."""
        has_left = self._is_joined and not is_joined  # its workers, if there are any, train on
        self._is_joined = is_joined
        if now_s - self._polled_s < (POLL_S if self.processes else self._pause_s) and not has_left:
            return False
        self._polled_s, self._pause_s = now_s, min(2 * self._pause_s, MAX_POLL_S)
        return True

    @property
    def has_failed(self) -> bool:
        """Whether a process ended with a failure after msrun itself had ended."""
        return self._has_failed

    @property
    def is_alive(self) -> bool:
        """Whether a worker still runs."""
        return any(self._alive(WORKER))

    @property
    def logs(self) -> list[MsrunProcess]:
        """The processes that have logs, the workers first."""
        logged = (process for process in self.processes.values() if process.log is not None)
        return sorted(logged, key=lambda process: (process.rank is None, process.rank))

    def _add(self, pid: int) -> None:
        environment = environment_of(pid)
        role = environment.get(ROLE)
        if role not in (WORKER, SCHEDULER) or _is_helper(pid, role):
            return
        numbers = [environment[name] for name in _NUMBERS if environment.get(name, "").isdecimal()]
        rank = int(numbers[0]) if role == WORKER and numbers else None
        # A helper of a worker that has ended has its variables, and msrun starts no rank twice.
        is_known = any(process.rank == rank for process in self.processes.values())
        if is_known or (role == WORKER and rank is None):
            return
        self.processes[pid] = MsrunProcess(pid, rank, _log_of(pid))

    def _alive(self, role: str) -> Iterable[psutil.Process]:
        for process in self._living:
            member = self.processes.get(process.pid)
            is_role = member is not None and (member.rank is not None) == (role == WORKER)
            if is_role and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                yield process

    def _note_exits(self, exits: Mapping[int, int]) -> None:
        for pid, code in exits.items():
            process = self.processes.get(pid)
            if process is None or code == 0 or self._is_ended:
                continue
            if process.rank is not None:
                # In msrun's own words, which it is not there to print.
                self._report(f"Worker process {pid} exit with exception. Error code: {code}.")
            self._has_failed = self._is_ended = True

    def _end_remains(self, *, is_joined: bool) -> None:
        """End those that wait in vain for others."""
        workers, schedulers = list(self._alive(WORKER)), list(self._alive(SCHEDULER))
        has_scheduler = any(process.rank is None for process in self.processes.values())
        if has_scheduler and workers and not schedulers:
            self._report(SCHEDULER_LOST.removeprefix("perdure: "))
            self._is_ended, self._has_failed = True, not is_joined
            signal_all(workers, signal.SIGKILL)
        elif schedulers and not workers and is_joined and self._has_reported_failure():
            _log.info("a worker of msrun has failed: its scheduler is ended, which waits for it")
            self._is_ended = True
            signal_all(schedulers, signal.SIGKILL)

    def _has_reported_failure(self) -> bool:
        return any(_FAILED.search(_tail(path)) for path in self.outputs)

    def _report(self, text: str) -> None:
        """Write a line for the diagnosis into the log of msrun's errors."""
        _log.warning(text)
        with self.outputs[-1].open("a") as file:
            for process in self.processes.values():
                file.write(f"{process.line}\n")
            file.write(f"perdure: {text}\n")


def _is_helper(pid: int, role: str) -> bool:
    """Whether another process of the same role has started it."""
    try:
        parent = psutil.Process(pid).ppid()
    except psutil.NoSuchProcess:
        return True
    return environment_of(parent).get(ROLE) == role


def _log_of(pid: int) -> Path | None:
    try:
        path = Path(f"/proc/{pid}/fd/{_STDOUT}").readlink()
    except OSError:
        return None
    return path if path.is_file() else None


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read()
    except OSError:
        return b""
