"""The evaluation of a drill: its ledger and its curve beside those of a run without faults.

Pure. Times are seconds, since the epoch where a name ends in `_at_s`; steps are completed
optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from perdure.training.config.job import Job
from perdure.training.drill.driver import Curve, Pauser, RunOutcome
from perdure.training.drill.table import Drill, Expected
from perdure.training.journal.attempt_view import AttemptView
from perdure.training.journal.history import RunHistory
from perdure.training.recovery.rungs import Rung
from perdure.training.supervisor.watch import EndKind


@dataclass(frozen=True, slots=True)
class DrillRecovery:
    """A recovery after which training continued.

    Attributes:
        rung: the recovery action.
        noticed_at_s: when the fault was noticed.
        trains_at_s: when training continued, None when it did not.
        steps_lost: completed steps that were executed again.
    """

    rung: Rung
    noticed_at_s: float
    trains_at_s: float | None
    steps_lost: int


@dataclass(frozen=True, slots=True)
class DrillOutcome:
    """The result of a drill.

    Attributes:
        name: the drill's name on the command line.
        parallelism: kind of the job's parallelism.
        injected: the faults in words, for reports.
        fired: number of faults that really happened.
        rungs: recovery actions, in order.
        detected_s: from the first fault to its notice.
        recovered_s: from the first fault to the end of the last recovery.
        steps_lost: completed steps that were executed again.
        curve_equal: loss and gradient norm equal those of the undisturbed run in every digit.
        differs_from: step from which on they may differ; None: never.
        left_over: number of processes or objects that outlived the run.
        problems: deviations from what was expected.
    """

    name: str
    parallelism: str
    injected: str
    fired: int = 0
    rungs: tuple[Rung, ...] = ()
    detected_s: float | None = None
    recovered_s: float | None = None
    steps_lost: int = 0
    curve_equal: bool = False
    differs_from: int | None = None
    left_over: int = 0
    problems: tuple[str, ...] = ()

    @property
    def as_expected(self) -> bool:
        """Whether the drill had no problem."""
        return not self.problems

    @property
    def row(self) -> dict[str, str]:
        """The outcome as the row of a table, by headings."""
        return {
            "drill": self.name,
            "injected": self.injected,
            "detected s": _seconds(self.detected_s),
            "rung": " ".join(self.rungs) or "-",
            "recovered s": _seconds(self.recovered_s),
            "steps lost": str(self.steps_lost),
            "curve equal": self._curve,
            "left over": str(self.left_over),
            "as expected": "yes" if self.as_expected else "NO",
        }

    @property
    def line(self) -> str:
        """The outcome in a line, without the name."""
        if not self.as_expected:
            return "; ".join(self.problems)
        return (
            f"{', '.join(self.rungs) or 'nothing to recover'}: detected after "
            f"{_seconds(self.detected_s)} s, recovered after {_seconds(self.recovered_s)} s, "
            f"{self.steps_lost} steps lost, curve equal: {self._curve}"
        )

    @property
    def _curve(self) -> str:
        if not self.curve_equal:
            return "no"
        return "yes" if self.differs_from is None else f"up to step {self.differs_from - 1}"


def list_recoveries(history: RunHistory) -> list[DrillRecovery]:
    """List recoveries after which training continued; after a stop, the user's restart."""
    recoveries: list[DrillRecovery] = []
    attempts = history.attempts
    for number, view in enumerate(attempts, start=1):
        next_attempt = attempts[number] if number < len(attempts) else None
        for recovery in view.recoveries:
            if recovery.ended is not None and recovery.ended.succeeded:
                began, ended = recovery.began, recovery.ended
                recoveries.append(
                    DrillRecovery(
                        began.decision.rung, began.fault.at_s, ended.at_s, ended.steps_lost
                    )
                )
        if view.decision is not None and view.ended is not None and view.ended.fault is not None:
            noticed_at_s, reached = view.ended.fault.at_s, view.ended.to_step or 0
            recoveries.append(
                _restart_recovery(view.decision.rung, noticed_at_s, reached, next_attempt)
            )
    return recoveries


def _restart_recovery(
    rung: Rung, noticed_at_s: float, reached: int, next_attempt: AttemptView | None
) -> DrillRecovery:
    if next_attempt is None:
        return DrillRecovery(rung, noticed_at_s, None, 0)
    trains_at_s = next_attempt.first_step.stepped_s if next_attempt.first_step is not None else None
    return DrillRecovery(rung, noticed_at_s, trains_at_s, max(0, reached - next_attempt.from_step))


def differences(curve: Curve, undisturbed: Curve, *, end_step: int | None = None) -> list[int]:
    """List the steps whose numbers differ between two runs, or that only one of them has.

    Args:
        curve: the disturbed run's.
        undisturbed: the undisturbed run's.
        end_step: the first step that is not compared; None: all steps are compared.
    """
    steps = sorted({*curve, *undisturbed})
    return [
        step
        for step in steps
        if (end_step is None or step < end_step) and curve.get(step) != undisturbed.get(step)
    ]


def judge(
    drill: Drill,
    outcome: RunOutcome,
    undisturbed: RunOutcome,
    *,
    job: Job,
    expected: Expected,
    pauser: Pauser | None,
) -> DrillOutcome:
    """Compare a drill with the run without faults and with its expected result."""
    recoveries = list_recoveries(outcome.history)
    fired = [at_s for times in outcome.fired_s.values() for at_s in times]
    if pauser is not None and pauser.requested_s is not None:
        fired, noticed, trains = [pauser.requested_s], *_pause_times(outcome.history)
    else:
        noticed = min((recovery.noticed_at_s for recovery in recoveries), default=None)
        trains = max((recovery.trains_at_s or 0.0 for recovery in recoveries), default=None)
    first = min(fired, default=None)
    if first is not None and noticed is not None:
        noticed = max(first, noticed)  # torch elastic records an exception's whole second
    return DrillOutcome(
        name=drill.name,
        parallelism=job.parallelism.kind.value,
        injected=drill.injected,
        fired=len(fired),
        rungs=tuple(recovery.rung for recovery in recoveries),
        detected_s=_between(first, noticed),
        recovered_s=_between(first, trains),
        steps_lost=sum(recovery.steps_lost for recovery in recoveries),
        curve_equal=not differences(outcome.curve, undisturbed.curve, end_step=drill.differs_from),
        differs_from=drill.differs_from,
        left_over=len(outcome.leftovers),
        problems=(
            *find_deviations(outcome, undisturbed, differs_from=drill.differs_from),
            *_ladder_problems(outcome.history, recoveries, expected),
            *_injection_problems(job, outcome),
            *_pause_problems(outcome.history, pauser),
        ),
    )


def find_deviations(
    outcome: RunOutcome, undisturbed: RunOutcome, *, differs_from: int | None = None
) -> Iterator[str]:
    """Describe how a run deviates from the undisturbed run.

    Args:
        outcome: the remains of the run.
        undisturbed: the remains of the undisturbed run.
        differs_from: step from which on the curves may differ; None: never.
    """
    if outcome.ended != EndKind.COMPLETED:
        yield f"the run ended: {outcome.ended}"
    differing = differences(outcome.curve, undisturbed.curve, end_step=differs_from)
    if differing:
        yield f"the curve differs at {len(differing)} steps, first at step {differing[0]}"
    elif differs_from is None and outcome.state != undisturbed.state:
        yield "the curve is equal, the final state is not"
    if outcome.leftovers:
        yield f"left over: {', '.join(outcome.leftovers)}"


def _ladder_problems(
    history: RunHistory, recoveries: Sequence[DrillRecovery], expected: Expected
) -> Iterator[str]:
    rungs = tuple(recovery.rung for recovery in recoveries)
    if rungs != expected.rungs:
        yield f"recovered by {_names(rungs)}, expected {_names(expected.rungs)}"
    lost = sum(recovery.steps_lost for recovery in recoveries)
    if lost > expected.steps_lost:
        yield f"{lost} completed steps lost, expected at most {expected.steps_lost}"
    places = [view.restored for view in history.attempts if view.restored is not None]
    fetched = sum(place.num_fetched for place in places)
    if expected.num_fetched is not None and fetched > expected.num_fetched:
        why = "; ".join(place.text for place in places)
        yield f"{fetched} shards were read in the store, expected {expected.num_fetched}: {why}"
    saves = [view.last_save for view in history.attempts if view.last_save is not None]
    saved = next((save.step for save in saves), None)
    if expected.last_save is not None and saved != expected.last_save:
        why = next((f" ({save.why})" for save in saves if save.why), "")
        yield f"the survivors saved step {saved}, expected {expected.last_save}{why}"


def _injection_problems(job: Job, outcome: RunOutcome) -> Iterator[str]:
    planned = sum(fault.times for fault in job.drill.faults)
    fired = sum(len(times) for times in outcome.fired_s.values())
    if fired < planned:
        yield f"{fired} of {planned} faults happened"


def _pause_problems(history: RunHistory, pauser: Pauser | None) -> Iterator[str]:
    if pauser is None:
        return
    pauses = [pause for view in history.attempts for pause in view.pauses]
    ended = [pause.ended.step if pause.ended is not None else None for pause in pauses]
    if len(pauses) != 1 or ended != [pauses[0].began.step]:
        steps = [pause.began.step for pause in pauses]
        yield f"pauses began at steps {steps} and ended at {ended}"
    if len({step for steps in pauser.paused_at for step in steps}) != 1:
        yield f"the ranks paused at steps {pauser.paused_at[:3]}"
    if pauser.resumed_s is None:
        yield "the ranks were never seen paused"


def _pause_times(history: RunHistory) -> tuple[float | None, float | None]:
    """Read when the ranks paused and when they continued."""
    pauses = [pause for view in history.attempts for pause in view.pauses]
    if not pauses:
        return None, None
    ended = pauses[-1].ended
    return pauses[0].began.at_s, ended.at_s if ended is not None else None


def _between(earlier_s: float | None, later_s: float | None) -> float | None:
    return later_s - earlier_s if earlier_s is not None and later_s else None


def _seconds(value: float | None) -> str:
    return f"{value:.2f}" if value is not None else "-"


def _names(rungs: Sequence[Rung]) -> str:
    return ", ".join(rungs) or "nothing"
