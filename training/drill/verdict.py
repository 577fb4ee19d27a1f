"""Whether a drill went as expected: its ledger and its curve beside those of a run without faults.

Pure. Times are seconds, since the epoch where a name ends in `_at_s`; steps are completed
optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from training.drill.driver import Curve, RunOutcome
from training.drill.hooks import Pauser
from training.drill.table import Drill, Expected
from training.job import Job
from training.journal.history import AttemptView, RunHistory
from training.recovery.rungs import Rung
from training.specs.model import ParallelKind
from training.supervisor.watch import EndKind


@dataclass(frozen=True, slots=True)
class Recovered:
    """One recovery that had training go on.

    Attributes:
        rung: that did it.
        noticed_at_s: when the fault was noticed.
        trains_at_s: when training went on, None when it did not.
        steps_lost: completed steps that were done again.
    """

    rung: Rung
    noticed_at_s: float
    trains_at_s: float | None
    steps_lost: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one drill.

    Attributes:
        name: of the drill.
        parallelism: of the job.
        injected: for a person.
        fired: how many faults really happened.
        rungs: that mended it, in order.
        detected_s: from the first fault to its notice.
        recovered_s: from the first fault to the end of the last recovery.
        steps_lost: completed steps that were done again.
        curve_equal: loss and gradient norm are those of the undisturbed run in every digit.
        differs_from: step from which on they need not be, None: never.
        left_over: processes that outlived the run.
        problems: in what it is not as expected, for a person.
    """

    name: str
    parallelism: str
    injected: str
    fired: int
    rungs: tuple[Rung, ...]
    detected_s: float | None
    recovered_s: float | None
    steps_lost: int
    curve_equal: bool
    differs_from: int | None
    left_over: int
    problems: tuple[str, ...]

    @property
    def as_expected(self) -> bool:
        """Whether everything was."""
        return not self.problems


def not_played(drill: Drill, kind: ParallelKind, why: str) -> Outcome:
    """What came of a drill whose run could not be started."""
    return Outcome(
        name=drill.name,
        parallelism=kind.value,
        injected=drill.injected,
        fired=0,
        rungs=(),
        detected_s=None,
        recovered_s=None,
        steps_lost=0,
        curve_equal=False,
        differs_from=drill.differs_from,
        left_over=0,
        problems=(f"could not be run: {why}",),
    )


def recovered(history: RunHistory) -> list[Recovered]:
    """The recoveries that had training go on, in order; a stop is one that a person ends."""
    found: list[Recovered] = []
    for view, after in zip(history.attempts, [*history.attempts[1:], None], strict=True):
        for recovery in view.recoveries:
            if recovery.ended is not None and recovery.ended.succeeded:
                began = recovery.began
                found.append(
                    Recovered(
                        began.decision.rung,
                        noticed_at_s=began.fault.at_s,
                        trains_at_s=recovery.ended.at_s,
                        steps_lost=recovery.ended.steps_lost,
                    )
                )
        if view.decision is not None and view.ended is not None and view.ended.fault is not None:
            found.append(_by_attempt(view.decision.rung, view, after))
    return found


def _by_attempt(rung: Rung, view: AttemptView, after: AttemptView | None) -> Recovered:
    assert view.ended is not None  # noqa: S101 asked by the caller
    assert view.ended.fault is not None  # noqa: S101 likewise
    first = after.first_step if after is not None else None
    reached = view.ended.to_step or 0
    return Recovered(
        rung,
        noticed_at_s=view.ended.fault.at_s,
        trains_at_s=first.stepped_s if first is not None else None,
        steps_lost=max(0, reached - after.from_step) if after is not None else 0,
    )


def differences(curve: Curve, undisturbed: Curve, *, before: int | None = None) -> list[int]:
    """Steps whose numbers are not those of the undisturbed run, or that only one of them has.

    Args:
        curve: of the run.
        undisturbed: of the run that it is compared with.
        before: the first step that is not compared, None: all are.
    """
    steps = sorted({*curve, *undisturbed})
    return [
        step
        for step in steps
        if (before is None or step < before) and curve.get(step) != undisturbed.get(step)
    ]


def judge(
    drill: Drill,
    played: RunOutcome,
    undisturbed: RunOutcome,
    *,
    job: Job,
    expected: Expected,
    pauser: Pauser | None,
) -> Outcome:
    """Put together what came of a drill.

    Args:
        drill: as in the table.
        played: what its run has left.
        undisturbed: what the run without faults has left.
        job: of `played`.
        expected: of the drill with this parallelism.
        pauser: the person who had the run pause, if one did.
    """
    recoveries = recovered(played.history)
    fired = [at_s for times in played.fired_s.values() for at_s in times]
    noticed = min((one.noticed_at_s for one in recoveries), default=None)
    trains = max((one.trains_at_s or 0.0 for one in recoveries), default=None)
    if pauser is not None and pauser.asked_s is not None:
        fired, noticed, trains = [pauser.asked_s], *_pause_times(played.history)
    first = min(fired, default=None)
    if first is not None and noticed is not None:
        noticed = max(first, noticed)  # torch elastic records an exception's whole second
    differing = differences(played.curve, undisturbed.curve, before=drill.differs_from)
    return Outcome(
        name=drill.name,
        parallelism=job.parallelism.kind.value,
        injected=drill.injected,
        fired=len(fired),
        rungs=tuple(one.rung for one in recoveries),
        detected_s=_between(first, noticed),
        recovered_s=_between(first, trains),
        steps_lost=sum(one.steps_lost for one in recoveries),
        curve_equal=not differing,
        differs_from=drill.differs_from,
        left_over=len(played.left_over),
        problems=(
            *_run_problems(played, undisturbed, differing, drill.differs_from),
            *_ladder_problems(played.history, recoveries, expected),
            *_injection_problems(job, played),
            *(_pause_problems(played.history, pauser) if pauser is not None else ()),
        ),
    )


def _run_problems(
    played: RunOutcome, undisturbed: RunOutcome, differing: Sequence[int], differs_from: int | None
) -> Iterator[str]:
    if played.ended != EndKind.COMPLETED:
        yield f"the run ended: {played.ended}"
    if differing:
        yield f"the curve differs at {len(differing)} steps, first at step {differing[0]}"
    elif differs_from is None and played.state != undisturbed.state:
        yield "the curve is equal, the final state is not"
    if played.left_over:
        yield f"left over: {', '.join(played.left_over)}"


def _ladder_problems(
    history: RunHistory, recoveries: Sequence[Recovered], expected: Expected
) -> Iterator[str]:
    rungs = tuple(one.rung for one in recoveries)
    if rungs != expected.rungs:
        yield f"mended by {_names(rungs)}, expected {_names(expected.rungs)}"
    lost = sum(one.steps_lost for one in recoveries)
    if lost > expected.steps_lost:
        yield f"{lost} completed steps lost, expected at most {expected.steps_lost}"
    saves = [view.last_save for view in history.attempts if view.last_save is not None]
    saved = next((save.step for save in saves), None)
    if expected.last_save is not None and saved != expected.last_save:
        why = next((f" ({save.why})" for save in saves if save.why), "")
        yield f"the survivors saved step {saved}, expected {expected.last_save}{why}"


def _injection_problems(job: Job, played: RunOutcome) -> Iterator[str]:
    wanted = sum(fault.times for fault in job.drill.faults)
    fired = sum(len(times) for times in played.fired_s.values())
    if fired < wanted:
        yield f"{fired} of {wanted} faults happened"


def _pause_problems(history: RunHistory, pauser: Pauser) -> Iterator[str]:
    pauses = [pause for view in history.attempts for pause in view.pauses]
    ended = [pause.ended.step if pause.ended is not None else None for pause in pauses]
    if len(pauses) != 1 or ended != [pauses[0].began.step]:
        steps = [pause.began.step for pause in pauses]
        yield f"pauses began at steps {steps} and ended at {ended}"
    if len({step for look in pauser.stood_at for step in look}) != 1:
        yield f"the ranks stood at steps {pauser.stood_at[:3]}"
    if pauser.resumed_s is None:
        yield "the ranks were never seen to stand"


def _pause_times(history: RunHistory) -> tuple[float | None, float | None]:
    """When the ranks stood and when they went on."""
    pauses = [pause for view in history.attempts for pause in view.pauses]
    if not pauses:
        return None, None
    ended = pauses[-1].ended
    return pauses[0].began.at_s, ended.at_s if ended is not None else None


def _between(earlier_s: float | None, later_s: float | None) -> float | None:
    return later_s - earlier_s if earlier_s is not None and later_s else None


def _names(rungs: Sequence[Rung]) -> str:
    return ", ".join(rungs) or "nothing"
