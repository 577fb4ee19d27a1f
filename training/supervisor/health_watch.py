"""The health of one attempt: what its watcher sees becomes alerts of the ledger.

Times are seconds since the epoch.

When an attempt is started anew although nothing is wrong. Times are seconds since the epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from perdure.training.config.watch import WatchSpec
from perdure.training.diagnosis.evidence import SlowNode
from perdure.training.journal.attempt_view import AttemptView
from perdure.training.journal.events import AlertCleared, AlertKind, AlertRaised, StepRecord
from perdure.training.journal.history import RunHistory
from perdure.training.recovery.faults import FaultClass
from perdure.training.supervisor.watch import Progress
from perdure.training.telemetry.alerts import (
    AlertCondition,
    AlertMonitor,
    Key,
    RunSample,
    key_of,
)
from perdure.training.wire.agent import AgentStatus
from perdure.training.wire.rank_snapshot import RankSnapshot

PERIOD_S = 1.0


@dataclass(slots=True)
class AttemptHealth:
    """Watches the health points of one attempt.

    Attributes:
        spec: their limits.
        hang_of: finds a hang that is only to be reported.
    """

    spec: WatchSpec
    hang_of: Callable[[Collection[AgentStatus]], AlertCondition | None] = lambda _statuses: None
    _watch: AlertMonitor = field(init=False)
    _raised: dict[Key, AlertRaised] = field(default_factory=dict)
    _count: int = 0
    _looked_s: float = 0.0
    _steps: list[StepRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin with nothing out of its limits."""
        self._watch = AlertMonitor(self.spec)

    def adopt(self, view: AttemptView) -> None:
        """Go on with the alerts that are on record: another supervisor raised them."""
        for alert in view.alerts:
            self._count = max(self._count, alert.began.number)
            if alert.ended is None:
                key = key_of(alert.began)
                self._raised[key] = alert.began
                self._watch.open.add(key)

    def look(
        self, progress: Progress, view: AttemptView, history: RunHistory
    ) -> list[AlertRaised | AlertCleared]:
        """What has changed since the last look; at most one a second is taken."""
        self._steps += progress.steps
        now_s = time.time()
        if now_s - self._looked_s < PERIOD_S:
            return []
        self._looked_s = now_s
        steps, self._steps = self._steps, []
        agents = progress.snapshot.agents.values()
        look = RunSample(
            at_s=now_s,
            nodes={one.node: one.sample for one in agents if one.sample is not None},
            ranks=tuple(_ranks(agents)),
            steps=tuple(steps),
            # Until the first commit, the age of the newest one is that of the attempt.
            commits_s=(view.started.at_s, *_commits_s(view, history)),
            hang=self.hang_of(agents),
            retries={(one.node, r): n for one in agents for r, n in one.mended_retries.items()},
        )
        changes = self._watch.update(look)
        return [
            *(self._note(one, now_s) for one in changes.raised),
            *(self._clear(key, now_s) for key in changes.cleared if key in self._raised),
        ]

    def slow_node(self, history: RunHistory) -> SlowNode | None:
        """A node that holds the others up and is to be left, as soon as that costs no step."""
        alert = self._straggler(history)
        if alert is None or alert.node is None:
            return None
        return SlowNode(alert.node, alert.rank, alert.device, alert.text)

    def saved_slow_node(self, view: AttemptView, history: RunHistory) -> SlowNode | None:
        """The same once a step was committed since: then an end of the attempt costs none."""
        alert, commits_s = self._straggler(history), _commits_s(view, history)
        if alert is None or not commits_s or commits_s[-1] <= alert.at_s:
            return None
        return self.slow_node(history)

    def _straggler(self, history: RunHistory) -> AlertRaised | None:
        if not self.spec.isolate_fail_slow or history.placement is None:
            return None
        nodes = {member.node for member in history.placement.members}
        for alert in self._raised.values():
            # What the rank does wherever it is costs one node at most.
            if (
                alert.point is AlertKind.STRAGGLER
                and alert.node in nodes
                and not _was_slow_elsewhere(alert, history)
            ):
                return alert
        return None

    def _note(self, one: AlertCondition, now_s: float) -> AlertRaised:
        self._count += 1
        note = AlertRaised(
            at_s=now_s,
            number=self._count,
            point=one.point,
            text=one.text,
            value=one.value,
            limit=one.limit,
            node=one.node,
            rank=one.rank,
            device=one.device,
            step=one.step,
        )
        self._raised[key_of(one)] = note
        return note

    def _clear(self, key: Key, now_s: float) -> AlertCleared:
        return AlertCleared(at_s=now_s, number=self._raised.pop(key).number)


def _ranks(agents: Iterable[AgentStatus]) -> Iterator[RankSnapshot]:
    for status in agents:
        for rank in RankSnapshot.all_of(status):
            if rank.has_heartbeat and not rank.is_recovering:
                yield rank


def _was_slow_elsewhere(alert: AlertRaised, history: RunHistory) -> bool:
    """Whether the same rank was slow on another node before."""
    faults = [view.ended.fault for view in history.attempts if view.ended is not None]
    faults += [one.began.fault for view in history.attempts for one in view.recoveries]
    return any(
        fault is not None
        and fault.fault_class is FaultClass.FAIL_SLOW
        and fault.rank == alert.rank
        and fault.node != alert.node
        for fault in faults
    )


def _commits_s(view: AttemptView, history: RunHistory) -> tuple[float, ...]:
    """When this attempt committed steps."""
    return tuple(
        seen.at_s for seen in history.checkpoints if (seen.placement, seen.attempt) == view.key
    )


@dataclass(slots=True)
class PeriodicRestart:
    """Due at the first committed checkpoint after so long: that loses the fewest steps.

    Attributes:
        every_s: of the restart policy; None: never.
        started_s: when the attempt was started.
    """

    every_s: float | None
    started_s: float
    is_due: bool = False

    def look(self, checkpoints: Sequence[int], *, now_s: float) -> None:
        """Take in the checkpoints that were committed since the last look."""
        if self.every_s is not None and checkpoints and now_s - self.started_s >= self.every_s:
            self.is_due = True
