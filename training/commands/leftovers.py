"""Processes that still run when a command has exited with 0, such as a torchrun in the background.

No one waits for them, and they end with the container. A process that only needs a moment to end
gets it: loader workers of PyTorch check every 5 s whether their rank lives. Times are seconds of
CLOCK_MONOTONIC.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from perdure.training.commands.ranks import SHELLS, CommandRanks
from perdure.training.masking import mask_text
from perdure.training.processes import (
    LAUNCHER,
    container_processes,
    environment_of,
    is_tracker,
    read_rank,
)
from perdure.training.wire.agent_status import LeftProcess

WAIT_S = 10.0
POLL_S = 0.5  # a poll reads /proc of the whole node
MAX_NAME_CHARS = 160


@dataclass(slots=True)
class Leftovers:
    """Processes that the command of a node has left running, once it has waited for them.

    Attributes:
        processes: processes that did not end by themselves.
    """

    processes: tuple[LeftProcess, ...] = ()
    _since_s: float | None = None
    _polled_s: float = float("-inf")

    def is_awaited(
        self,
        command: CommandRanks | None,
        marker: str,
        spare: frozenset[int],
        secrets: frozenset[str],
    ) -> bool:
        """Whether a process remains that may still end by itself; ask until none does.

        Args:
            command: command that has exited with 0; None: there is nothing to wait for.
            marker: mark of all processes of the container.
            spare: pids of the container that do not belong to the attempt.
            secrets: values that must not be shown with a command line.
        """
        if command is None:
            return False
        now_s = time.monotonic()
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s - self._polled_s < POLL_S:
            return True
        self._polled_s = now_s
        remaining = list(_command_processes(marker, spare))
        if remaining and now_s - self._since_s < WAIT_S:
            return True
        beating = command.heartbeats().keys()
        self.processes = tuple(
            LeftProcess(
                pid=process.pid,
                name=mask_text(_name(process), secrets)[:MAX_NAME_CHARS],
                trains=process.pid in beating or _trains(process, command.helpers),
            )
            for process in remaining
        )
        return False


def _command_processes(marker: str, spare: Collection[int]) -> Iterator[psutil.Process]:
    """List what a command has left running, without resource trackers, which end by themselves."""
    for process in container_processes(marker, spare=spare):
        try:
            # The agent's own tools are in its session; a command begins another.
            is_agents = os.getsid(process.pid) == os.getsid(0)
        except ProcessLookupError:
            continue
        if not is_agents and not is_tracker(process):
            yield process


def _trains(process: psutil.Process, helpers: Collection[int]) -> bool:
    """Whether it is a rank or starts ranks; helpers of a rank inherit its variables."""
    rank, _ = read_rank(environment_of(process.pid))
    return _is_launcher(process) or (rank is not None and process.pid not in helpers)


def _is_launcher(process: psutil.Process) -> bool:
    words = _command_line(process)
    if not words or LAUNCHER.search(words[0]):
        return bool(words)
    program = Path(words[0]).name
    runs_scripts = program.startswith("python") or program in SHELLS
    return runs_scripts and any(LAUNCHER.search(word) for word in words[1:3])


def _name(process: psutil.Process) -> str:
    return f"{' '.join(_command_line(process)) or 'process'} (pid {process.pid})"


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
