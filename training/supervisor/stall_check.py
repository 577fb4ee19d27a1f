"""The check for stalls that only all nodes together show, where an agent sees its own alone.

A rank is left behind by the others, or a command prints nothing on any node. Times are seconds
since the epoch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from perdure.training.config.job import Job
from perdure.training.config.watch import HangAction
from perdure.training.diagnosis.evidence import SilentRank
from perdure.training.journal.events import AlertKind
from perdure.training.liveness.culprit import find_standstill
from perdure.training.liveness.hang_limits import (
    MIN_LIMIT_S,
    OUTPUT_FIELD,
    RESTORE_FIELD,
    STEP_FIELD,
    SilentOutputDetector,
)
from perdure.training.liveness.heartbeat import Phase
from perdure.training.liveness.stalled_rank import StalledRankDetector
from perdure.training.liveness.start_patience import StartPatience
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
        patience: with this start.
    """

    job: Job
    began_s: float
    patience: StartPatience = field(default_factory=StartPatience)
    _left_behind: StalledRankDetector = field(init=False)
    _silent_output: SilentOutputDetector | None = field(init=False)
    _compared_s: float = 0.0

    def __post_init__(self) -> None:
        """Build the detectors with the limits of the job."""
        limit_s = self.job.watch.output_quiet_s
        self._silent_output = SilentOutputDetector(limit_s) if limit_s is not None else None
        restore_s, factor = self.job.watch.restore_timeout_s, self.patience.factor
        self._left_behind = StalledRankDetector(
            least_s=factor * (self.job.restart.hang_timeout_s or MIN_LIMIT_S),
            began_s=self.began_s,
            phases_s={Phase.RESTORE: factor * restore_s} if restore_s is not None else {},
        )

    def check(self, progress: Progress) -> WatchResult | None:
        """Find the rank that is left behind, or the silent command, where that ends the attempt."""
        if self.job.watch.hang_action is HangAction.ALERT:
            return None
        statuses = progress.snapshot.agents.values()
        silent = self._find_silent(progress)
        if silent is None or self._is_tolerated(silent):
            silent = _find_idle_start(statuses)
        return WatchResult(culprit=silent) if silent is not None else None

    def _is_tolerated(self, silent: SilentRank) -> bool:
        """Whether a start without output is only reported: it is not known whether it computes."""
        is_output = silent.field == OUTPUT_FIELD
        return is_output and silent.is_slow_start and not self.patience.ends_slow_start

    def hang_of(self, progress: Progress) -> AlertCondition | None:
        """Find the hang that is only to be reported."""
        statuses = progress.snapshot.agents.values()
        silent = next(silent_of(statuses, ends_attempt=False), None)
        if self.job.watch.hang_action is HangAction.ALERT:
            silent = silent or self._find_silent(progress)
        elif silent is None:
            output = self._find_silent_command(progress)
            silent = output if output is not None and self._is_tolerated(output) else None
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

    def _find_silent(self, progress: Progress) -> SilentRank | None:
        statuses = progress.snapshot.agents.values()
        left_behind = self._find_left_behind(statuses, progress.at_s)
        return self._find_silent_command(progress) or left_behind

    def _find_silent_command(self, progress: Progress) -> SilentRank | None:
        """Find the command that has printed nothing on any node for too long."""
        statuses = progress.snapshot.agents.values()
        running = [status for status in statuses if status.state is AgentState.RUNNING]
        detector, quiet_s = self._silent_output, self.job.watch.output_quiet_s
        if detector is None or quiet_s is None or not running:
            return None
        is_start = progress.command_step is None
        detector.limit_s = quiet_s * (self.patience.factor if is_start else 1.0)
        by_node = {status.node: status.output_bytes for status in running}
        silent_s = detector.judge(by_node, now_s=time.monotonic())
        if silent_s is None:
            return None
        why = f"no output on any of {len(running)} nodes"
        return SilentRank(
            None,
            None,
            silent_s,
            detector.limit_s,
            "command",
            why,
            field=OUTPUT_FIELD,
            is_slow_start=is_start,
        )

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
        is_start = not any(rank.has_stepped for rank in ranks)
        return SilentRank(
            late.rank,
            nodes[late.rank],
            late.late_s,
            late.limit_s,
            phase,
            why,
            field=self._field_of(late.phase),
            is_slow_start=is_start,
            is_busy=False,
        )

    def _field_of(self, phase: Phase) -> str:
        has_restore = self.job.watch.restore_timeout_s is not None
        return RESTORE_FIELD if phase is Phase.RESTORE and has_restore else STEP_FIELD


def _find_idle_start(statuses: Iterable[AgentStatus]) -> SilentRank | None:
    """Find a start that no agent ends, on whose nodes every rank is silent and none computes."""
    running = [status for status in statuses if status.state is AgentState.RUNNING]
    hangs = [status.hang for status in running if status.hang is not None]
    is_everywhere = bool(hangs) and len(hangs) == len(running)
    if not is_everywhere or any(hang.is_busy or not hang.is_slow_start for hang in hangs):
        return None
    return next(silent_of(running, ends_attempt=False), None)
