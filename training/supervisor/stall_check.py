"""The check for stalls that only all nodes together show, where an agent sees its own alone.

A rank is left behind by the others, or a command prints nothing on any node. Times are seconds
since the epoch.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from perdure.training.config.job import Job
from perdure.training.config.watch import HangAction
from perdure.training.diagnosis.evidence import SilentRank
from perdure.training.journal.events import AlertKind
from perdure.training.liveness.culprit import find_standstill
from perdure.training.liveness.hang_limits import MIN_LIMIT_S, SilentOutputDetector
from perdure.training.liveness.heartbeat import Phase
from perdure.training.liveness.stalled_rank import StalledRankDetector
from perdure.training.supervisor.evidence import progress_of, silent_of
from perdure.training.supervisor.watch import Progress, WatchResult
from perdure.training.telemetry.alerts import AlertCondition
from perdure.training.wire.agent_status import AgentState, AgentStatus
from perdure.training.wire.rank_snapshot import RankSnapshot

PERIOD_S = 1.0


@dataclass(slots=True)
class StallCheck:
    """The watcher that compares the ranks of one attempt.

    Attributes:
        job: its limits say how long a rank or a command may stall.
        began_s: when the attempt was started.
    """

    job: Job
    began_s: float
    _left_behind: StalledRankDetector = field(init=False)
    _silent_output: SilentOutputDetector | None = field(init=False)
    _compared_s: float = 0.0

    def __post_init__(self) -> None:
        """Build the detectors with the limits of the job."""
        limit_s = self.job.watch.output_quiet_s
        self._silent_output = SilentOutputDetector(limit_s) if limit_s is not None else None
        restore_s = self.job.watch.restore_timeout_s
        self._left_behind = StalledRankDetector(
            least_s=self.job.restart.hang_timeout_s or MIN_LIMIT_S,
            began_s=self.began_s,
            phases_s={Phase.RESTORE: restore_s} if restore_s is not None else {},
        )

    def check(self, progress: Progress) -> WatchResult | None:
        """Find the rank that is left behind, or the silent command, where that ends the attempt."""
        if self.job.watch.hang_action is HangAction.ALERT:
            return None
        silent = self._find_silent(progress.snapshot.agents.values(), now_s=progress.at_s)
        return WatchResult(culprit=silent) if silent is not None else None

    def hang_of(self, progress: Progress) -> AlertCondition | None:
        """Find the hang that is only to be reported."""
        if self.job.watch.hang_action is not HangAction.ALERT:
            return None
        statuses = progress.snapshot.agents.values()
        silent = next(silent_of(statuses, ends_attempt=False), None)
        silent = silent or self._find_silent(statuses, now_s=progress.at_s)
        if silent is None:
            return None
        # The rank that reports a hang may wait for another, which the progress of all shows.
        standstill = find_standstill(tuple(progress_of(statuses)))
        missing = standstill.missing if standstill is not None else ()
        lines = [silent.line, *([standstill.line] if standstill is not None and missing else [])]
        culprit = missing[0] if len(missing) == 1 else None
        return AlertCondition(
            AlertKind.HANG,
            "; ".join(lines),
            silent.silent_s,
            silent.limit_s,
            node=culprit.node if culprit is not None else silent.node,
            rank=culprit.rank if culprit is not None else silent.rank,
        )

    def _find_silent(self, statuses: Collection[AgentStatus], *, now_s: float) -> SilentRank | None:
        return self._find_silent_command(statuses) or self._find_left_behind(statuses, now_s)

    def _find_silent_command(self, statuses: Iterable[AgentStatus]) -> SilentRank | None:
        """Find the command that has printed nothing on any node for too long."""
        running = [status for status in statuses if status.state is AgentState.RUNNING]
        if self._silent_output is None or not running:
            return None
        by_node = {status.node: status.output_bytes for status in running}
        silent_s = self._silent_output.judge(by_node, now_s=time.monotonic())
        if silent_s is None:
            return None
        why = f"no output on any of {len(running)} nodes"
        return SilentRank(None, None, silent_s, self._silent_output.limit_s, "command", why)

    def _find_left_behind(self, statuses: Iterable[AgentStatus], now_s: float) -> SilentRank | None:
        """Compare the ranks, at most once a second."""
        is_watched = self.job.restart.hang and not self.job.worker.is_command
        if not is_watched or now_s - self._compared_s < PERIOD_S:
            return None
        self._compared_s = now_s
        snapshots = (rank for status in statuses for rank in RankSnapshot.all_of(status))
        ranks = [rank for rank in snapshots if not rank.is_recovering]
        late = self._left_behind.judge(ranks, now_s=now_s)
        if late is None:
            return None
        nodes = {rank.rank: rank.node for rank in ranks}
        phase = late.phase.name.lower()
        why = (
            f"most ranks were further than phase {phase} after {late.peers_s:.0f} s, and since "
            f"then it has neither computed nor read nor written"
        )
        return SilentRank(late.rank, nodes[late.rank], late.late_s, late.limit_s, phase, why)
