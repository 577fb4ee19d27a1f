"""The processes of a run under the local engine, seen and hit from outside.

Tests do so without a supervisor, and while agents do not answer; a drill gives orders to agents.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from perdure.training.config.drill import Victim
from perdure.training.injection.victims import kill, parts_of, processes_of, workers_of
from perdure.training.processes import is_tracker, sort_by_start


class LocalRun:
    """A run below a home folder."""

    def __init__(self, home: Path, run_id: str) -> None:
        self._nodes = str(home / "runs" / run_id / "nodes") + "/"

    def _belongs(self, marker: str, node: str | None = None) -> bool:
        return marker.startswith(self._nodes + (f"{node}/" if node else ""))

    def processes(self, node: str | None = None) -> list[psutil.Process]:
        """All processes of the run, or of one of its nodes."""
        return processes_of(lambda marker: self._belongs(marker, node))

    def rank(self, rank: int) -> list[psutil.Process]:
        """The worker process of a rank."""
        return workers_of(rank, self._belongs)

    def part(self, part: Victim) -> list[psutil.Process]:
        """The processes of a kind, on all nodes."""
        return parts_of(part, self._belongs)

    def kill_rank(self, rank: int) -> list[int]:
        """SIGKILL one worker. Returns the pids that were hit, as the next one does."""
        return kill(self.rank(rank))

    def kill_node(self, node: str) -> list[int]:
        """SIGKILL everything on a node, its agent first: the machine is gone.

        Resource trackers end by themselves then, and remove the semaphores that would have gone
        with the machine.
        """
        processes = sort_by_start(self.processes(node))
        return kill([one for one in processes if not is_tracker(one)])
