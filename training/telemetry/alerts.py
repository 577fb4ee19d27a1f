"""Alerts about readings that are out of their limits in a run that makes progress.

An alert is raised once, when its reading has been out of its limits for long enough, and cleared
when the reading has been inside them for a while. Pure: samples in, changes out. Times are seconds
since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, pstdev

from perdure.training.config.watch import WatchSpec
from perdure.training.journal.events import AlertKind, AlertRaised, StepRecord
from perdure.training.recovery.chip_events import ChipReport
from perdure.training.wire.node import NodeSample
from perdure.training.wire.rank_snapshot import RankSnapshot

Key = tuple[AlertKind, str | None, int | None]

_LOSS_WINDOW = 50
_MIN_STEPS = 10  # before their mean is worth a comparison
# A small loss wavers by more than its mean, so a jump is also beyond so many standard deviations.
_LOSS_DEVIATIONS = 6.0
_STEP_WINDOW = 10_000
_RECENT_STEPS = 5  # their median is compared, because a single slow step is no trend
LATENCY_HOLD_S = 5.0
WINDOW_S = 5.0  # of ranks' waiting, at least
_MIN_WINDOW_STEPS = 5
_MIN_CHECKPOINT_AGE_S = 60.0
CLEAR_S = 30.0
# A rank that steps again hangs no more; a reading that wavers must stay inside its limits a while.
_CLEAR_S = {AlertKind.HANG: 3.0}
# Windows in a row before an alert about a rank. A window of ranks' waiting is itself some seconds
# long.
_HOLD_WINDOWS = 3


@dataclass(frozen=True, slots=True)
class AlertCondition:
    """A reading that is out of its limits.

    Attributes:
        holds_s: how long it must last until its alert is raised.
    """

    point: AlertKind
    text: str
    value: float
    limit: float
    node: str | None = None
    rank: int | None = None
    device: int | None = None
    step: int | None = None
    holds_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RunSample:
    """A run at one moment.

    Attributes:
        nodes: newest sample of each node.
        ranks: samples of the living ranks.
        steps: steps completed since the previous sample.
        commits_s: times of commits, oldest first; the attempt's start before them.
        hang: a hang that does not end the attempt.
        reports: codes of chips that the platform reports.
        retries: numbers of successful retries of HCCL, by node and rank.
    """

    at_s: float
    nodes: Mapping[str, NodeSample] = field(default_factory=dict)
    ranks: Sequence[RankSnapshot] = ()
    steps: Sequence[StepRecord] = ()
    commits_s: Sequence[float] = ()
    hang: AlertCondition | None = None
    reports: Sequence[ChipReport] = ()
    retries: Mapping[tuple[str, int], int] = field(default_factory=dict)


def alert_key(about: AlertCondition | AlertRaised) -> Key:
    """Return what an alert is about: a straggler's rank, but a hang without its reporter."""
    if about.point is AlertKind.HANG:
        return about.point, None, None
    return about.point, about.node, about.rank if about.rank is not None else about.device


@dataclass(frozen=True, slots=True)
class AlertChanges:
    """The alerts that a sample raised and cleared."""

    raised: tuple[AlertCondition, ...] = ()
    cleared: tuple[Key, ...] = ()


@dataclass(slots=True)
class AlertMonitor:
    """The memory of readings that are out of their limits, and since when.

    Attributes:
        spec: the limits.
        open: alerts that were raised and are not cleared.
    """

    spec: WatchSpec
    open: set[Key] = field(default_factory=set)
    _out_since_s: dict[Key, float] = field(default_factory=dict)
    _last_out_s: dict[Key, float] = field(default_factory=dict)
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=_LOSS_WINDOW))
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_STEP_WINDOW))
    _step: int = -1
    _window: tuple[float, dict[int, RankSnapshot]] | None = None
    _late_windows: dict[int, int] = field(default_factory=dict)
    _starved_windows: dict[int, int] = field(default_factory=dict)
    _window_conditions: tuple[AlertCondition, ...] = ()

    def update(self, run: RunSample) -> AlertChanges:
        """Compare a new sample of the run with the limits."""
        now = {alert_key(condition): condition for condition in self._conditions(run)}
        raised = []
        for key, condition in now.items():
            since_s = self._out_since_s.setdefault(key, run.at_s)
            self._last_out_s[key] = run.at_s
            if key not in self.open and run.at_s - since_s >= condition.holds_s:
                self.open.add(key)
                raised.append(condition)
        for key in [key for key in self._out_since_s if key not in now and key not in self.open]:
            del self._out_since_s[key]
        over = [key for key in self.open if self._is_over(key, run.at_s)]
        for key in over:
            self.open.discard(key)
            self._out_since_s.pop(key, None)
        return AlertChanges(tuple(raised), tuple(over))

    def _is_over(self, key: Key, now_s: float) -> bool:
        return now_s - self._last_out_s.setdefault(key, now_s) > _CLEAR_S.get(key[0], CLEAR_S)

    def _conditions(self, run: RunSample) -> Iterator[AlertCondition]:
        if run.hang is not None:
            yield run.hang
        trains = any(rank.phase == "step" for rank in run.ranks)
        for report in run.reports:
            text = f"{report.reporter} reports {report.code} of device {report.device}"
            yield AlertCondition(
                AlertKind.DEVICE_UNHEALTHY, f"{text} on {report.node}", 1.0, 0.0,
                node=report.node, device=report.device,
            )  # fmt: skip
        for node, sample in run.nodes.items():
            yield from _check_devices(self.spec, node, sample, trains=trains)
            yield from _check_host(self.spec, node, sample)
        yield from _check_retries(run.retries)
        yield from self._check_steps(run.steps)
        yield from _check_latency(self.spec, run.ranks)
        yield from _check_checkpoints(self.spec, run)
        if self._take_window(run):
            yield from self._window_conditions
        else:
            yield from (
                condition
                for condition in self._window_conditions
                if alert_key(condition) in self.open
            )

    def _check_steps(self, steps: Sequence[StepRecord]) -> Iterator[AlertCondition]:
        for record in steps:
            yield from self._check_loss(record)
            if record.step_s > 0:
                self._steps_s.append(record.step_s)
            self._step = record.step
            if record.loss is not None and math.isfinite(record.loss):
                self._losses.append(record.loss)
        earlier, recent = _split_steps(self._steps_s, self.spec.step_slow_for_s)
        if len(earlier) < _MIN_STEPS or not recent:
            return
        usual_s, now_s = fmean(earlier), median(recent)
        limit_s = self.spec.step_slow_ratio * usual_s
        if now_s > limit_s:
            text = f"steps take {now_s:.3g} s, {usual_s:.3g} s before"
            yield AlertCondition(AlertKind.STEP_SLOW, text, now_s, limit_s, step=self._step)

    def _check_loss(self, record: StepRecord) -> Iterator[AlertCondition]:
        if record.loss is None:
            return
        losses, limit = self._losses, math.inf
        mean = fmean(losses) if losses else math.nan
        if len(losses) >= _MIN_STEPS:
            deviation = pstdev(losses, mean)
            limit = max(self.spec.loss_jump_ratio * mean, mean + _LOSS_DEVIATIONS * deviation)
        if math.isfinite(record.loss) and record.loss <= limit:
            return
        text = f"loss {record.loss:.4g} at step {record.step}, {mean:.4g} on average before"
        value = record.loss if math.isfinite(record.loss) else -1.0  # JSON knows no NaN
        yield AlertCondition(
            AlertKind.LOSS_ABNORMAL, text, value, min(limit, 1e308), step=record.step
        )

    def _take_window(self, run: RunSample) -> bool:
        """Compare the ranks over some seconds and steps. Return whether a window ended."""
        ranks = {sample.rank: sample for sample in run.ranks}
        if self._window is None or not _are_same_processes(self._window[1], ranks):
            self._window, self._window_conditions = (run.at_s, ranks), ()
            self._late_windows.clear()
            self._starved_windows.clear()
            return False
        began_s, previous = self._window
        took_s = run.at_s - began_s
        steps = min((sample.step - previous[r].step for r, sample in ranks.items()), default=0)
        if took_s < WINDOW_S or steps < _MIN_WINDOW_STEPS:
            return False
        self._window = (run.at_s, ranks)
        conditions = [
            *self._check_stragglers(previous, ranks, took_s),
            *self._check_data(previous, ranks, took_s),
        ]
        self._window_conditions = tuple(conditions)
        return True

    def _check_stragglers(
        self, previous: Mapping[int, RankSnapshot], ranks: Mapping[int, RankSnapshot], took_s: float
    ) -> Iterator[AlertCondition]:
        """Report the rank that waits least for others, when they wait for it."""
        if len(ranks) < 2:
            return
        waited = {rank: sample.waited_s - previous[rank].waited_s for rank, sample in ranks.items()}
        last = min(waited, key=lambda rank: waited[rank])
        behind = (median(s for r, s in waited.items() if r != last) - waited[last]) / took_s
        count = self._late_windows.get(last, 0) + 1 if behind > self.spec.straggler_ratio else 0
        self._late_windows = {last: count} if count else {}
        if count >= _HOLD_WINDOWS:
            text = (
                f"rank {last} on {ranks[last].node} is later than the others by "
                f"{behind:.0%} of every step"
            )
            yield _condition_of_rank(
                AlertKind.STRAGGLER, text, behind, self.spec.straggler_ratio, ranks[last]
            )

    def _check_data(
        self, previous: Mapping[int, RankSnapshot], ranks: Mapping[int, RankSnapshot], took_s: float
    ) -> Iterator[AlertCondition]:
        """Report ranks that wait for their loader, by the rank that waits longest."""
        shares = {
            rank: (sample.data_s - previous[rank].data_s) / took_s for rank, sample in ranks.items()
        }
        worst = max(shares, key=lambda rank: shares[rank])
        limit = self.spec.data_wait_ratio
        count = self._starved_windows.get(worst, 0) + 1 if shares[worst] > limit else 0
        self._starved_windows = {worst: count} if count else {}
        if count >= _HOLD_WINDOWS:
            many = sum(share > limit for share in shares.values())
            text = (
                f"rank {worst} on {ranks[worst].node} waits for data {shares[worst]:.0%} of the "
                f"time; {many} of {len(shares)} ranks do so too often"
            )
            yield _condition_of_rank(
                AlertKind.DATA_STARVED, text, shares[worst], limit, ranks[worst]
            )


def _condition_of_rank(
    point: AlertKind, text: str, value: float, limit: float, sample: RankSnapshot
) -> AlertCondition:
    return AlertCondition(
        point,
        text,
        value,
        limit,
        node=sample.node,
        rank=sample.rank,
        device=sample.device or 0,
        step=sample.step,
    )


def _are_same_processes(
    previous: Mapping[int, RankSnapshot], now: Mapping[int, RankSnapshot]
) -> bool:
    """Whether both samples are of the same processes, which only moved forward."""
    return previous.keys() == now.keys() and all(
        sample.pid == previous[rank].pid and sample.step >= previous[rank].step
        for rank, sample in now.items()
    )


def _check_devices(
    spec: WatchSpec, node: str, sample: NodeSample, *, trains: bool
) -> Iterator[AlertCondition]:
    for device in sample.devices:
        used, full = device.utilisation_percent, device.memory_percent
        where = f"device {device.index} on {node}"
        if trains and used is not None and used < spec.utilisation_low_percent:
            yield AlertCondition(
                AlertKind.UTILISATION_LOW, f"{where} is used {used:.0f} %", used,
                spec.utilisation_low_percent, node=node, device=device.index,
                holds_s=spec.low_for_s,
            )  # fmt: skip
        if full is not None and full > spec.memory_high_percent:
            yield AlertCondition(
                AlertKind.MEMORY_HIGH, f"memory of {where} is {full:.0f} % full", full,
                spec.memory_high_percent, node=node, device=device.index,
            )  # fmt: skip
        if device.is_ill or device.platform_codes:
            every = (*device.error_codes, *(code.code for code in device.platform_codes))
            codes = f", codes {', '.join(dict.fromkeys(every))}" if every else ""
            health = device.health or "not known"
            yield AlertCondition(
                AlertKind.DEVICE_UNHEALTHY, f"health of {where} is {health}{codes}",
                1.0, 0.0, node=node, device=device.index,
            )  # fmt: skip
        if device.link_is_up is False:
            yield AlertCondition(
                AlertKind.LINK_DOWN, f"the network port of {where} is down", 1.0, 0.0,
                node=node, device=device.index,
            )  # fmt: skip


def _check_retries(retries: Mapping[tuple[str, int], int]) -> Iterator[AlertCondition]:
    """Report retries for the whole attempt: a link that broke once is worth a check."""
    for (node, rank), count in retries.items():
        times = "once" if count == 1 else f"{count} times"
        text = f"HCCL sent an operator of rank {rank} on {node} again, successfully, {times}"
        yield AlertCondition(AlertKind.LINK_RETRIED, text, float(count), 0.0, node=node, rank=rank)


def _check_host(spec: WatchSpec, node: str, sample: NodeSample) -> Iterator[AlertCondition]:
    free = sample.host.disk_free_percent
    if free is not None and free < spec.disk_free_low_percent:
        text = f"{free:.1f} % of the disk of {node} is free"
        yield AlertCondition(
            AlertKind.DISK_FILLING, text, free, spec.disk_free_low_percent, node=node
        )


def _split_steps(steps_s: Sequence[float], recent_s: float) -> tuple[list[float], list[float]]:
    """Split steps into earlier and newest: at least five, which took so long together."""
    taken_s = 0.0
    for count, one_s in enumerate(reversed(steps_s), start=1):
        taken_s += one_s
        if count >= _RECENT_STEPS and taken_s >= recent_s:
            return list(steps_s)[:-count], list(steps_s)[-count:]
    return list(steps_s), []


def _check_latency(spec: WatchSpec, ranks: Sequence[RankSnapshot]) -> Iterator[AlertCondition]:
    """Compare the vote's time at the last rank to come, which waited for no other."""
    voted = [rank.latency_s for rank in ranks if rank.latency_s > 0]
    if len(voted) < len(ranks) or not voted:
        return
    value_ms = 1000 * min(voted)
    if value_ms > spec.latency_high_ms:
        text = f"the smallest collective of a step takes {value_ms:.0f} ms"
        yield AlertCondition(
            AlertKind.LATENCY_HIGH, text, value_ms, spec.latency_high_ms, holds_s=LATENCY_HOLD_S
        )


def _check_checkpoints(spec: WatchSpec, run: RunSample) -> Iterator[AlertCondition]:
    between = [b - a for a, b in zip(run.commits_s, run.commits_s[1:], strict=False)]
    if not between:
        return
    usual_s, age_s = median(between), run.at_s - run.commits_s[-1]
    limit_s = max(_MIN_CHECKPOINT_AGE_S, spec.checkpoint_age_ratio * usual_s)
    if age_s > limit_s:
        text = f"the newest checkpoint is {age_s:.0f} s old, {usual_s:.0f} s are usual"
        yield AlertCondition(AlertKind.CHECKPOINT_OLD, text, age_s, limit_s)
