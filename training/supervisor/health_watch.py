"""The health of one attempt: its alerts, and restarts although nothing is wrong.

Times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from perdure.training.config.watch import WatchSpec
from perdure.training.diagnosis.evidence import SlowNode
from perdure.training.journal.attempt_view import AttemptView
from perdure.training.journal.events import AlertCleared, AlertKind, AlertRaised, StepRecord
from perdure.training.journal.history import RunHistory
from perdure.training.recovery.faults import FaultClass
from perdure.training.supervisor.stall_check import StallCheck
from perdure.training.supervisor.watch import EndKind, Progress, WatchResult
from perdure.training.telemetry.alerts import (
    AlertCondition,
    AlertMonitor,
    Key,
    RunSample,
    alert_key,
)
from perdure.training.wire.agent_status import AgentStatus
from perdure.training.wire.rank_snapshot import RankSnapshot

PERIOD_S = 1.0


@dataclass(slots=True)
class AttemptHealth:
    """The alerts of one attempt.

    Attributes:
        spec: the limits.
        view: the attempt; another supervisor may have raised alerts about it.
        stall: finds a hang that is only to be reported.
    """

    spec: WatchSpec
    view: AttemptView
    stall: StallCheck
    _monitor: AlertMonitor = field(init=False)
    _raised: dict[Key, AlertRaised] = field(default_factory=dict)
    _last_number: int = 0
    _sampled_s: float = 0.0
    _steps: list[StepRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Go on with the alerts that are on record."""
        self._monitor = AlertMonitor(self.spec)
        for alert in self.view.alerts:
            self._last_number = max(self._last_number, alert.began.number)
            if alert.ended is None:
                key = alert_key(alert.began)
                self._raised[key] = alert.began
                self._monitor.open.add(key)

    def update(self, progress: Progress, history: RunHistory) -> list[AlertRaised | AlertCleared]:
        """Return the alerts that are new or over, judged at most once a second."""
        self._steps += progress.steps
        now_s = progress.at_s
        if now_s - self._sampled_s < PERIOD_S:
            return []
        self._sampled_s = now_s
        steps, self._steps = self._steps, []
        agents = progress.snapshot.agents.values()
        sample = RunSample(
            at_s=now_s,
            nodes={agent.node: agent.sample for agent in agents if agent.sample is not None},
            ranks=tuple(_ranks(agents)),
            steps=tuple(steps),
            # Until the first commit, the age of the newest step is that of the attempt.
            commits_s=(self.view.started.at_s, *self._commits_s(history)),
            hang=self.stall.hang_of(progress),
            reports=progress.platform_reports,
            retries={(a.node, r): n for a in agents for r, n in a.mended_retries.items()},
        )
        changes = self._monitor.update(sample)
        return [
            *(self._raise(condition, now_s) for condition in changes.raised),
            *(self._clear(key, now_s) for key in changes.cleared if key in self._raised),
        ]

    def slow_node(self, history: RunHistory, *, is_saved: bool = False) -> SlowNode | None:
        """Return the node that holds the others up and is to be evacuated.

        Args:
            history: of the run.
            is_saved: only once a step was committed since: then an end of the attempt costs none.
        """
        alert = self._straggler(history)
        if alert is None or alert.node is None:
            return None
        if is_saved and not any(at_s > alert.at_s for at_s in self._commits_s(history)[-1:]):
            return None
        return SlowNode(alert.node, alert.rank, alert.device, alert.text)

    def _straggler(self, history: RunHistory) -> AlertRaised | None:
        if not self.spec.isolate_fail_slow or history.placement is None:
            return None
        nodes = {member.node for member in history.placement.members}
        for alert in self._raised.values():
            # A rank that is slow wherever it runs costs no more than its first node.
            if (
                alert.point is AlertKind.STRAGGLER
                and alert.node in nodes
                and not _was_slow_elsewhere(alert, history)
            ):
                return alert
        return None

    def _commits_s(self, history: RunHistory) -> tuple[float, ...]:
        """List when this attempt committed steps."""
        return tuple(
            checkpoint.at_s
            for checkpoint in history.checkpoints
            if (checkpoint.placement, checkpoint.attempt) == self.view.key
        )

    def _raise(self, condition: AlertCondition, now_s: float) -> AlertRaised:
        self._last_number += 1
        alert = AlertRaised(
            at_s=now_s,
            number=self._last_number,
            point=condition.point,
            text=condition.text,
            value=condition.value,
            limit=condition.limit,
            node=condition.node,
            rank=condition.rank,
            device=condition.device,
            step=condition.step,
        )
        self._raised[alert_key(condition)] = alert
        return alert

    def _clear(self, key: Key, now_s: float) -> AlertCleared:
        return AlertCleared(at_s=now_s, number=self._raised.pop(key).number)


def _ranks(agents: Iterable[AgentStatus]) -> Iterator[RankSnapshot]:
    for status in agents:
        for rank in RankSnapshot.all_of(status):
            if rank.has_heartbeat and not rank.is_recovering:
                yield rank


def _was_slow_elsewhere(alert: AlertRaised, history: RunHistory) -> bool:
    """Whether the rank was slow on another node before."""
    faults = [view.ended.fault for view in history.attempts if view.ended is not None]
    faults += [span.began.fault for view in history.attempts for span in view.recoveries]
    return any(
        fault is not None
        and fault.fault_class is FaultClass.FAIL_SLOW
        and fault.rank == alert.rank
        and fault.node != alert.node
        for fault in faults
    )


@dataclass(frozen=True, slots=True)
class PeriodicRestart:
    """The watcher for the first checkpoint after so long: a restart then loses the fewest steps.

    Attributes:
        every_s: as the restart policy has it; None: never.
        started_s: when the attempt was started.
    """

    every_s: float | None
    started_s: float

    def check(self, progress: Progress) -> WatchResult | None:
        """Ask for the restart at a poll that shows a new checkpoint."""
        is_due = self.every_s is not None and progress.at_s - self.started_s >= self.every_s
        return WatchResult(EndKind.RESTARTED) if is_due and progress.checkpoints else None
