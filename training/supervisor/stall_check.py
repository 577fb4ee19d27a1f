"""Whether a command has printed nothing on any node for too long. Times are seconds.

Whether a rank is left behind by the others, or a command prints nothing on any node.

An agent sees its own processes alone; here are those of all nodes. Times are seconds since the
epoch.
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
from perdure.training.telemetry.alerts import AlertCondition
from perdure.training.wire.agent import AgentState, AgentStatus
from perdure.training.wire.rank_snapshot import RankSnapshot


@dataclass(slots=True)
class SilentOutputCheck:
    """Looks at the output of one attempt, if its job asks for that.

    Attributes:
        job: of the run.
    """

    job: Job
    _detector: SilentOutputDetector | None = field(init=False)

    def __post_init__(self) -> None:
        """Have a detector with the limit of the job."""
        limit_s = self.job.watch.output_quiet_s
        self._detector = SilentOutputDetector(limit_s) if limit_s is not None else None

    def look(self, statuses: Iterable[AgentStatus]) -> SilentRank | None:
        """The command, once it has been silent for too long."""
        running = [one for one in statuses if one.state is AgentState.RUNNING]
        if self._detector is None or not running:
            return None
        by_node = {one.node: one.output_bytes for one in running}
        silent_s = self._detector.judge(by_node, now_s=time.monotonic())
        if silent_s is None:
            return None
        why = f"no output on any of {len(running)} nodes"
        return SilentRank(None, None, silent_s, self._detector.limit_s, "command", why)


PERIOD_S = 1.0


@dataclass(slots=True)
class StallCheck:
    """Compares the ranks of one attempt.

    Attributes:
        job: of the run.
        began_s: when the attempt was started.
    """

    job: Job
    began_s: float
    _detector: StalledRankDetector = field(init=False)
    _output: SilentOutputCheck = field(init=False)
    _looked_s: float = 0.0

    def __post_init__(self) -> None:
        """Have detectors with the limits of the job."""
        self._output = SilentOutputCheck(self.job)
        restore_s = self.job.watch.restore_timeout_s
        self._detector = StalledRankDetector(
            least_s=self.job.restart.hang_timeout_s or MIN_LIMIT_S,
            began_s=self.began_s,
            phases_s={Phase.RESTORE: restore_s} if restore_s is not None else {},
        )

    def look(self, statuses: Collection[AgentStatus]) -> SilentRank | None:
        """The rank that is left behind, or the command that is silent, if that is to end it."""
        if self.job.watch.hang_action is HangAction.ALERT:
            return None
        return self._silent(statuses)

    def hang_of(self, statuses: Collection[AgentStatus]) -> AlertCondition | None:
        """The hang that is only to be reported, if there is one."""
        if self.job.watch.hang_action is not HangAction.ALERT:
            return None
        one = next(silent_of(statuses, ends_attempt=False), None) or self._silent(statuses)
        if one is None:
            return None
        # What reports a hang may wait for another rank, which the progress of all shows.
        standstill = find_standstill(tuple(progress_of(statuses)))
        missing = standstill.missing if standstill is not None else ()
        line = f"{one.line}; {standstill.line}" if standstill is not None and missing else one.line
        culprit = missing[0] if len(missing) == 1 else None
        return AlertCondition(
            AlertKind.HANG,
            line,
            one.silent_s,
            one.limit_s,
            node=culprit.node if culprit is not None else one.node,
            rank=culprit.rank if culprit is not None else one.rank,
        )

    def _silent(self, statuses: Collection[AgentStatus]) -> SilentRank | None:
        return self._output.look(statuses) or self._left_behind(statuses)

    def _left_behind(self, statuses: Collection[AgentStatus]) -> SilentRank | None:
        """At most one look a second is taken."""
        now_s = time.time()
        is_watched = self.job.restart.hang and not self.job.worker.is_command
        if not is_watched or now_s - self._looked_s < PERIOD_S:
            return None
        self._looked_s = now_s
        snapshots = (rank for status in statuses for rank in RankSnapshot.all_of(status))
        ranks = [rank for rank in snapshots if not rank.is_recovering]
        found = self._detector.judge(ranks, now_s=now_s)
        if found is None:
            return None
        nodes = {rank.rank: rank.node for rank in ranks}
        phase = found.phase.name.lower()
        why = (
            f"most ranks were further than phase {phase} after {found.peers_s:.0f} s, and since "
            f"then it has neither computed nor read nor written"
        )
        return SilentRank(found.rank, nodes[found.rank], found.late_s, found.limit_s, phase, why)
