"""What still runs when a command has exited with 0, such as a torchrun in the background.

Nobody waits for it, and the container takes it along. What only needs a moment to end gets it:
loader workers of PyTorch look every 5 s whether their rank lives. Times are seconds of
CLOCK_MONOTONIC.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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

LEFT_S = 10.0
LOOK_S = 0.5  # a look reads /proc of the whole node
MAX_NAME_CHARS = 160


class Group(Protocol):
    """What is asked of the processes of an attempt on this node.

    Attributes:
        marker: of the container.
        spare: pids of the container that are not the attempt's.
    """

    marker: str
    spare: frozenset[int]

    @property
    def secrets(self) -> frozenset[str]:
        """Not to be shown with a command line."""


@dataclass(slots=True)
class Leftovers:
    """Looks at what the command of a node has left running.

    Attributes:
        processes: what did not end by itself.
    """

    processes: tuple[LeftProcess, ...] = ()
    _since_s: float | None = None
    _looked_s: float = float("-inf")

    def is_awaited(self, command: CommandRanks | None, group: Group) -> bool:
        """Whether something is left that may still end by itself; asked until it is not.

        Args:
            command: that has exited with 0; None: nothing is waited for.
            group: that it belongs to.
        """
        if command is None:
            return False
        now_s = time.monotonic()
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s - self._looked_s < LOOK_S:
            return True
        self._looked_s = now_s
        left = list(_of_command(group.marker, group.spare))
        if left and now_s - self._since_s < LEFT_S:
            return True
        beating = command.heartbeats().keys()
        self.processes = tuple(
            LeftProcess(
                pid=process.pid,
                name=mask_text(_name(process), group.secrets)[:MAX_NAME_CHARS],
                trains=process.pid in beating or _trains(process, command.helpers),
            )
            for process in left
        )
        return False


def _of_command(marker: str, spare: Collection[int]) -> Iterator[psutil.Process]:
    """What a command has started and left, without what ends by itself after all others."""
    for process in container_processes(marker, spare=spare):
        try:
            # The agent's own tools are in its session; a command begins one of its own.
            is_agents = os.getsid(process.pid) == os.getsid(0)
        except ProcessLookupError:
            continue
        if not is_agents and not is_tracker(process):
            yield process


def _trains(process: psutil.Process, helpers: Collection[int]) -> bool:
    """Whether it is a rank or starts ranks; what a rank has started inherits its variables."""
    rank, _ = read_rank(environment_of(process.pid))
    return _is_launcher(process) or (rank is not None and process.pid not in helpers)


def _is_launcher(process: psutil.Process) -> bool:
    words = _words(process)
    if not words or LAUNCHER.search(words[0]):
        return bool(words)
    program = Path(words[0]).name
    runs_scripts = program.startswith("python") or program in SHELLS
    return runs_scripts and any(LAUNCHER.search(word) for word in words[1:3])


def _name(process: psutil.Process) -> str:
    return f"{' '.join(_words(process)) or 'process'} (pid {process.pid})"


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
