"""What is left to read after a run: the table of attempts, and the loss with its faults.

A recovery inside the processes is a row of its own below its attempt: one generation of process
groups that a fault ended. Rows come from the ledger, the curve from the step records in the
store. Times are seconds.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from training.journal.attempt_log import StepRecord
from training.journal.events import AlertCleared, AlertRaised
from training.journal.history import Alert, AttemptView, InProcessRecovery, RunHistory
from training.recovery.faults import Fault

RECOVERING = "recovering"
MENDED = "mended"
SUB_HEALTHY = "mended, sub-healthy"
NOT_MENDED = "not mended"
OPEN = "open"
PAST = "past"
_NUM_LABELS = 20  # in a picture; more of them hide each other


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """One line of the table of attempts.

    Attributes:
        schedule_cnt: MA_SCHEDULE_CNT of each member, in order.
        proc_start_cnt: MA_PROC_START_CNT of each member, in order; empty until it ended.
        seconds_to_next_step: from the fault to the first step completed after it.
        generation: of process groups that a recovery inside the processes replaced; None in the
            row of a whole attempt.
    """

    placement: int
    attempt: int
    nodes: str
    schedule_cnt: str
    proc_start_cnt: str
    from_step: int
    to_step: int | None
    outcome: str
    fault: str
    rung: str
    seconds_to_next_step: float | None
    generation: int | None = None


def story_rows(history: RunHistory) -> list[AttemptRow]:
    """The table of attempts, oldest first, each followed by the recoveries inside it."""
    rows = attempt_rows(history)
    return [
        row
        for own, view in zip(rows, history.attempts, strict=True)
        for row in (own, *_recovery_rows(view))
    ]


def attempt_rows(history: RunHistory) -> list[AttemptRow]:
    """The table of attempts, oldest first."""
    return [_row(view, history.attempts[i + 1 :]) for i, view in enumerate(history.attempts)]


def _row(view: AttemptView, later: Sequence[AttemptView]) -> AttemptRow:
    ended, fault = view.ended, view.ended.fault if view.ended is not None else None
    nodes = [member.node for member in view.members]
    counts = ended.proc_start_cnt if ended is not None else {}
    return AttemptRow(
        placement=view.started.placement,
        attempt=view.started.attempt,
        nodes=",".join(nodes),
        schedule_cnt=",".join(str(member.schedule_cnt) for member in view.members),
        proc_start_cnt=",".join(str(counts.get(node, "-")) for node in nodes) if ended else "",
        from_step=view.from_step,
        to_step=ended.to_step if ended is not None else None,
        outcome=ended.outcome if ended is not None else "running",
        fault=_told(fault) if fault is not None else "",
        rung=view.decision.rung.value if view.decision is not None else "",
        seconds_to_next_step=_seconds_to_next_step(view, later),
    )


def _recovery_rows(view: AttemptView) -> list[AttemptRow]:
    rows, from_step = [], view.from_step
    for recovery in view.recoveries:
        fault, ended = recovery.began.fault, recovery.ended
        rows.append(
            AttemptRow(
                placement=view.started.placement,
                attempt=view.started.attempt,
                nodes=fault.node or "",
                schedule_cnt="",
                proc_start_cnt="",
                from_step=from_step,
                to_step=fault.step,
                outcome=outcome_of(view, recovery),
                fault=_told(fault),
                rung=recovery.began.decision.rung.value,
                seconds_to_next_step=_duration_s(recovery) if recovery.succeeded else None,
                generation=recovery.began.generation,
            )
        )
        from_step = ended.step if ended is not None and ended.step is not None else from_step
    return rows


def outcome_of(view: AttemptView, recovery: InProcessRecovery) -> str:
    """How a recovery inside the processes of an attempt went, in a word or two."""
    if recovery.succeeded:
        return SUB_HEALTHY if recovery.left_sub_healthy else MENDED
    return RECOVERING if recovery.ended is None and view.ended is None else NOT_MENDED


def recovery_facts(view: AttemptView, recovery: InProcessRecovery) -> dict[str, Any]:
    """A recovery inside the processes as plain values, for events and scripts."""
    began, ended = recovery.began, recovery.ended
    return {
        "placement": view.started.placement,
        "attempt": view.started.attempt,
        "number": began.number,
        "generation": began.generation,
        "fault_class": began.fault.fault_class.value,
        "evidence": began.fault.evidence,
        "node": began.fault.node,
        "rank": began.fault.rank,
        "rung": began.decision.rung.value,
        "reason": began.decision.reason,
        "step": ended.step if ended is not None and ended.step is not None else began.fault.step,
        "steps_lost": ended.steps_lost if ended is not None else None,
        "duration_s": _duration_s(recovery),
        "replaced": list(ended.replaced) if ended is not None else [],
        "repaired": list(ended.repaired) if ended is not None else [],
        "succeeded": recovery.succeeded,
        "sub_healthy": began.decision.sub_healthy,
        "outcome": outcome_of(view, recovery),
        "why": ended.why if ended is not None else "",
    }


def _duration_s(recovery: InProcessRecovery) -> float | None:
    return round(recovery.ended.duration_s, 2) if recovery.ended is not None else None


def _told(fault: Fault) -> str:
    return f"{fault.fault_class}: {_short(fault.evidence)}"


def _short(text: str, width: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."


def _seconds_to_next_step(view: AttemptView, later: Sequence[AttemptView]) -> float | None:
    if view.ended is None or view.ended.fault is None:
        return None
    steps = [a.first_step.stepped_s for a in later if a.first_step is not None]
    return round(steps[0] - view.ended.fault.at_s, 1) if steps else None


@dataclass(frozen=True, slots=True)
class AlertRow:
    """One line of the table of alerts.

    Attributes:
        state: open or past.
        since: when it was raised, UTC.
        lasted_s: None while it is open, and when its attempt ended before it was cleared.
        value: what was measured when it was raised, in the unit that `what` names.
        limit: what it should not have passed.
    """

    state: str
    since: str
    point: str
    what: str
    where: str
    value: float
    limit: float
    step: int | None
    attempt: str
    lasted_s: float | None


def alert_rows(history: RunHistory) -> list[AlertRow]:
    """The table of alerts: open ones first, then the newest first."""
    told = [(view, alert) for view in history.attempts for alert in view.alerts]
    rows = [_alert_row(view, alert) for view, alert in reversed(told)]
    return sorted(rows, key=lambda row: row.state != OPEN)


def _alert_row(view: AttemptView, alert: Alert) -> AlertRow:
    raised, cleared = alert.began, alert.ended
    is_open = cleared is None and view.ended is None
    return AlertRow(
        state=OPEN if is_open else PAST,
        since=f"{datetime.fromtimestamp(raised.at_s, UTC):%Y-%m-%d %H:%M:%S}",
        point=raised.point.value,
        what=raised.text,
        where=alert_place(raised),
        value=raised.value,
        limit=raised.limit,
        step=raised.step,
        attempt="{}.{}".format(*view.key),
        lasted_s=round(cleared.at_s - raised.at_s, 1) if cleared is not None else None,
    )


def alert_facts(view: AttemptView, note: AlertRaised | AlertCleared) -> dict[str, Any]:
    """What raised an alert, or has cleared it, as plain values, for events."""
    placement, attempt = view.key
    raised = next((a.began for a in view.alerts if a.began.number == note.number), None)
    told = raised.model_dump(mode="json", exclude={"kind"}) if raised is not None else {}
    where = {"placement": placement, "attempt": attempt}
    return {**told, **where, "number": note.number, "at_s": note.at_s}


def alert_place(raised: AlertRaised) -> str:
    """What an alert is about: node, device and rank, as far as it names them."""
    parts = (("", raised.node), ("device ", raised.device), ("rank ", raised.rank))
    return ", ".join(f"{name}{value}" for name, value in parts if value is not None)


def loss_picture(history: RunHistory, kept: Mapping[int, StepRecord]) -> bytes:
    """The loss of every kept step with the faults marked, as PNG."""
    # The font cache makes this import slow, and most of a run does without it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(10, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(list(kept), [r.loss for r in kept.values()], color="#1f5fa8", linewidth=1.2)
    marks = _marks(history)
    for number, (step, text, colour) in enumerate(marks):
        axes.axvline(step, color=colour, linestyle="--", linewidth=1.0)
        if number < len(marks) - _NUM_LABELS:
            continue
        axes.annotate(
            text,
            xy=(step, 0.97 - 0.1 * (number % 3)),  # neighbours do not hide each other
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            verticalalignment="top",
            fontsize=8,
            color=colour,
        )
    for seen in history.checkpoints:
        axes.axvline(seen.step, ymax=0.03, color="#2e7d32", linewidth=1.0)
    axes.set_xlabel("step (green marks: committed checkpoints)")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.25)
    axes.set_title("Loss of every kept step; faults in red, mended inside the processes in orange")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _marks(history: RunHistory) -> list[tuple[int, str, str]]:
    """Faults as step, text and colour, oldest first."""
    found = []
    for view in history.attempts:
        for recovery in view.recoveries:
            fault = recovery.began.fault
            step = fault.step if fault.step is not None else view.from_step
            colour = "#d98e04" if recovery.succeeded else "#c0392b"
            found.append((step, f"{fault.fault_class}\n{recovery.began.decision.rung}", colour))
        ended = view.ended.fault if view.ended is not None else None
        if ended is not None and view.decision is not None:
            step = ended.step if ended.step is not None else view.from_step
            found.append((step, f"{ended.fault_class}\n{view.decision.rung}", "#c0392b"))
    return found
