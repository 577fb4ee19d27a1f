"""A node replacement with real processes: how its time grows with ranks on this machine.

A tiny decoder with DDP on gloo; one node of the local engine is killed with all its processes, and
a spare takes its place. Where many ranks share few cores, most of the time is that of processes
that start and of connections between all pairs of ranks, which is gloo's way. So the CPU time of
each part is told apart. Times are seconds, since the epoch where a name ends in `at_s`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import psutil

from perdure.training.config.drill import Victim
from perdure.training.config.job import Job
from perdure.training.config.model import ParallelKind
from perdure.training.drill.driver import RunDriver
from perdure.training.drill.job import drill_job, write_corpus
from perdure.training.injection.victims import kill, processes_of
from perdure.training.journal.steps import read_kept_steps
from perdure.training.processes import MARKER, is_tracker, sort_by_start
from perdure.training.recovery.rungs import Rung
from perdure.training.supervisor.run_handle import RunHandle
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.watch import Progress

RUN_ID = "scale"
LOST = "node-1/"
PATIENCE_S = 400.0  # of every limit: dozens of processes share a core
KILL_STEP = 6
STEPS = 25


class Part(StrEnum):
    """Whose CPU time it is."""

    COORDINATOR = "coordinator"
    SUPERVISOR = "supervisor"
    AGENTS = "agents"  # with their fork servers, of the nodes that live on
    NEW_NODE = "new node"  # its agent, its fork server and its ranks
    SURVIVORS = "survivors"  # ranks


@dataclass(frozen=True, slots=True)
class Shape:
    """How many ranks there are."""

    nodes: int
    ranks_per_node: int

    @property
    def num_ranks(self) -> int:
        """Of the job."""
        return self.nodes * self.ranks_per_node


# A new node always starts as many processes, but for the smallest.
SHAPES = (Shape(2, 2), Shape(4, 4), Shape(16, 4))


@dataclass(frozen=True, slots=True)
class Replaced:
    """One replacement.

    Attributes:
        shape: of the job.
        noticed_s: from the kill to the supervisor's notice.
        protocol_s: from the notice to the coordinator's decision.
        recovery_s: from the decision to the record that all ranks train.
        resume_s: from the kill to the first step that is completed after the notice; before it a
            step that all ranks had voted for may come to its end.
        steps_lost: that were done again.
        cpu_s: CPU time from the decision to the end, by part.
    """

    shape: Shape
    noticed_s: float
    protocol_s: float
    recovery_s: float
    resume_s: float
    steps_lost: int
    cpu_s: Mapping[Part, float]


@dataclass(slots=True)
class _Loss:
    """Kills a node when its time has come, and looks at the CPU time of the run's processes.

    That is done when the recovery is seen to begin, and when it is over.
    """

    folder: Path
    spare: str
    killed_at_s: float | None = None
    at_decision: dict[int, tuple[Part, float]] = field(default_factory=dict)
    used_s: dict[Part, float] = field(default_factory=dict)

    def look(self, run: RunSupervisor, progress: Progress) -> None:
        """A hook of the run."""
        if self.killed_at_s is None:
            is_ready = len(run.warm_spares) == run.job.engine.num_warm_spares
            if is_ready and progress.last is not None and progress.last.step >= KILL_STEP:
                self._kill()
        elif progress.open_recoveries and not self.at_decision:
            self.at_decision = self._sample()
        elif self.at_decision and not progress.open_recoveries and not self.used_s:
            self.used_s = dict.fromkeys(Part, 0.0)
            for pid, (part, used_s) in self._sample().items():
                before = self.at_decision.get(pid)
                self.used_s[part] += used_s - (before[1] if before is not None else 0.0)

    def _kill(self) -> None:
        """End all processes of the node, its agent first."""
        doomed = sort_by_start(processes_of(lambda marker: marker.startswith(self._nodes + LOST)))
        self.killed_at_s = time.time()
        kill([one for one in doomed if not is_tracker(one)])

    @property
    def _nodes(self) -> str:
        return str(self.folder / "runs" / RUN_ID / "nodes") + "/"

    def _sample(self) -> dict[int, tuple[Part, float]]:
        found: dict[int, tuple[Part, float]] = {}
        for process, part in self._parts():
            with suppress(psutil.Error):
                times = process.cpu_times()
                found[process.pid] = (part, times.user + times.system)
        return found

    def _parts(self) -> Iterator[tuple[psutil.Process, Part]]:
        yield psutil.Process(), Part.SUPERVISOR
        nodes = self._nodes
        for process in processes_of(lambda marker: marker.startswith(nodes)):
            with suppress(psutil.Error):
                name, marker = process.name(), process.environ()[MARKER]
                if name == Victim.COORDINATOR:
                    yield process, Part.COORDINATOR
                elif marker.startswith(f"{nodes}{self.spare}/"):
                    yield process, Part.NEW_NODE
                elif name.startswith("rank-"):
                    yield process, Part.SURVIVORS
                else:
                    yield process, Part.AGENTS


def measure(shape: Shape, *, warm_spares: int = 0, pace_s: float = 0.05) -> Replaced:
    """Run a job until its second node is lost and replaced, and to its end.

    Args:
        shape: of the job.
        warm_spares: spare nodes whose container stands already.
        pace_s: seconds added to every step.

    Raises:
        RuntimeError: the run did not reach its end by one node replacement.
    """
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as text:
        home = Path(text)
        job = _job(home, shape, warm_spares, pace_s)
        loss = _Loss(home, f"node-{shape.nodes}")
        outcome = RunDriver(home, limit_s=PATIENCE_S).run(job, hook=loss.look)
        steps = read_kept_steps(RunHandle(job, home=home).store, RUN_ID).values()
    recoveries = [one for view in outcome.history.attempts for one in view.recoveries]
    rungs = [str(one.began.decision.rung) for one in recoveries]
    killed_at_s = loss.killed_at_s
    if outcome.ended != "completed" or rungs != [Rung.NODE_REPLACE] or killed_at_s is None:
        raise RuntimeError(f"it ended {outcome.ended}, by {rungs}")
    began, ended = recoveries[0].began, recoveries[0].ended
    if ended is None:
        raise RuntimeError("the recovery has no end")
    resumed_at_s = min(one.at_s for one in steps if one.at_s > began.fault.at_s)
    return Replaced(
        shape,
        noticed_s=began.fault.at_s - killed_at_s,
        protocol_s=began.at_s - began.fault.at_s,
        recovery_s=ended.at_s - began.at_s,
        resume_s=resumed_at_s - killed_at_s,
        steps_lost=ended.steps_lost,
        cpu_s=loss.used_s,
    )


def _job(home: Path, shape: Shape, warm_spares: int, pace_s: float) -> Job:
    engine = {
        "nodes": shape.nodes,
        "slots_per_node": shape.ranks_per_node,
        "spares": 1,
        "warm_spares": warm_spares,
    }
    changes = {
        "engine": engine,
        "checkpoint": {"every_steps": 1000},
        "restart": dict.fromkeys(("start_timeout_s", "hang_timeout_s"), PATIENCE_S),
    }
    write_corpus(home, shape.num_ranks)
    kind = ParallelKind.DDP
    return drill_job(home, RUN_ID, kind=kind, steps=STEPS, pace_s=pace_s, changes=changes)
