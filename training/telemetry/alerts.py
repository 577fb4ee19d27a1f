"""What is out of its limits in a run that gets on: the health points.

A point that is out of its limits for long enough is raised, once; it is cleared when it has been
inside them for a while. Pure: samples in, changes out. Times are seconds since the epoch, steps
completed optimizer steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, pstdev

from perdure.training.config.watch import WatchSpec
from perdure.training.journal.events import AlertKind, AlertRaised, StepRecord
from perdure.training.wire.node import NodeSample
from perdure.training.wire.rank_snapshot import RankSnapshot

Key = tuple[AlertKind, str | None, int | None]

LOSS_WINDOW = 50
MIN_STEPS = 10  # before their mean is worth a comparison
# A small loss wavers by more than its mean: a jump is also beyond so many standard deviations.
LOSS_DEVIATIONS = 6.0
STEP_WINDOW = 10_000
RECENT_STEPS = 5  # whose median is compared, for one slow step is no trend
LATENCY_HOLD_S = 5.0
WINDOW_S = 5.0  # of ranks' waiting, at least
MIN_WINDOW_STEPS = 5
MIN_CHECKPOINT_AGE_S = 60.0
CLEAR_S = 30.0
# A rank that steps again hangs no more; what wavers has to stay inside its limits for a while.
_CLEAR_S = {AlertKind.HANG: 3.0}
# How long a point has to be out of its limits; what is not here is raised at once. A window of
# ranks' waiting is itself some seconds long.
HOLD_WINDOWS = 3


@dataclass(frozen=True, slots=True)
class AlertCondition:
    """A point that is out of its limits.

    Attributes:
        holds_s: how long it has to stay so until it is raised.
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
        at_s: when.
        nodes: newest sample of each node.
        ranks: of those that live.
        steps: completed since the sample before.
        commits_s: when steps were committed, oldest first; the attempt's start before them.
        hang: that does not end the attempt.
        retries: of HCCL that succeeded, by node and rank.
    """

    at_s: float
    nodes: Mapping[str, NodeSample] = field(default_factory=dict)
    ranks: Sequence[RankSnapshot] = ()
    steps: Sequence[StepRecord] = ()
    commits_s: Sequence[float] = ()
    hang: AlertCondition | None = None
    retries: Mapping[tuple[str, int], int] = field(default_factory=dict)


def key_of(about: AlertCondition | AlertRaised) -> Key:
    """What it is about; a straggler stays one when the rank does, a hang whoever reports it."""
    if about.point is AlertKind.HANG:
        return about.point, None, None
    return about.point, about.node, about.rank if about.rank is not None else about.device


@dataclass(frozen=True, slots=True)
class Changes:
    """What a sample has changed."""

    raised: tuple[AlertCondition, ...] = ()
    cleared: tuple[Key, ...] = ()


@dataclass(slots=True)
class AlertMonitor:
    """Remembers what is out of its limits since when.

    Attributes:
        spec: the limits.
        open: what was raised and is not cleared.
    """

    spec: WatchSpec
    open: set[Key] = field(default_factory=set)
    _since_s: dict[Key, float] = field(default_factory=dict)
    _seen_s: dict[Key, float] = field(default_factory=dict)
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSS_WINDOW))
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=STEP_WINDOW))
    _step: int = -1
    _window: tuple[float, dict[int, RankSnapshot]] | None = None
    _late: dict[int, int] = field(default_factory=dict)
    _starved: dict[int, int] = field(default_factory=dict)
    _of_window: tuple[AlertCondition, ...] = ()

    def update(self, run: RunSample) -> Changes:
        """Compare a new sample of the run with the limits."""
        now = {key_of(one): one for one in self._conditions(run)}
        raised = []
        for key, one in now.items():
            since_s = self._since_s.setdefault(key, run.at_s)
            self._seen_s[key] = run.at_s
            if key not in self.open and run.at_s - since_s >= one.holds_s:
                self.open.add(key)
                raised.append(one)
        for key in [key for key in self._since_s if key not in now and key not in self.open]:
            del self._since_s[key]
        over = [key for key in self.open if self._is_over(key, run.at_s)]
        for key in over:
            self.open.discard(key)
            self._since_s.pop(key, None)
        return Changes(tuple(raised), tuple(over))

    def _is_over(self, key: Key, now_s: float) -> bool:
        return now_s - self._seen_s.setdefault(key, now_s) > _CLEAR_S.get(key[0], CLEAR_S)

    def _conditions(self, run: RunSample) -> Iterator[AlertCondition]:
        if run.hang is not None:
            yield run.hang
        trains = any(rank.phase == "step" for rank in run.ranks)
        for node, sample in run.nodes.items():
            yield from _of_devices(self.spec, node, sample, trains=trains)
            yield from _of_host(self.spec, node, sample)
        yield from _of_retries(run.retries)
        yield from self._of_steps(run.steps)
        yield from _of_latency(self.spec, run.ranks)
        yield from _of_checkpoints(self.spec, run)
        if self._take_window(run):
            yield from self._of_window
        else:
            yield from (one for one in self._of_window if key_of(one) in self.open)

    def _of_steps(self, steps: Sequence[StepRecord]) -> Iterator[AlertCondition]:
        for one in steps:
            yield from self._of_loss(one)
            if one.step_s > 0:
                self._steps_s.append(one.step_s)
            self._step = one.step
            if one.loss is not None and math.isfinite(one.loss):
                self._losses.append(one.loss)
        before, recent = _parted(self._steps_s, self.spec.step_slow_for_s)
        if len(before) < MIN_STEPS or not recent:
            return
        usual_s, now_s = fmean(before), median(recent)
        limit_s = self.spec.step_slow_ratio * usual_s
        if now_s > limit_s:
            text = f"steps take {now_s:.3g} s, {usual_s:.3g} s before"
            yield AlertCondition(AlertKind.STEP_SLOW, text, now_s, limit_s, step=self._step)

    def _of_loss(self, one: StepRecord) -> Iterator[AlertCondition]:
        if one.loss is None:
            return
        losses, limit = self._losses, math.inf
        mean = fmean(losses) if losses else math.nan
        if len(losses) >= MIN_STEPS:
            deviation = pstdev(losses, mean)
            limit = max(self.spec.loss_jump_ratio * mean, mean + LOSS_DEVIATIONS * deviation)
        if math.isfinite(one.loss) and one.loss <= limit:
            return
        text = f"loss {one.loss:.4g} at step {one.step}, {mean:.4g} on average before"
        value = one.loss if math.isfinite(one.loss) else -1.0  # JSON knows no NaN
        yield AlertCondition(AlertKind.LOSS_ABNORMAL, text, value, min(limit, 1e308), step=one.step)

    def _take_window(self, run: RunSample) -> bool:
        """Compare the ranks over some seconds and steps; whether a window has ended."""
        ranks = {one.rank: one for one in run.ranks}
        if self._window is None or not _same_lives(self._window[1], ranks):
            self._window, self._of_window = (run.at_s, ranks), ()
            self._late.clear()
            self._starved.clear()
            return False
        began_s, before = self._window
        took_s = run.at_s - began_s
        steps = min((one.step - before[r].step for r, one in ranks.items()), default=0)
        if took_s < WINDOW_S or steps < MIN_WINDOW_STEPS:
            return False
        self._window = (run.at_s, ranks)
        found = [*self._of_stragglers(before, ranks, took_s), *self._of_data(before, ranks, took_s)]
        self._of_window = tuple(found)
        return True

    def _of_stragglers(
        self, before: Mapping[int, RankSnapshot], ranks: Mapping[int, RankSnapshot], took_s: float
    ) -> Iterator[AlertCondition]:
        """The rank that waits least for the others, when they wait for it."""
        if len(ranks) < 2:
            return
        waited = {rank: one.waited_s - before[rank].waited_s for rank, one in ranks.items()}
        last = min(waited, key=lambda rank: waited[rank])
        behind = (median(s for r, s in waited.items() if r != last) - waited[last]) / took_s
        count = self._late.get(last, 0) + 1 if behind > self.spec.straggler_ratio else 0
        self._late = {last: count} if count else {}
        if count >= HOLD_WINDOWS:
            text = (
                f"rank {last} on {ranks[last].node} is later than the others by "
                f"{behind:.0%} of every step"
            )
            yield _about(AlertKind.STRAGGLER, text, behind, self.spec.straggler_ratio, ranks[last])

    def _of_data(
        self, before: Mapping[int, RankSnapshot], ranks: Mapping[int, RankSnapshot], took_s: float
    ) -> Iterator[AlertCondition]:
        """Ranks that wait for their loader; of many the one that waits longest."""
        shares = {rank: (one.data_s - before[rank].data_s) / took_s for rank, one in ranks.items()}
        worst = max(shares, key=lambda rank: shares[rank])
        limit = self.spec.data_wait_ratio
        count = self._starved.get(worst, 0) + 1 if shares[worst] > limit else 0
        self._starved = {worst: count} if count else {}
        if count >= HOLD_WINDOWS:
            many = sum(share > limit for share in shares.values())
            text = (
                f"rank {worst} on {ranks[worst].node} waits for data {shares[worst]:.0%} of the "
                f"time; {many} of {len(shares)} ranks do so too often"
            )
            yield _about(AlertKind.DATA_STARVED, text, shares[worst], limit, ranks[worst])


def _about(
    point: AlertKind, text: str, value: float, limit: float, one: RankSnapshot
) -> AlertCondition:
    return AlertCondition(
        point,
        text,
        value,
        limit,
        node=one.node,
        rank=one.rank,
        device=one.device or 0,
        step=one.step,
    )


def _same_lives(before: Mapping[int, RankSnapshot], now: Mapping[int, RankSnapshot]) -> bool:
    """Whether the same processes are looked at, which went only forward."""
    return before.keys() == now.keys() and all(
        one.pid == before[rank].pid and one.step >= before[rank].step for rank, one in now.items()
    )


def _of_devices(
    spec: WatchSpec, node: str, sample: NodeSample, *, trains: bool
) -> Iterator[AlertCondition]:
    for one in sample.devices:
        used, full = one.utilisation_percent, one.memory_percent
        where = f"device {one.index} on {node}"
        if trains and used is not None and used < spec.utilisation_low_percent:
            yield AlertCondition(
                AlertKind.UTILISATION_LOW, f"{where} is used {used:.0f} %", used,
                spec.utilisation_low_percent, node=node, device=one.index, holds_s=spec.low_for_s,
            )  # fmt: skip
        if full is not None and full > spec.memory_high_percent:
            yield AlertCondition(
                AlertKind.MEMORY_HIGH, f"memory of {where} is {full:.0f} % full", full,
                spec.memory_high_percent, node=node, device=one.index,
            )  # fmt: skip
        if one.is_ill:
            codes = f", codes {', '.join(one.error_codes)}" if one.error_codes else ""
            yield AlertCondition(
                AlertKind.DEVICE_UNHEALTHY, f"health of {where} is {one.health}{codes}", 1.0, 0.0,
                node=node, device=one.index,
            )  # fmt: skip
        if one.link_is_up is False:
            yield AlertCondition(
                AlertKind.LINK_DOWN, f"the network port of {where} is down", 1.0, 0.0,
                node=node, device=one.index,
            )  # fmt: skip


def _of_retries(retries: Mapping[tuple[str, int], int]) -> Iterator[AlertCondition]:
    """Stays for the whole attempt: a link that broke once is worth another look."""
    for (node, rank), count in retries.items():
        times = "once" if count == 1 else f"{count} times"
        text = f"HCCL sent an operator of rank {rank} on {node} again, successfully, {times}"
        yield AlertCondition(AlertKind.LINK_RETRIED, text, float(count), 0.0, node=node, rank=rank)


def _of_host(spec: WatchSpec, node: str, sample: NodeSample) -> Iterator[AlertCondition]:
    free = sample.host.disk_free_percent
    if free is not None and free < spec.disk_free_low_percent:
        text = f"{free:.1f} % of the disk of {node} is free"
        yield AlertCondition(
            AlertKind.DISK_FILLING, text, free, spec.disk_free_low_percent, node=node
        )


def _parted(steps_s: Sequence[float], recent_s: float) -> tuple[list[float], list[float]]:
    """Steps before, and the newest ones: five, or as many as have taken so long together."""
    taken_s = 0.0
    for count, one_s in enumerate(reversed(steps_s), start=1):
        taken_s += one_s
        if count >= RECENT_STEPS and taken_s >= recent_s:
            return list(steps_s)[:-count], list(steps_s)[-count:]
    return list(steps_s), []


def _of_latency(spec: WatchSpec, ranks: Sequence[RankSnapshot]) -> Iterator[AlertCondition]:
    """The vote's time at the rank that came last to it, which waited for no other."""
    voted = [one.latency_s for one in ranks if one.latency_s > 0]
    if len(voted) < len(ranks) or not voted:
        return
    value_ms = 1000 * min(voted)
    if value_ms > spec.latency_high_ms:
        text = f"the smallest collective of a step takes {value_ms:.0f} ms"
        yield AlertCondition(
            AlertKind.LATENCY_HIGH, text, value_ms, spec.latency_high_ms, holds_s=LATENCY_HOLD_S
        )


def _of_checkpoints(spec: WatchSpec, run: RunSample) -> Iterator[AlertCondition]:
    between = [b - a for a, b in zip(run.commits_s, run.commits_s[1:], strict=False)]
    if not between:
        return
    usual_s, age_s = median(between), run.at_s - run.commits_s[-1]
    limit_s = max(MIN_CHECKPOINT_AGE_S, spec.checkpoint_age_ratio * usual_s)
    if age_s > limit_s:
        text = f"the newest checkpoint is {age_s:.0f} s old, {usual_s:.0f} s are usual"
        yield AlertCondition(AlertKind.CHECKPOINT_OLD, text, age_s, limit_s)
