"""The texts about a run: tables, lines, the loss picture.

A recovery inside the processes is a row of its own below its attempt: one generation of process
groups that a fault ended. Rows come from the ledger, the curve from the step records in the
store. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perdure.training.journal.attempt_view import Alert, AttemptView, InProcessRecovery
from perdure.training.journal.events import (
    AlertCleared,
    AlertRaised,
    BatchSkipped,
    CheckpointDamaged,
    CheckpointRestored,
    ChipsHealed,
    LedgerEvent,
    ProgramNotice,
    StepRecord,
)
from perdure.training.journal.history import RunHistory
from perdure.training.recovery.faults import Fault
from perdure.training.recovery.protocol import (
    AttemptGivenUp,
    LastSave,
    PauseBegan,
    PauseEnded,
    RecoveryBegan,
    RecoveryEnded,
)
from perdure.training.recovery.repair import SkippedBatch
from perdure.training.reporting.markdown import clock_text, counted
from perdure.training.reporting.pictures import new_figure, png_of

RECOVERING = "recovering"
RECOVERED = "recovered"
SUB_HEALTHY = "recovered, sub-healthy"
NOT_RECOVERED = "not recovered"
OPEN = "open"
PAST = "past"
_NUM_LABELS = 20  # in a picture; more of them hide each other


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """One line of the table of attempts.

    Attributes:
        from_step: None for a command whose steps are not known.
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
    from_step: int | None
    to_step: int | None
    outcome: str
    fault: str
    rung: str
    seconds_to_next_step: float | None
    generation: int | None = None


def story_rows(history: RunHistory) -> list[AttemptRow]:
    """Build the table of attempts, oldest first, each followed by the recoveries inside it."""
    rows = attempt_rows(history)
    return [
        row
        for attempt_row, view in zip(rows, history.attempts, strict=True)
        for row in (attempt_row, *_recovery_rows(view))
    ]


def attempt_rows(history: RunHistory) -> list[AttemptRow]:
    """Build the table of attempts, oldest first."""
    return [_row(history, index) for index in range(len(history.attempts))]


def state_word(history: RunHistory, view: AttemptView) -> str:
    """Say in a word what an attempt is doing, or how it ended."""
    if view.ended is not None:
        return view.ended.outcome
    if view.pause is not None:
        return "paused"
    if any(recovery.ended is None for recovery in view.recoveries[-1:]):
        return RECOVERING
    if view.first_step is not None:
        return "training"
    # The steps of a command are not known.
    return "running" if history.is_command else "starting"


def _row(history: RunHistory, index: int) -> AttemptRow:
    view, later = history.attempts[index], history.attempts[index + 1 :]
    ended, fault = view.ended, view.ended.fault if view.ended is not None else None
    nodes = [member.node for member in view.members]
    counts = ended.proc_start_cnt if ended is not None else {}
    return AttemptRow(
        placement=view.started.placement,
        attempt=view.started.attempt,
        nodes=",".join(nodes),
        schedule_cnt=",".join(str(member.schedule_cnt) for member in view.members),
        proc_start_cnt=",".join(str(counts.get(node, "-")) for node in nodes) if ended else "",
        from_step=None if history.is_command and view.first_step is None else view.from_step,
        to_step=ended.to_step if ended is not None else None,
        outcome=state_word(history, view),
        fault=_fault_text(fault) if fault is not None else "",
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
                fault=_fault_text(fault),
                rung=recovery.began.decision.rung.value,
                seconds_to_next_step=_duration_s(recovery) if recovery.succeeded else None,
                generation=recovery.began.generation,
            )
        )
        from_step = ended.step if ended is not None and ended.step is not None else from_step
    return rows


def outcome_of(view: AttemptView, recovery: InProcessRecovery) -> str:
    """Say how a recovery inside the processes of an attempt went: a text above."""
    if recovery.succeeded:
        return SUB_HEALTHY if recovery.is_sub_healthy else RECOVERED
    return RECOVERING if recovery.ended is None and view.ended is None else NOT_RECOVERED


def _duration_s(recovery: InProcessRecovery) -> float | None:
    return round(recovery.ended.duration_s, 2) if recovery.ended is not None else None


def _fault_text(fault: Fault) -> str:
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
        value: measured when the alert was raised, in the unit that `what` names.
        limit: the value should not have passed it.
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


def alert_cells(row: AlertRow) -> dict[str, str]:
    """Write the row for the UI, which shows nothing as `null`."""
    values = {
        "state": row.state,
        "since (UTC)": row.since,
        "point": row.point,
        "what": row.what,
        "where": row.where,
        "limit": f"{row.limit:g}",
        "step": row.step,
        "attempt": row.attempt,
        "lasted": f"{row.lasted_s:g} s" if row.lasted_s is not None else None,
    }
    return {name: "" if value is None else str(value) for name, value in values.items()}


def alert_rows(history: RunHistory) -> list[AlertRow]:
    """Build the table of alerts: open alerts first, then the newest first."""
    alerts = [(view, alert) for view in history.attempts for alert in view.alerts]
    rows = [_alert_row(view, alert) for view, alert in reversed(alerts)]
    return sorted(rows, key=lambda row: row.state != OPEN)


def _alert_row(view: AttemptView, alert: Alert) -> AlertRow:
    raised, cleared = alert.began, alert.ended
    is_open = cleared is None and view.ended is None
    return AlertRow(
        state=OPEN if is_open else PAST,
        since=clock_text(raised.at_s),
        point=raised.point.value,
        what=raised.text,
        where=alert_place(raised),
        value=raised.value,
        limit=raised.limit,
        step=raised.step,
        attempt="{}.{}".format(*view.key),
        lasted_s=round(cleared.at_s - raised.at_s, 1) if cleared is not None else None,
    )


def alert_place(raised: AlertRaised) -> str:
    """Say what an alert is about: node, device and rank, as far as it names them."""
    parts = (("", raised.node), ("device ", raised.device), ("rank ", raised.rank))
    return ", ".join(f"{name}{value}" for name, value in parts if value is not None)


def losses_of_steps(records: Mapping[int, StepRecord]) -> dict[int, float]:
    """Return the loss of every step that has a loss."""
    return {step: record.loss for step, record in records.items() if record.loss is not None}


def num_kept(history: RunHistory, records: Mapping[int, StepRecord]) -> int:
    """Count the steps that a run did and kept; a command may show only every tenth.

    Args:
        history: of at least one attempt.
        records: of the kept steps, at least one.
    """
    first = history.attempts[0]
    from_step = first.started.from_step if history.is_command else first.from_step
    return max(records) - min(from_step, max(records))


def loss_picture(history: RunHistory, records: Mapping[int, StepRecord]) -> bytes:
    """Draw the loss of every kept step with the faults marked, as PNG."""
    figure = new_figure(10, 4.5)
    axes = figure.add_subplot()
    losses = losses_of_steps(records)
    axes.plot(list(losses), list(losses.values()), color="#1f5fa8", linewidth=1.2)
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
    for checkpoint in history.checkpoints:
        axes.axvline(checkpoint.step, ymax=0.03, color="#2e7d32", linewidth=1.0)
    axes.set_xlabel("step (green marks: committed checkpoints)")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.25)
    axes.set_title("Loss of every kept step; faults in red, recovered in the processes in orange")
    return png_of(figure)


def _marks(history: RunHistory) -> list[tuple[int, str, str]]:
    """List faults as step, text and colour, oldest first."""
    marks = []
    for view in history.attempts:
        for recovery in view.recoveries:
            fault = recovery.began.fault
            step = fault.step if fault.step is not None else view.from_step
            colour = "#d98e04" if recovery.succeeded else "#c0392b"
            marks.append((step, f"{fault.fault_class}\n{recovery.began.decision.rung}", colour))
        ended = view.ended.fault if view.ended is not None else None
        if ended is not None and view.decision is not None:
            step = ended.step if ended.step is not None else view.from_step
            marks.append((step, f"{ended.fault_class}\n{view.decision.rung}", "#c0392b"))
    return marks


def event_text(event: LedgerEvent) -> str:  # noqa: C901, PLR0911 each kind has its own
    """Write an event as a line of a log."""
    match event:
        case RecoveryBegan():
            where = event.fault.where
            cause = f"{event.fault.fault_class} at {where}: {event.fault.evidence[:160]}"
            began = f"recovery {event.number}, generation {event.generation}"
            return f"{began}: {cause} -> {event.decision.rung}"
        case RecoveryEnded():
            repeated = counted(event.steps_lost, "step")
            cost = f"after {event.duration_s:.2f} s, {repeated} repeated"
            success = f": training continues from step {event.step} {cost}"
            failure = f" failed: {event.why}"
            return f"recovery {event.number}{success if event.succeeded else failure}"
        case AttemptGivenUp():
            cause = (
                f"{event.fault.fault_class} at {event.fault.where}: {event.fault.evidence[:160]}"
            )
            return f"the processes end: {cause}: {event.why}"
        case LastSave():
            saved = f"end-of-life checkpoint of step {event.step} by ranks {_ranks(event.ranks)}"
            return saved if event.step is not None else f"no end-of-life checkpoint: {event.why}"
        case PauseBegan() | PauseEnded():
            paused = f": every rank is paused at step {event.step}"
            resumed = f" is over: training continues from step {event.step}"
            return f"pause {event.number}{paused if isinstance(event, PauseBegan) else resumed}"
        case CheckpointDamaged():
            aside = "set aside in favor of the previous one"
            answer = "repaired from a node" if event.is_repaired else aside
            return f"checkpoint of step {event.step} is damaged and was {answer}: {event.text}"
        case CheckpointRestored():
            return event.text
        case BatchSkipped():
            return skipped_text(event)
        case ProgramNotice():
            return f"the program: {event.text}"
        case ChipsHealed():
            return f"before {event.rung}: {event.text}"
        case AlertRaised():
            return f"alert {event.number}, {event.point}: {event.text}"
        case AlertCleared():
            return f"alert {event.number} is over"


def skipped_text(event: BatchSkipped) -> str:
    """Write a line about a batch that no rank trains on."""
    batch = event.batch
    where = (
        f"the batch of samples {batch.start} to {batch.stop} is passed over at step {batch.step}"
    )
    if event.is_known:
        return f"{where} once more: it was abnormal before"
    return f"{where}: {measured_text(batch)}"


def measured_text(batch: SkippedBatch) -> str:
    """Write the loss and gradient norm of a batch that was passed over."""
    loss, norm = (
        "no number" if value is None else f"{value:g}" for value in (batch.loss, batch.grad_norm)
    )
    return f"loss {loss}, gradient norm {norm}"


def program_notices(history: RunHistory) -> list[str]:
    """List the notices for the author of the program, each once."""
    events = [event for view in history.attempts for event in view.events]
    return list(dict.fromkeys(event.text for event in events if isinstance(event, ProgramNotice)))


def activity_of(history: RunHistory) -> str | None:
    """Say what the living attempt does instead of training; None: it trains."""
    view = history.open_attempt
    if view is None or not view.events:
        return None
    if view.pause is not None:
        began = view.pause.began
        return f"paused at step {began.step} since {clock_text(began.at_s)} UTC"
    last = view.recoveries[-1] if view.recoveries else None
    if last is not None and last.ended is None:
        return f"recovering: {last.began.fault.fault_class} -> {last.began.decision.rung}"
    return None


def progress_text(
    last: StepRecord | None, target: int | None, activity: str, *, ettr: float | None = None
) -> str:
    """Write the line under the progress bar."""
    if last is None:
        return activity
    # The activity comes first: cards of the UI cut off the end.
    ratio = f", ETTR {ettr:.1%}" if ettr is not None else ""
    speed = f", {last.tokens_per_s:,.0f} tokens/s" if last.tokens_per_s else ""
    loss = f", {last.loss_text}" if last.loss_text else ""
    return f"{activity}, step {last.step} / {target or '?'}{loss}{speed}{ratio}"


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
