"""Faults injected from outside: real signals to real processes of a local run.

Only the local engine's containers are within reach; they are found by the marker in their
environment. Times are seconds since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import psutil
from pydantic import Field

from storage.frozen_model import FrozenModel
from training.journal.history import RunHistory
from training.processes import MARKER, is_tracker, oldest_first, signal_all


class Victim(StrEnum):
    """What is killed: a worker, a whole node, or what a node runs beside its workers."""

    RANK = "rank"
    NODE = "node"
    AGENT = "agent"
    FORK_SERVER = "fork_server"
    CHECKPOINT_SERVER = "checkpoint_server"
    COORDINATOR = "coordinator"  # on the first node alone


class Kill(FrozenModel):
    """SIGKILL from outside, once."""

    victim: Victim = Field(description="what is killed")
    index: int = Field(0, ge=0, description="global rank, else the member of the placement")
    step: int = Field(ge=1, description="completed step from which on it happens")

    def __str__(self) -> str:
        """For reports."""
        return f"kill of {self.victim.replace('_', ' ')} {self.index} at step {self.step}"


@dataclass(slots=True)
class KillInjector:
    """Kills processes of a run, each victim once.

    Attributes:
        processes: of the run.
        kills: what to kill.
        fired_s: when each was hit, by its index in `kills`.
        num_due: how often each was due while all processes ran, likewise.
    """

    processes: LocalRun
    kills: tuple[Kill, ...]
    fired_s: dict[int, float] = field(default_factory=dict)
    num_due: Counter[int] = field(default_factory=Counter)

    def inject(self, history: RunHistory, step: int, *, is_running: bool = True) -> None:
        """Kill what is due; a victim that is not there just now is due again at the next call.

        Args:
            history: of the run so far.
            step: the newest completed one.
            is_running: whether processes run on every member.
        """
        for number, kill in enumerate(self.kills):
            if kill.step > step or number in self.fired_s:
                continue
            self.num_due[number] += is_running
            if self._hit(history, kill):
                self.fired_s[number] = time.time()

    def _hit(self, history: RunHistory, kill: Kill) -> bool:
        if kill.victim is Victim.RANK:
            return bool(self.processes.kill_rank(kill.index))
        if kill.victim is Victim.COORDINATOR:
            return bool(self.processes.kill_part(kill.victim))
        placed = history.placement
        if placed is None or kill.index >= len(placed.members):
            return False
        node = placed.members[kill.index].node
        if kill.victim is Victim.NODE:
            return bool(self.processes.kill_node(node))
        return bool(self.processes.kill_part(kill.victim, node))


class LocalRun:
    """The processes of a run under the local engine."""

    def __init__(self, home: Path, run_id: str) -> None:
        self._nodes = str(home / "runs" / run_id / "nodes") + "/"

    def processes(self, node: str | None = None) -> list[psutil.Process]:
        """All processes of the run, or of one of its nodes."""
        prefix = self._nodes + (f"{node}/" if node else "")
        return [p for p, environ in _environments() if environ.get(MARKER, "").startswith(prefix)]

    def rank(self, rank: int) -> list[psutil.Process]:
        """The worker process of a rank; its helpers inherit the rank but not the session."""
        # A forked one shows the environment of its fork server, and has the rank in its name.
        return [
            process
            for process, environ in _environments()
            if environ.get(MARKER, "").startswith(self._nodes)
            and str(rank) in (environ.get("RANK"), _name(process).removeprefix("rank-"))
            and _leads_session(process)
        ]

    def part(self, part: Victim, node: str | None = None) -> list[psutil.Process]:
        """The processes of a kind, on all nodes or on one of them."""
        return [process for process in self.processes(node) if _part_of(process) is part]

    def kill_rank(self, rank: int) -> list[int]:
        """SIGKILL one worker. Returns the pids that were hit, as the next two do."""
        return _kill(self.rank(rank))

    def kill_part(self, part: Victim, node: str | None = None) -> list[int]:
        """SIGKILL the processes of a kind, on all nodes or on one of them."""
        return _kill(self.part(part, node))

    def kill_node(self, node: str) -> list[int]:
        """SIGKILL everything on a node, its agent first: the machine is gone.

        Resource trackers end by themselves then, and remove the semaphores that would have gone
        with the machine.
        """
        processes = oldest_first(self.processes(node))
        return _kill([one for one in processes if not is_tracker(one)])


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


def _part_of(process: psutil.Process) -> Victim | None:
    try:
        name, command = process.name(), process.cmdline()
    except psutil.NoSuchProcess:
        return None
    if name == Victim.COORDINATOR:
        return Victim.COORDINATOR
    modules = {
        "training.agent": Victim.AGENT,
        "training.agent.checkpoint_server": Victim.CHECKPOINT_SERVER,
    }
    # What is forked from a fork server has its command line, and a name of its own.
    if name.startswith("python"):
        modules["training.agent.fork_server"] = Victim.FORK_SERVER
    return next((part for module, part in modules.items() if module in command), None)


def _leads_session(process: psutil.Process) -> bool:
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return int(fields.rpartition(")")[2].split()[3]) == process.pid
