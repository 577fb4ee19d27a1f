"""What somebody does to a run from outside: kills its processes, has it pause and go on.

Looked at after every poll of the run's supervisor, which tells the newest step. Times are seconds
since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from pydantic import Field

from storage.model import FrozenModel
from training.health.monitor.heartbeat import Phase
from training.injection.processes import LocalRun, Part
from training.supervisor.run import Run
from training.supervisor.watch import Progress
from training.wire.requests import write_control

STANDS_FOR_S = 0.5  # a rank that went on in between would be seen


class Victim(StrEnum):
    """Who is killed."""

    RANK = "rank"
    NODE = "node"
    AGENT = Part.AGENT.value
    FORK_SERVER = Part.FORK_SERVER.value
    CHECKPOINT_SERVER = Part.CHECKPOINT_SERVER.value
    COORDINATOR = Part.COORDINATOR.value


class Kill(FrozenModel):
    """SIGKILL from outside, once."""

    victim: Victim = Field(description="who")
    index: int = Field(0, ge=0, description="global rank, else the member of the placement")
    step: int = Field(ge=1, description="completed step from which on it happens")


class RunHook(Protocol):
    """Somebody who watches a run and does something to it."""

    def see(self, run: Run, progress: Progress) -> None:
        """Look at what the supervisor has just seen."""
        ...


class NoHook:
    """Watches, and does nothing."""

    def see(self, run: Run, progress: Progress) -> None:
        """Look."""


@dataclass(slots=True)
class KillInjector:
    """Kills.

    Attributes:
        home: folder of the runs.
        kills: what to kill, each once.
        fired_s: when each was hit, by its index in `kills`.
        looks: how often each was due while all processes ran, likewise.
    """

    home: Path
    kills: tuple[Kill, ...]
    fired_s: dict[int, float] = field(default_factory=dict)
    looks: Counter[int] = field(default_factory=Counter)

    def see(self, run: Run, progress: Progress) -> None:
        """Kill what is due; a process that is not there just now is looked for again."""
        if progress.last is None:
            return
        for number, kill in enumerate(self.kills):
            if kill.step > progress.last.step or number in self.fired_s:
                continue
            self.looks[number] += progress.is_running
            if self._hit(run, kill):
                self.fired_s[number] = time.time()

    def _hit(self, run: Run, kill: Kill) -> bool:
        local = LocalRun(self.home, run.job.run_id)
        if kill.victim is Victim.RANK:
            return bool(local.kill_rank(kill.index))
        if kill.victim is Victim.COORDINATOR:
            return bool(local.kill_part(Part.COORDINATOR))
        placed = run.history.placement
        if placed is None or kill.index >= len(placed.members):
            return False
        node = placed.members[kill.index].node
        if kill.victim is Victim.NODE:
            return bool(local.kill_node(node))
        return bool(local.kill_part(Part(kill.victim), node))


@dataclass(slots=True)
class Pauser:
    """Has the run pause at a step, sees whether all ranks stand, and has it go on.

    Attributes:
        at_step: completed steps from which on the wish is there.
        num_ranks: of the run.
        asked_s: when it was asked to pause.
        stood_at: for every look at the standing ranks, their steps.
        resumed_s: when it was asked to go on.
    """

    at_step: int
    num_ranks: int
    asked_s: float | None = None
    stood_at: list[tuple[int, ...]] = field(default_factory=list)
    resumed_s: float | None = None
    _stood_s: float | None = None

    def see(self, run: Run, progress: Progress) -> None:
        """Do what is due."""
        now_s = time.time()
        if self.asked_s is None:
            if progress.last is not None and progress.last.step >= self.at_step:
                write_control(run.store, run.job.run_id, pause=True)
                self.asked_s = now_s
            return
        if self.resumed_s is not None:
            return
        standing = _standing(progress)
        if len(standing) < self.num_ranks:
            return
        self.stood_at.append(standing)
        self._stood_s = self._stood_s or now_s
        if now_s - self._stood_s >= STANDS_FOR_S:
            write_control(run.store, run.job.run_id, pause=False)
            self.resumed_s = now_s


def _standing(progress: Progress) -> tuple[int, ...]:
    """Completed steps of the ranks that stand still."""
    workers = [one for agent in progress.snapshot.agents.values() for one in agent.workers]
    paused = Phase.PAUSED.name.lower()
    return tuple(one.step for one in workers if one.phase == paused and one.step is not None)
