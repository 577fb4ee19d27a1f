"""Processes of one run: started with their output in files, watched, and all ended in the end.

Times are seconds.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from perdure.training.processes import MARKER, container_processes, is_tracker, sort_by_start

POLL_S = 0.05
CONNECTION_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Programs:
    """What was started for a run.

    Attributes:
        folder: for their output.
        variables: that all of them get.
    """

    folder: Path
    variables: Mapping[str, str]
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, command: Sequence[str], **variables: str) -> None:
        """Start a program; its output goes to a file of its name."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                command,
                env={**os.environ, **self.variables, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start_on(self, node: str, name: str, command: Sequence[str], **variables: str) -> None:
        """Likewise, as a part of a node: what the node's name marks is lost together."""
        self.start(name, command, **{MARKER: str(self.folder / node), **variables})

    def await_connection(self, name: str, port: int) -> None:
        """Wait until a program is connected to a port of this machine.

        Raises:
            RuntimeError: it has ended, or is not after CONNECTION_TIMEOUT_S.
        """
        until_s = time.monotonic() + CONNECTION_TIMEOUT_S
        process = psutil.Process(self._running[name].pid)
        while not _is_connected(process, port):
            if self._running[name].poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"{name} does not connect: {self._last_line(name)}")
            time.sleep(POLL_S)

    def wait(self, *, is_fine: Callable[[str, int], bool], but: Sequence[str] = ()) -> None:
        """Wait until all have ended, those in `but` left aside.

        Raises:
            RuntimeError: one has ended as it should not: `is_fine` is asked with name and code.
        """
        waiting = {n: p for n, p in self._running.items() if n not in but}
        while waiting:
            for name, process in list(waiting.items()):
                code = process.poll()
                if code is not None:
                    del waiting[name]
                    if not is_fine(name, code):
                        raise RuntimeError(f"{name} ended with {code}: {self._last_line(name)}")
            time.sleep(POLL_S)

    def _last_line(self, name: str) -> str:
        text = (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        errors = [line for line in text.splitlines() if "Error" in line]
        return next(iter(errors), "see its log")[:200]


def _is_connected(process: psutil.Process, port: int) -> bool:
    with suppress(psutil.Error):
        connections = process.net_connections("tcp")
        return any(c.raddr and c.raddr.port == port and c.status == "ESTABLISHED"
                   for c in connections)  # fmt: skip
    return False


def members(folder: Path) -> Iterator[psutil.Process]:
    """What belongs to a run: every process that its folder marks, in its environment."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if Path(process.environ().get(MARKER, "/")).is_relative_to(folder):
                yield process


def sweep(folder: Path) -> None:
    """Kill whatever belongs to a run."""
    for process in members(folder):
        with suppress(psutil.Error):
            process.kill()


def node_of_this_process() -> list[int]:
    """Pids of all others on its node, the oldest first, which is the agent.

    Resource trackers are left out: they end by themselves, and remove semaphores that would have
    gone with the machine.
    """
    others = sort_by_start(container_processes(os.environ[MARKER]))
    return [process.pid for process in others if not is_tracker(process)]


def module(name: str, *arguments: str) -> list[str]:
    """The command line of a module of ours."""
    return [sys.executable, "-m", f"benchmarks.recovery.{name}", *arguments]


def beside_python(name: str) -> str:
    """A program that was installed with this Python's packages."""
    return str(Path(sys.executable).parent / name)


def free_ports(count: int) -> int:
    """The first of so many neighbouring free ports."""
    for first in range(21_000, 29_000, count):
        with suppress(OSError):
            for port in range(first, first + count):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", port))
            return first
    raise OSError("no free ports")
