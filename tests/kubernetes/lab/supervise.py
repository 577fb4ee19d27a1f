"""Keeps programs running as the first process of a process namespace does. Times are seconds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.kubernetes.lab.programs import Program

PERIOD_S = 0.05
PAUSE_S = 0.5  # between two starts of a program that ends by itself


class Supervisor:
    """Starts its programs again when they end, and collects the orphans that come to it.

    Args:
        logs: folder of what the programs print, a file each.
        is_off: whether a program, by its name, is to stay ended.
    """

    def __init__(self, logs: Path, *, is_off: Callable[[str], bool] = lambda _: False) -> None:
        self._logs = logs
        self._is_off = is_off
        self._programs: dict[str, Program] = {}
        self._pids: dict[str, int] = {}
        self._started_s: dict[str, float] = {}
        logs.mkdir(parents=True, exist_ok=True)

    def add(self, program: Program) -> None:
        """Keep this program running, too, from now on."""
        self._programs[program.name] = program
        self._turn()

    def run(self) -> None:
        """Never returns."""
        while True:
            self._turn()
            time.sleep(PERIOD_S)

    def _turn(self) -> None:
        self._collect()
        for name, program in self._programs.items():
            if self._is_off(name):
                self._kill(name)
            elif name not in self._pids:
                self._start(program)

    def _start(self, program: Program) -> None:
        now_s = time.monotonic()
        if now_s - self._started_s.get(program.name, -PAUSE_S) < PAUSE_S:
            return
        log = str(self._logs / f"{program.name}.log")
        self._pids[program.name] = os.posix_spawnp(
            program.command[0],
            program.command,
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
        self._started_s[program.name] = now_s

    def _kill(self, name: str) -> None:
        if name in self._pids:
            os.kill(self._pids[name], signal.SIGKILL)

    def _collect(self) -> None:
        while self._pids:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._pids = {name: own for name, own in self._pids.items() if own != pid}
