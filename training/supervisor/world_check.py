"""The check that a command's launchers have started one gang of the job's size.

`torchrun` without the number of nodes trains once on each of them: every run looks well, and none
is the training that the job describes. Launchers tell each rank the size of its gang. A program
may first prepare something with fewer ranks, so that only the largest gang counts, and only once
the program trains, or has ended. Times are seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from perdure.training.config.job import Job
from perdure.training.diagnosis.ending import shows_steps
from perdure.training.diagnosis.evidence import SmallWorld
from perdure.training.supervisor.watch import EndKind, Progress, WatchResult
from perdure.training.wire.agent_status import AgentState, AgentStatus
from perdure.training.wire.logs import WorkerLog

POLL_S = 5.0  # reads the output of all nodes, and only where a gang is too small


@dataclass(slots=True)
class WorldCheck:
    """The watcher of the size of a command's gang.

    Attributes:
        job: its nodes and slots say how many ranks there are to be.
        read_logs: reads the ends of the output of all nodes.
    """

    job: Job
    read_logs: Callable[[], Mapping[int, Sequence[WorkerLog]]]
    _small_since_s: float | None = None
    _polled_s: float = float("-inf")

    def check(self, progress: Progress) -> WatchResult | None:
        """End the attempt whose ranks are fewer than the job's, once it trains or has ended."""
        statuses = list(progress.snapshot.agents.values())
        small = self._find_small(statuses)
        if small is None or not self._is_certain(statuses, now_s=time.monotonic()):
            return None
        return WatchResult(EndKind.FAILED, culprit=small)

    def _find_small(self, statuses: Sequence[AgentStatus]) -> SmallWorld | None:
        engine, nodes = self.job.engine, [status for status in statuses if status.is_launcher]
        size = max((status.world_size for status in nodes), default=0)
        # Elsewhere ranks may still come, which changes the size of an elastic gang.
        if len(nodes) < engine.nodes or not all(status.world_size for status in nodes):
            return None
        if size >= engine.world_size:
            return None
        alone = [status.node for status in nodes if _has_rank_0(status)]
        return SmallWorld(size, engine.nodes, engine.slots_per_node, tuple(alone))

    def _is_certain(self, statuses: Iterable[AgentStatus], *, now_s: float) -> bool:
        """Whether the ranks train, or have trained: by their steps, output, end or age."""
        statuses = list(statuses)
        if any(step > 0 for status in statuses for step in status.steps):
            return True
        if all(status.is_over for status in statuses):
            return True
        if any(status.state is AgentState.STOPPING for status in statuses):
            return False
        self._small_since_s = now_s if self._small_since_s is None else self._small_since_s
        if now_s - self._small_since_s > self.job.restart.start_timeout_s:
            return True
        if now_s - self._polled_s < POLL_S:
            return False
        self._polled_s = now_s
        return any(shows_steps(log.text) for logs in self.read_logs().values() for log in logs)


def _has_rank_0(status: AgentStatus) -> bool:
    numbers = (*(rank.rank for rank in status.ranks), *(rank.rank for rank in status.former_ranks))
    return 0 in numbers or (status.world_size == 1 and not any(numbers))
