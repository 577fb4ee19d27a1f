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

from training.processes import MARKER

POLL_S = 0.05


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
