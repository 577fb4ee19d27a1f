"""The time account of a run: every second of its wall time has exactly one owner.

Intervals lie in layers: guesses from the events before and after at the bottom, measurements on
top. The topmost interval owns its time, so with any records, and with any differences between the
nodes' clocks, the parts are never negative and add up to the wall time. ETTR is the share of steps
that were kept.

A step's record has the time of its completion and its duration; between two steps training waited
for saves. A step that a fault cut short has no record: where the moment of the fault is known, the
step counts as re-done, for no longer than a usual step. A command may print only some of its
steps. Where its ranks write heartbeats, or its output is read, the first and the last step of each
attempt are known, and every step between them is taken to be of the same duration. Times are
seconds since the epoch, durations seconds.
"""

from __future__ import annotations

import heapq
import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from itertools import groupby, pairwise

from perdure.training.journal.attempt_view import AttemptView, InProcessRecovery
from perdure.training.journal.events import StepRecord
from perdure.training.journal.history import RunHistory
from perdure.training.recovery.rungs import RUNGS, Rung

Key = tuple[int, int]


class Owner(StrEnum):
    """The use of an interval of the wall time; recoveries are in `RECOVERY`, by rung."""

    PRODUCTIVE = "productive_step"
    REDONE = "redone_step"
    SAVE = "save_block"
    DETECTION = "detection"
    START_UP = "start_up"
    WAITING = "waiting_for_resources"
    PAUSED = "paused"
    ENDING = "ending"
    COMMAND = "command"
    UNSUPERVISED = "unsupervised"
    UNKNOWN = "unknown"


# Owners by rung; stop has none of its own.
RECOVERY: Mapping[Rung, str] = {
    rung: f"recovery_{rung}" if row.spent_on else Owner.ENDING for rung, row in RUNGS.items()
}

# Every owner, in the order in which they are listed.
MEANING: Mapping[str, str] = {
    Owner.PRODUCTIVE: "steps that were kept",
    Owner.REDONE: "steps that were lost and done again, and steps that a fault cut short",
    Owner.SAVE: "training stopped between two steps: saves and snapshots",
    Owner.DETECTION: "from a fault, or the last sign of progress, to its notice",
    **{RECOVERY[rung]: f"recovery: {row.spent_on}" for rung, row in RUNGS.items() if row.spent_on},
    Owner.START_UP: "from a start by hand to the first step: data, placement, processes, restore",
    Owner.WAITING: "no healthy node was free",
    Owner.PAUSED: "every rank was paused on request",
    Owner.ENDING: "from the last step to the end: the last save, processes and containers",
    Owner.COMMAND: "a command ran, whose steps are not known",
    Owner.UNSUPERVISED: "the run had ended, or nothing supervised it and nothing trained",
    Owner.UNKNOWN: "since the last record: the next one will show what it is",
}


@dataclass(frozen=True, slots=True)
class Interval:
    """Time with a single owner; `attempt` is the newest begun, (0, 0) before any."""

    from_s: float
    to_s: float
    owner: str
    attempt: Key

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.to_s - self.from_s


@dataclass(frozen=True, slots=True)
class Account:
    """The wall time of a run from its creation to its end, or to now, without gaps."""

    intervals: tuple[Interval, ...]
    is_command: bool = False

    @property
    def wall_s(self) -> float:
        """From the run's creation to its end."""
        return self.intervals[-1].to_s - self.intervals[0].from_s if self.intervals else 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of every owner, in the order of owners."""
        durations = dict.fromkeys(map(str, MEANING), 0.0)
        for interval in self.intervals:
            durations[interval.owner] += interval.seconds
        return durations

    @property
    def ettr(self) -> float:
        """Time on steps that were kept over wall time, 0 to 1."""
        return self.seconds[Owner.PRODUCTIVE] / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def known_ettr(self) -> float | None:
        """The same; None for a command without a known step."""
        return self.ettr if self.ettr or not self.is_command else None


class Layer(IntEnum):
    """The rank of intervals: of two, the interval of the higher layer owns their common time."""

    NOTHING = 0
    PHASE = 1
    UNSUPERVISED = 2
    WAITING = 3
    AROUND = 4  # a recovery inside the processes
    STEP = 5
    IN_STEP = 6
    PAUSE = 7
    RECOVERY = 8


@dataclass(slots=True)
class Timeline:
    """Overlapping intervals between two moments, cut off outside of them."""

    from_s: float
    to_s: float
    _added: list[tuple[float, float, int, str]] = field(default_factory=list)

    def add(self, layer: Layer, owner: str, from_s: float, to_s: float) -> None:
        """Add an interval, unless it would end before it begins."""
        from_s, to_s = max(from_s, self.from_s), min(to_s, self.to_s)
        if from_s < to_s:
            self._added.append((from_s, to_s, layer, owner))

    def intervals(self, starts: Sequence[tuple[float, Key]]) -> Iterator[Interval]:
        """Yield the topmost intervals; neighbors of the same owner and attempt are joined."""
        began = sorted((max(at_s, self.from_s), key) for at_s, key in starts)
        moments = [at_s for at_s, _ in began if at_s < self.to_s]
        keys = [(0, 0), *(key for _, key in began)]
        pieces = (
            Interval(from_s, to_s, owner, keys[bisect_right(moments, from_s)])
            for from_s, to_s, owner in self._pieces(moments)
        )
        for _, group in groupby(pieces, key=lambda piece: (piece.owner, piece.attempt)):
            first, *followers = group
            yield replace(first, to_s=(followers or [first])[-1].to_s)

    def _pieces(self, moments: Iterable[float]) -> Iterator[tuple[float, float, str]]:
        added = sorted(self._added, key=lambda interval: interval[0])
        edges = {edge for interval in added for edge in interval[:2]} | set(moments)
        above: list[tuple[int, int, float, str]] = []
        newest = 0
        for from_s, to_s in pairwise(sorted(edges)):
            while newest < len(added) and added[newest][0] <= from_s:
                _, until_s, layer, owner = added[newest]
                # Within a layer the newest interval owns. It is a heap because a running run
                # makes its account again and again, over all of its steps.
                heapq.heappush(above, (-layer, -newest, until_s, owner))
                newest += 1
            while above[0][2] <= from_s:
                heapq.heappop(above)
            yield from_s, to_s, above[0][3]


def account_time(
    history: RunHistory,
    steps: Iterable[StepRecord],
    *,
    now_s: float,
    newest: SeenStep | None = None,
) -> Account:
    """Give every second of the run an owner.

    Args:
        history: the history of the run.
        steps: every step on record, lost steps too, in any order.
        now_s: end of the account of a run that goes on.
        newest: newest step of a command's open attempt, None where it is unknown.
    """
    if history.job is None:
        return Account(())
    to_s = history.ended.at_s if history.ended is not None else now_s
    timeline = Timeline(history.created_s, max(history.created_s, to_s))
    timeline.add(Layer.NOTHING, Owner.UNKNOWN, timeline.from_s, timeline.to_s)
    by_attempt: dict[Key, list[StepRecord]] = {}
    for step in steps:
        by_attempt.setdefault((step.placement, step.attempt), []).append(step)
    if history.is_command:
        newest = newest or _newest_record(history, by_attempt)
        by_attempt = {}  # a program that prints every tenth step has records of every tenth
    attempts = [
        _attempt_of(view, by_attempt.get(view.key, []), newest) for view in history.attempts
    ]
    _add_phases(timeline, history, attempts)
    if history.is_command:
        _add_command_steps(timeline, attempts)
    _add_steps(timeline, history, attempts)
    for attempt in attempts:
        _add_events(timeline, attempt)
    _add_unsupervised(timeline, history, attempts)
    for from_s, until_s in history.waits:
        timeline.add(Layer.WAITING, Owner.WAITING, from_s, until_s)
    starts = [(view.started.at_s, view.key) for view in history.attempts]
    return Account(tuple(timeline.intervals(starts)), history.is_command)


@dataclass(frozen=True, slots=True)
class SeenStep:
    """A step by a heartbeat or by output, with the time of its completion."""

    step: int
    at_s: float


def _newest_record(
    history: RunHistory, by_attempt: Mapping[Key, Sequence[StepRecord]]
) -> SeenStep | None:
    """Return the newest step of the open attempt by its records."""
    view = history.open_attempt
    records = by_attempt.get(view.key, ()) if view is not None else ()
    last = max(records, key=lambda record: record.at_s, default=None)
    return SeenStep(last.step, last.at_s) if last is not None else None


@dataclass(frozen=True, slots=True)
class _Attempt:
    """An attempt and its steps.

    Attributes:
        steps: steps on record, in the order of completion.
        to_step: the last known step, None where no step is known.
        began_s: begin of its first step; None where no step is known.
        stepped_s: completion of its last known step.
        noticed_s: notice of its end; None while it lasts.
        usual_s: median duration of its steps.
    """

    view: AttemptView
    steps: Sequence[StepRecord]
    to_step: int | None
    began_s: float | None
    stepped_s: float | None
    noticed_s: float | None
    usual_s: float

    @property
    def failed(self) -> bool:
        """Whether a fault ended it."""
        return self.view.ended is not None and self.view.ended.fault is not None

    @property
    def recovery(self) -> str:
        """Owner of the time after its end."""
        if not self.failed:
            return Owner.ENDING
        decision = self.view.decision
        return RECOVERY[decision.rung] if decision is not None else Owner.UNKNOWN


def _attempt_of(
    view: AttemptView, steps: Sequence[StepRecord], newest: SeenStep | None
) -> _Attempt:
    done = sorted(steps, key=lambda step: step.at_s)
    ended, first = view.ended, view.first_step
    began = [done[0].at_s - done[0].step_s] if done else []
    began += [first.stepped_s] if first is not None and not done else []
    stepped = [done[-1].at_s] if done else []
    stepped += [first.stepped_s] if first is not None else []
    stepped += [ended.stepped_s] if ended is not None and ended.stepped_s is not None else []
    to_step = ended.to_step if ended is not None else None
    if ended is None and newest is not None:
        stepped.append(newest.at_s)
        to_step = newest.step
    noticed_s = None
    if ended is not None:
        fault_s = ended.fault.at_s if ended.fault is not None else ended.at_s
        noticed_s = min(ended.noticed_s or fault_s, ended.at_s)
    return _Attempt(
        view,
        done,
        to_step=to_step,
        began_s=min((*began, *stepped), default=None),
        stepped_s=max(stepped, default=None),
        noticed_s=noticed_s,
        usual_s=statistics.median(step.step_s for step in done) if done else 0.0,
    )


def _add_phases(timeline: Timeline, history: RunHistory, attempts: Sequence[_Attempt]) -> None:
    """Add the times before the first step, between steps, and after the last step."""
    before_s = timeline.from_s
    owner: str = Owner.START_UP
    for attempt in attempts:
        ends = [at_s for at_s in history.ends if before_s <= at_s <= attempt.view.started.at_s]
        if ends:
            timeline.add(Layer.PHASE, owner, before_s, ends[0])
            before_s, owner = ends[0], Owner.START_UP
        until_s = attempt.noticed_s if attempt.noticed_s is not None else timeline.to_s
        if attempt.began_s is None or attempt.stepped_s is None:
            _add_without_steps(
                timeline, attempt, owner, before_s, until_s, is_command=history.is_command
            )
        else:
            timeline.add(Layer.PHASE, owner, before_s, attempt.began_s)
            _add_between(timeline, attempt, attempt.began_s, attempt.stepped_s, until_s)
            if history.is_command and attempt.noticed_s is None:
                timeline.add(Layer.PHASE, Owner.COMMAND, attempt.stepped_s, until_s)
        before_s, owner = until_s, attempt.recovery
    timeline.add(Layer.PHASE, owner, before_s, timeline.to_s)


def _add_without_steps(
    timeline: Timeline,
    attempt: _Attempt,
    owner: str,
    before_s: float,
    until_s: float,
    *,
    is_command: bool,
) -> None:
    """Add an attempt without a known step."""
    fault = attempt.view.ended.fault if attempt.view.ended is not None else None
    symptom_s = min(fault.at_s, until_s) if fault is not None else until_s
    timeline.add(Layer.PHASE, owner, before_s, symptom_s)
    timeline.add(Layer.PHASE, Owner.DETECTION, max(before_s, symptom_s), until_s)
    if is_command:
        timeline.add(Layer.PHASE, Owner.COMMAND, attempt.view.started.at_s, symptom_s)


def _add_between(
    timeline: Timeline, attempt: _Attempt, began_s: float, stepped_s: float, until_s: float
) -> None:
    """Add the time from the first step of an attempt to the notice of its end."""
    recorded_s = attempt.steps[-1].at_s if attempt.steps else began_s
    timeline.add(Layer.PHASE, Owner.SAVE, began_s, recorded_s)
    # Records of steps that no checkpoint covers are lost with the attempt, as the steps are.
    timeline.add(Layer.PHASE, Owner.REDONE, recorded_s, stepped_s)
    if attempt.noticed_s is None:
        return
    if not attempt.failed:
        timeline.add(Layer.PHASE, Owner.ENDING, stepped_s, until_s)
        return
    fault = attempt.view.ended.fault if attempt.view.ended is not None else None
    cut_s = stepped_s
    if fault is not None and fault.at_s < until_s:
        cut_s = max(cut_s, min(fault.at_s, stepped_s + attempt.usual_s))
    timeline.add(Layer.PHASE, Owner.REDONE, stepped_s, cut_s)
    timeline.add(Layer.PHASE, Owner.DETECTION, cut_s, until_s)


def _add_steps(timeline: Timeline, history: RunHistory, attempts: Sequence[_Attempt]) -> None:
    for attempt, lost in zip(
        attempts, _find_lost_steps(history, [attempt.steps for attempt in attempts]), strict=True
    ):
        for step in attempt.steps:
            owner = Owner.REDONE if id(step) in lost else Owner.PRODUCTIVE
            timeline.add(Layer.STEP, owner, step.at_s - step.step_s, step.at_s)


def _add_command_steps(timeline: Timeline, attempts: Sequence[_Attempt]) -> None:
    """Add the time of a command's steps that no later attempt did again."""
    goes_on_from = float("inf")
    for attempt in reversed(attempts):
        first = attempt.view.first_step
        if first is None or attempt.began_s is None or attempt.stepped_s is None:
            continue
        to_step = max(attempt.to_step or 0, first.step)
        num_productive = max(0.0, min(to_step, goes_on_from) - first.step)
        share = num_productive / (to_step - first.step) if to_step > first.step else 0.0
        kept_s = attempt.began_s + share * (attempt.stepped_s - attempt.began_s)
        timeline.add(Layer.STEP, Owner.PRODUCTIVE, attempt.began_s, kept_s)
        goes_on_from = min(goes_on_from, attempt.view.from_step)


def _find_lost_steps(history: RunHistory, steps: Sequence[Sequence[StepRecord]]) -> list[set[int]]:
    """Find for every attempt the `id` of the records whose steps were lost.

    A step is lost when a later attempt, or a recovery in the same one, went back behind it.

    Args:
        history: the history of the run.
        steps: steps of every attempt, in the order of completion.
    """
    lost: list[set[int]] = []
    goes_on_from: float = float("inf")
    for view, records in zip(reversed(history.attempts), reversed(steps), strict=True):
        lost.append(_find_lost_in(view, records, goes_on_from))
        if view.first_step is not None or records:
            first = records[0].step - 1 if records else view.from_step
            goes_on_from = min(goes_on_from, view.from_step, first)
    return lost[::-1]


def _find_lost_in(view: AttemptView, steps: Sequence[StepRecord], goes_on_from: float) -> set[int]:
    back = [
        (recovery.began.fault.at_s, recovery.ended.step)
        for recovery in view.recoveries
        if recovery.ended is not None
        and recovery.ended.succeeded
        and recovery.ended.step is not None
    ]
    back.sort()
    lost, newest = set(), goes_on_from
    for step in reversed(steps):
        while back and back[-1][0] >= step.at_s:
            newest = min(newest, back.pop()[1])
        if step.step > newest:
            lost.add(id(step))
        # The last completion of a repeated step counts.
        newest = min(newest, step.step - 1)
    return lost


def _add_events(timeline: Timeline, attempt: _Attempt) -> None:
    """Add pauses and recoveries inside the processes."""
    until_s = attempt.noticed_s if attempt.noticed_s is not None else timeline.to_s
    for pause in attempt.view.pauses:
        to_s = pause.ended.at_s if pause.ended is not None else until_s
        timeline.add(Layer.PAUSE, Owner.PAUSED, pause.began.at_s, to_s)
    for recovery in attempt.view.recoveries:
        _add_recovery(timeline, attempt, recovery, until_s)


def _add_recovery(
    timeline: Timeline, attempt: _Attempt, recovery: InProcessRecovery, until_s: float
) -> None:
    owner, noticed_s = RECOVERY[recovery.began.decision.rung], recovery.began.fault.at_s
    over_s = recovery.ended.at_s if recovery.ended is not None else until_s
    timeline.add(Layer.RECOVERY, owner, noticed_s, over_s)
    index = bisect_right(attempt.steps, noticed_s, key=lambda step: step.at_s)
    last = attempt.steps[index - 1] if index else None
    if last is not None:
        lost_s = _count_unrecorded_steps(recovery, last) * attempt.usual_s
        timeline.add(Layer.AROUND, Owner.DETECTION, last.at_s, noticed_s)
        timeline.add(Layer.AROUND, Owner.REDONE, last.at_s, min(last.at_s + lost_s, noticed_s))
    if index == len(attempt.steps):
        return
    following = attempt.steps[index]
    begin_s = following.at_s - following.step_s
    if recovery.succeeded:
        timeline.add(Layer.AROUND, owner, over_s, begin_s)
    # The record of a step that was finished by the recovery itself spans the fault.
    timeline.add(Layer.IN_STEP, Owner.DETECTION, begin_s + attempt.usual_s, noticed_s)


def _count_unrecorded_steps(recovery: InProcessRecovery, last: StepRecord) -> int:
    """Count the steps lost by a recovery that have no record."""
    ended = recovery.ended
    if ended is None or ended.step is None:
        return 0
    return max(0, ended.step + ended.steps_lost - last.step)


def _add_unsupervised(
    timeline: Timeline, history: RunHistory, attempts: Sequence[_Attempt]
) -> None:
    """Add times without a supervisor in which, as far as is known, nothing trained."""
    alive = sorted(
        (attempt.view.started.at_s, until_s)
        for attempt in attempts
        if (until_s := _alive_until(attempt, is_command=history.is_command)) is not None
    )
    for from_s, until_s in history.unattended:
        at_s = from_s
        for began_s, lived_s in alive:
            timeline.add(Layer.UNSUPERVISED, Owner.UNSUPERVISED, at_s, min(began_s, until_s))
            at_s = max(at_s, lived_s)
        timeline.add(Layer.UNSUPERVISED, Owner.UNSUPERVISED, at_s, until_s)


def _alive_until(attempt: _Attempt, *, is_command: bool) -> float | None:
    """Return the time until which an attempt is known to have trained; None if unknown.

    The steps of a command are mostly not known: its processes show that it went on.
    """
    if not is_command:
        return attempt.stepped_s
    if attempt.view.ended is None:
        return math.inf
    times_s = [at_s for at_s in (attempt.stepped_s, attempt.view.ended.lived_s) if at_s is not None]
    return max(times_s, default=None)
