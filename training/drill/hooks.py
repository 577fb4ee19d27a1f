"""What somebody does to a run from outside: kills its processes, has it pause and go on.

Looked at after every poll of the run's supervisor, which tells the newest step. Times are seconds
since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from training.health.monitor.heartbeat import Phase
from training.injection.outside import KillInjector
from training.supervisor.run import Run
from training.supervisor.watch import Progress
from training.wire.requests import write_control

STANDS_FOR_S = 0.5  # a rank that went on in between would be seen


class RunHook(Protocol):
    """Somebody who watches a run and does something to it."""

    def see(self, run: Run, progress: Progress) -> None:
        """Look at what the supervisor has just seen."""
        ...


class NoHook:
    """Watches, and does nothing."""

    def see(self, run: Run, progress: Progress) -> None:
        """Look."""


class KillHook:
    """Lets an injector kill what is due."""

    def __init__(self, injector: KillInjector) -> None:
        self._injector = injector

    def see(self, run: Run, progress: Progress) -> None:
        """Kill what is due."""
        if progress.last is not None:
            step, is_running = progress.last.step, progress.is_running
            self._injector.inject(run.history, step, is_running=is_running)


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
