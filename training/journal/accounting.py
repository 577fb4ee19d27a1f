"""Where a run's time went: every second of its wall time has exactly one owner.

Guesses from what came before and after lie lowest, what was measured lies on top. Whatever the
records say, and however the clocks of nodes differ, the parts add up to the wall time. ETTR is
the share of steps that were kept.

A step's record tells when it was completed and how long it took; the time between two steps is
what training stood for saves. Of a step that a fault cut short nothing is recorded: where the
moment of the fault is known it counts as re-done, for no longer than a usual step. Times are
seconds since the epoch, durations seconds.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from training.journal.history import AttemptView, InProcessRecovery, RunHistory
from training.journal.wall_time import RECOVERY, Account, Canvas, Key, Layer, Owner


class StepTime(Protocol):
    """What of a step's record is needed."""

    @property
    def step(self) -> int:
        """Completed optimizer steps, this one included."""
        ...

    @property
    def at_s(self) -> float:
        """When it was completed."""
        ...

    @property
    def step_s(self) -> float:
        """How long it took."""
        ...

    @property
    def placement(self) -> int:
        """Placement of the attempt."""
        ...

    @property
    def attempt(self) -> int:
        """Number of the attempt in its placement."""
        ...


def account(history: RunHistory, steps: Iterable[StepTime], *, now_s: float) -> Account:
    """Give every second of the run an owner.

    Args:
        history: of the run.
        steps: every step on record, those that were lost too, in any order.
        now_s: end of the account of a run that goes on.
    """
    if history.job is None:
        return Account(())
    to_s = history.ended.at_s if history.ended is not None else now_s
    canvas = Canvas(history.created_s, max(history.created_s, to_s))
    canvas.paint(Layer.NOTHING, Owner.UNKNOWN, canvas.from_s, canvas.to_s)
    by_attempt: dict[Key, list[StepTime]] = {}
    for step in steps:
        by_attempt.setdefault((step.placement, step.attempt), []).append(step)
    told = [_told(view, by_attempt.get(view.key, [])) for view in history.attempts]
    _paint_phases(canvas, history, told)
    _paint_steps(canvas, history, told)
    for one in told:
        _paint_events(canvas, one)
    _paint_unsupervised(canvas, history, told)
    for from_s, until_s in history.waits:
        canvas.paint(Layer.WAITING, Owner.WAITING, from_s, until_s)
    starts = [(view.started.at_s, view.key) for view in history.attempts]
    return Account(tuple(canvas.stretches(starts)))


@dataclass(frozen=True, slots=True)
class _Told:
    """An attempt and its steps.

    Attributes:
        steps: on record, in the order in which they were completed.
        began_s: when its first step began; None when no step is known.
        stepped_s: when the last step was completed that is known of.
        noticed_s: when its end was noticed; None while it goes on.
        usual_s: how long a step takes.
    """

    view: AttemptView
    steps: Sequence[StepTime]
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
        """What the time after its end is spent on."""
        if not self.failed:
            return Owner.ENDING
        decision = self.view.decision
        return RECOVERY[decision.rung] if decision is not None else Owner.UNKNOWN


def _told(view: AttemptView, steps: Sequence[StepTime]) -> _Told:
    done = sorted(steps, key=lambda step: step.at_s)
    ended, first = view.ended, view.first_step
    began = [done[0].at_s - done[0].step_s] if done else []
    began += [first.stepped_s] if first is not None and not done else []
    stepped = [done[-1].at_s] if done else []
    stepped += [first.stepped_s] if first is not None else []
    stepped += [ended.stepped_s] if ended is not None and ended.stepped_s is not None else []
    noticed_s = None
    if ended is not None:
        fault_s = ended.fault.at_s if ended.fault is not None else ended.at_s
        noticed_s = min(ended.noticed_s or fault_s, ended.at_s)
    return _Told(
        view,
        done,
        began_s=min((*began, *stepped), default=None),
        stepped_s=max(stepped, default=None),
        noticed_s=noticed_s,
        usual_s=statistics.median(step.step_s for step in done) if done else 0.0,
    )


def _paint_phases(canvas: Canvas, history: RunHistory, told: Sequence[_Told]) -> None:
    """Before the first step, between steps, and after the last one."""
    is_command = bool(((history.job or {}).get("worker") or {}).get("command"))
    before_s = canvas.from_s
    before: str = Owner.START_UP
    for one in told:
        ends = [at_s for at_s in history.ends if before_s <= at_s <= one.view.started.at_s]
        if ends:
            canvas.paint(Layer.PHASE, before, before_s, ends[0])
            before_s, before = ends[0], Owner.START_UP
        until_s = one.noticed_s if one.noticed_s is not None else canvas.to_s
        if one.began_s is None or one.stepped_s is None:
            _paint_without_steps(canvas, one, before, before_s, until_s, is_command=is_command)
        else:
            canvas.paint(Layer.PHASE, before, before_s, one.began_s)
            _paint_between(canvas, one, until_s)
        before_s, before = until_s, one.recovery
    canvas.paint(Layer.PHASE, before, before_s, canvas.to_s)


def _paint_without_steps(
    canvas: Canvas, one: _Told, before: str, before_s: float, until_s: float, *, is_command: bool
) -> None:
    """An attempt that is not known to have come to a step."""
    fault = one.view.ended.fault if one.view.ended is not None else None
    symptom_s = min(fault.at_s, until_s) if fault is not None else until_s
    canvas.paint(Layer.PHASE, before, before_s, symptom_s)
    canvas.paint(Layer.PHASE, Owner.DETECTION, max(before_s, symptom_s), until_s)
    if is_command:
        canvas.paint(Layer.PHASE, Owner.COMMAND, one.view.started.at_s, symptom_s)


def _paint_between(canvas: Canvas, one: _Told, until_s: float) -> None:
    """From the first step of an attempt to the notice of its end."""
    assert one.began_s is not None  # noqa: S101 asked of attempts with steps
    assert one.stepped_s is not None  # noqa: S101 likewise
    recorded_s = one.steps[-1].at_s if one.steps else one.began_s
    canvas.paint(Layer.PHASE, Owner.SAVE, one.began_s, recorded_s)
    # Records of steps that no checkpoint covers are lost with the attempt, as the steps are.
    canvas.paint(Layer.PHASE, Owner.REDONE, recorded_s, one.stepped_s)
    if one.noticed_s is None:
        return
    if not one.failed:
        canvas.paint(Layer.PHASE, Owner.ENDING, one.stepped_s, until_s)
        return
    fault = one.view.ended.fault if one.view.ended is not None else None
    cut_s = one.stepped_s
    if fault is not None and fault.at_s < until_s:
        cut_s = max(cut_s, min(fault.at_s, one.stepped_s + one.usual_s))
    canvas.paint(Layer.PHASE, Owner.REDONE, one.stepped_s, cut_s)
    canvas.paint(Layer.PHASE, Owner.DETECTION, cut_s, until_s)


def _paint_steps(canvas: Canvas, history: RunHistory, told: Sequence[_Told]) -> None:
    for one, lost in zip(told, lost_steps(history, [one.steps for one in told]), strict=True):
        for step in one.steps:
            owner = Owner.REDONE if id(step) in lost else Owner.PRODUCTIVE
            canvas.paint(Layer.STEP, owner, step.at_s - step.step_s, step.at_s)


def lost_steps(history: RunHistory, steps: Sequence[Sequence[StepTime]]) -> list[set[int]]:
    """Of every attempt the `id` of the records whose steps were lost.

    A step is lost when a later attempt, or a recovery in the same one, went back behind it.

    Args:
        history: of the run.
        steps: of every attempt, in the order in which they were completed.
    """
    found: list[set[int]] = []
    goes_on_from: float = float("inf")
    for view, own in zip(reversed(history.attempts), reversed(steps), strict=True):
        found.append(_lost_in(view, own, goes_on_from))
        if view.first_step is not None or own:
            first = own[0].step - 1 if own else view.from_step
            goes_on_from = min(goes_on_from, view.from_step, first)
    return found[::-1]


def _lost_in(view: AttemptView, steps: Sequence[StepTime], goes_on_from: float) -> set[int]:
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
        newest = min(newest, step.step - 1)
    return lost


def _paint_events(canvas: Canvas, one: _Told) -> None:
    """Pauses and recoveries inside the processes."""
    until_s = one.noticed_s if one.noticed_s is not None else canvas.to_s
    for pause in one.view.pauses:
        to_s = pause.ended.at_s if pause.ended is not None else until_s
        canvas.paint(Layer.PAUSE, Owner.PAUSED, pause.began.at_s, to_s)
    for recovery in one.view.recoveries:
        _paint_recovery(canvas, one, recovery, until_s)


def _paint_recovery(
    canvas: Canvas, one: _Told, recovery: InProcessRecovery, until_s: float
) -> None:
    owner, noticed_s = RECOVERY[recovery.began.decision.rung], recovery.began.fault.at_s
    over_s = recovery.ended.at_s if recovery.ended is not None else until_s
    canvas.paint(Layer.RECOVERY, owner, noticed_s, over_s)
    index = bisect_right(one.steps, noticed_s, key=lambda step: step.at_s)
    last = one.steps[index - 1] if index else None
    if last is not None:
        lost_s = _missing(recovery, last) * one.usual_s
        canvas.paint(Layer.AROUND, Owner.DETECTION, last.at_s, noticed_s)
        canvas.paint(Layer.AROUND, Owner.REDONE, last.at_s, min(last.at_s + lost_s, noticed_s))
    if index == len(one.steps):
        return
    following = one.steps[index]
    begin_s = following.at_s - following.step_s
    if recovery.succeeded:
        canvas.paint(Layer.AROUND, owner, over_s, begin_s)
    # The record of a step that was finished by the recovery itself spans the fault.
    canvas.paint(Layer.IN_STEP, Owner.DETECTION, begin_s + one.usual_s, noticed_s)


def _missing(recovery: InProcessRecovery, last: StepTime) -> int:
    """How many of the steps that a recovery lost are not on record."""
    ended = recovery.ended
    if ended is None or ended.step is None:
        return 0
    return max(0, ended.step + ended.steps_lost - last.step)


def _paint_unsupervised(canvas: Canvas, history: RunHistory, told: Sequence[_Told]) -> None:
    """NoHook watched and, as far as is known, nothing trained."""
    alive = sorted(
        (one.view.started.at_s, one.stepped_s) for one in told if one.stepped_s is not None
    )
    for from_s, until_s in history.unattended:
        at_s = from_s
        for began_s, stepped_s in alive:
            canvas.paint(Layer.UNSUPERVISED, Owner.UNSUPERVISED, at_s, min(began_s, until_s))
            at_s = max(at_s, stepped_s)
        canvas.paint(Layer.UNSUPERVISED, Owner.UNSUPERVISED, at_s, until_s)
