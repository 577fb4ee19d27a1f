"""Faults made on purpose: real signals to real processes of a local run.

Only the local engine's containers can be hurt from here; they are found by the marker in
their environment. Every injection returns what it hit, so that a drill can prove it fired.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import psutil

from training.processes import MARKER, signal_all


class Part(StrEnum):
    """What a node runs beside its workers."""

    AGENT = "agent"
    FORK_SERVER = "fork_server"
    CHECKPOINT_SERVER = "checkpoint_server"
    COORDINATOR = "coordinator"  # on the first node alone


@dataclass(frozen=True, slots=True)
class Injection:
    """One fault: when, and what is done. `hurt` returns the pids that were hit."""

    at_step: int
    name: str
    hurt: Callable[[], list[int]]


@dataclass(slots=True)
class Injector:
    """Fires injections, each once, when the run reaches their step.

    Attributes:
        fired: pids hit, by the injection's name.
    """

    injections: list[Injection]
    fired: dict[str, list[int]] = field(default_factory=dict)

    def on_step(self, step: int) -> None:
        """Fire what is due."""
        for injection in self.injections:
            if step >= injection.at_step and injection.name not in self.fired:
                self.fired[injection.name] = injection.hurt()


class LocalRun:
    """The processes of a run under the local engine, as a saboteur sees them."""

    def __init__(self, home: Path, run_id: str) -> None:
        self._nodes = str(home / "runs" / run_id / "nodes") + "/"

    def processes(self, node: str | None = None) -> list[psutil.Process]:
        """All processes of the run, or of one of its nodes."""
        prefix = self._nodes + (f"{node}/" if node else "")
        return [p for p, environ in _environments() if environ.get(MARKER, "").startswith(prefix)]

    def rank(self, rank: int) -> list[psutil.Process]:
        """The worker process of a rank; its helpers inherit the rank but not the session."""
        # A forked one shows the environment of its fork_server, and has the rank in its name.
        return [
            process
            for process, environ in _environments()
            if environ.get(MARKER, "").startswith(self._nodes)
            and str(rank) in (environ.get("RANK"), _name(process).removeprefix("rank-"))
            and _leads_session(process)
        ]

    def part(self, part: Part, node: str | None = None) -> list[psutil.Process]:
        """The processes of a kind, on all nodes or on one of them."""
        return [process for process in self.processes(node) if _part_of(process) is part]

    def kill_rank(self, rank: int) -> list[int]:
        """SIGKILL one worker."""
        return _kill(self.rank(rank))

    def kill_part(self, part: Part, node: str | None = None) -> list[int]:
        """SIGKILL the processes of a kind, on all nodes or on one of them."""
        return _kill(self.part(part, node))

    def kill_node(self, node: str) -> list[int]:
        """SIGKILL everything on a node, its agent first: the machine is gone."""
        processes = sorted(self.processes(node), key=lambda p: p.pid)
        return _kill(processes)


def _kill(processes: list[psutil.Process]) -> list[int]:
    signal_all(processes, signal.SIGKILL)
    return [process.pid for process in processes]


def _environments() -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process, process.environ()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _part_of(process: psutil.Process) -> Part | None:
    try:
        name, command = process.name(), process.cmdline()
    except psutil.NoSuchProcess:
        return None
    if name == Part.COORDINATOR:
        return Part.COORDINATOR
    modules = {
        "training.agent": Part.AGENT,
        "training.agent.checkpoint_server": Part.CHECKPOINT_SERVER,
    }
    # What is forked from a fork server has its command line, and a name of its own.
    if name.startswith("python"):
        modules["training.agent.fork_server"] = Part.FORK_SERVER
    return next((part for module, part in modules.items() if module in command), None)


def _leads_session(process: psutil.Process) -> bool:
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return int(fields.rpartition(")")[2].split()[3]) == process.pid
