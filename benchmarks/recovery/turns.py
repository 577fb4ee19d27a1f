"""Two groups of processes that train in turns, a block of steps each.

So they meet the same machine: one waits without using it while the other is measured. A rank
waits at the first step of each block for a line in a pipe of its own. Times are seconds.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

from benchmarks.recovery.measuring import Logs
from benchmarks.recovery.processes import members, sweep
from benchmarks.recovery.running import NotRunError, start_child
from benchmarks.recovery.workload import Workload, pipe_path

POLL_S = 0.02
TURN_TIMEOUT_S = 300.0
WORKER = "rank-"


@dataclass(slots=True)
class Group:
    """The processes of one contender.

    Attributes:
        workload: of all of them.
        child: runs the contender.
    """

    workload: Workload
    child: subprocess.Popen[str]
    _pipes: list[int] = field(default_factory=list)
    _turns: int = 0

    @classmethod
    def start(cls, kind: str, name: str, workload: Workload) -> Self:
        """Start a contender; its ranks come to their first turn and wait."""
        for rank in range(workload.num_ranks):
            os.mkfifo(pipe_path(workload.folder, rank))
        return cls(workload, start_child(kind, name, workload))

    def await_ranks(self) -> None:
        """Wait until all ranks wait.

        Raises:
            NotRunError: they do not come.
        """
        for rank in range(self.workload.num_ranks):
            self._pipes.append(self._open(pipe_path(self.workload.folder, rank)))

    def take_turn(self) -> None:
        """Have the group train a block, and wait for its end.

        Raises:
            NotRunError: it does not end.
        """
        assert self.workload.block_steps is not None  # noqa: S101 or no rank would wait
        try:
            for pipe in self._pipes:
                os.write(pipe, b"\n")
        except BrokenPipeError as exc:
            self.finish()
            raise NotRunError("failed: a rank was restarted") from exc
        self._turns += 1
        wanted = self._turns * self.workload.block_steps
        until_s = time.monotonic() + TURN_TIMEOUT_S
        while not self._has_done(wanted):
            self._check(until_s)
            time.sleep(POLL_S)

    def finish(self) -> Logs:
        """Wait for the end, and read the logs.

        Raises:
            NotRunError: it failed.
        """
        until_s = time.monotonic() + TURN_TIMEOUT_S
        while self.child.poll() is None:
            self._check(until_s)
            time.sleep(POLL_S)
        self._check(until_s)
        return Logs.of(self.workload.folder)

    def close(self) -> None:
        """End all processes."""
        for pipe in self._pipes:
            os.close(pipe)
        self.child.kill()
        self.child.wait()
        sweep(self.workload.folder)

    def helpers_cpu_s(self) -> float:
        """CPU time of all processes that train nothing: who starts and watches the ranks."""
        total = 0.0
        for process in members(self.workload.folder):
            with suppress(psutil.Error):
                if not process.name().startswith(WORKER):
                    times = process.cpu_times()
                    total += times.user + times.system
        return total

    def _open(self, path: Path) -> int:
        until_s = time.monotonic() + TURN_TIMEOUT_S
        while True:
            with suppress(OSError):  # no rank reads yet
                return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            self._check(until_s)
            time.sleep(POLL_S)

    def _has_done(self, step: int) -> bool:
        counts = [
            path.read_bytes().count(b"\n") for path in self.workload.folder.glob("steps-*.jsonl")
        ]
        return len(counts) == self.workload.num_ranks and min(counts) >= step

    def _check(self, until_s: float) -> None:
        code = self.child.poll()
        if code:
            _, errors = self.child.communicate()
            last = errors.strip().splitlines()[-1:] or [f"exit {code}"]
            raise NotRunError(last[0][:200])
        if time.monotonic() > until_s:
            raise NotRunError(f"failed: nothing for {TURN_TIMEOUT_S:g} s")


def in_turns(groups: Mapping[str, Group], *, rounds: int) -> None:
    """Give every group so many turns, forwards and backwards.

    Raises:
        NotRunError: one of them failed.
    """
    names: Sequence[str] = list(groups)
    for _ in range(rounds):
        for name in names:
            groups[name].take_turn()
        names = names[::-1]
