"""What a person reads in the UI: reports of faults and recoveries as Markdown, lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from training.journal.attempt_log import StepRecord
from training.journal.events import AlertCleared, AlertRaised, AnyNote, CheckpointDamaged
from training.journal.history import AttemptView, InProcessRecovery, RunHistory
from training.recovery.events import LastSave, PauseBegan, PauseEnded, RecoveryBegan, RecoveryEnded
from training.recovery.faults import Fault
from training.recovery.ladder import Decision
from training.supervisor.report import RECOVERING, outcome_of

SUB_HEALTHY_TEXT = " The job is sub-healthy: the same link may break again."


def fault_report(
    placement: int,
    attempt: int,
    fault: Fault,
    decision: Decision,
    *,
    runners_up: Sequence[Fault] = (),
    last_save: LastSave | None = None,
) -> str:
    """The report of a fault that ended an attempt."""
    isolate = f"\n\nNode **{decision.isolate}** is isolated." if decision.isolate else ""
    saved = f"\n\n{_sentence(note_text(last_save))}" if last_save is not None else ""
    return (
        f"{_heading(fault, f'Attempt {placement}.{attempt}')}"
        f"**Decision: `{decision.rung}`.** {decision.reason}{isolate}{saved}\n"
        f"{_passed_over(decision.skipped)}\n"
        f"{_less_likely(runners_up)}"
    )


def recovery_report(view: AttemptView, recovery: InProcessRecovery) -> str:
    """The report of a fault that processes of an attempt outlived, and of what was done."""
    began = recovery.began
    placement, attempt = view.key
    where = f"Attempt {placement}.{attempt}, generation {began.generation}"
    return (
        f"{_heading(began.fault, where)}"
        f"**Decision: `{began.decision.rung}`**, inside the processes. {began.decision.reason}\n"
        f"{_passed_over(began.decision.skipped)}\n\n"
        f"{_outcome(view, recovery)}\n"
    )


def note_text(note: AnyNote) -> str:
    """A note as one line of a log."""
    match note:
        case RecoveryBegan():
            where = note.fault.where
            what = f"{note.fault.fault_class} at {where}: {note.fault.evidence[:160]}"
            began = f"recovery {note.number}, generation {note.generation}"
            return f"{began}: {what} -> {note.decision.rung}"
        case RecoveryEnded():
            took = f"after {note.duration_s:.2f} s, {note.steps_lost} steps done again"
            went = f": training goes on from step {note.step} {took}"
            return f"recovery {note.number}{went if note.succeeded else f' failed: {note.why}'}"
        case LastSave():
            saved = f"end-of-life checkpoint of step {note.step} by ranks {_ranks(note.ranks)}"
            return saved if note.step is not None else f"no end-of-life checkpoint: {note.why}"
        case PauseBegan() | PauseEnded():
            stands = f": every rank stands at step {note.step}"
            goes_on = f" is over: training goes on from step {note.step}"
            return f"pause {note.number}{stands if isinstance(note, PauseBegan) else goes_on}"
        case CheckpointDamaged():
            done = "mended from a node" if note.is_mended else "set aside, the one before is taken"
            return f"checkpoint of step {note.step} is damaged, {done}: {note.text}"
        case AlertRaised() | AlertCleared():
            told = f", {note.point}: {note.text}" if isinstance(note, AlertRaised) else " is over"
            return f"alert {note.number}{told}"


def standing(history: RunHistory) -> str | None:
    """What the living attempt is doing when it is not training, None when it is."""
    view = history.open_attempt
    if view is None or not view.notes:
        return None
    if view.pause is not None:
        return f"paused at step {view.pause.began.step}"
    last = view.recoveries[-1] if view.recoveries else None
    if last is not None and last.ended is None:
        return f"recovering: {last.began.fault.fault_class} -> {last.began.decision.rung}"
    return None


def progress_text(
    last: StepRecord | None, target: int | None, activity: str, *, ettr: float | None = None
) -> str:
    """One line under the progress bar."""
    if last is None:
        return activity
    ratio = f", ETTR {ettr:.1%}" if ettr is not None else ""
    speed = f", {last.tokens_per_s:,.0f} tokens/s" if last.tokens_per_s else ""
    where = f"step {last.step} / {target or '?'}, loss {last.loss:.4f}"
    return f"{where}{speed}{ratio}: {activity}"


def _heading(fault: Fault, where: str) -> str:
    return (
        f"## {fault.fault_class} at {fault.where}\n\n"
        f"{where}, after step {fault.step}.\n\n"
        f"```\n{fault.evidence}\n```\n\n{fault.explanation}\n\n"
        f"{_facts(fault)}"
    )


def _facts(fault: Fault) -> str:
    blame = (("the program", fault.user_fault), ("hardware", fault.hardware_fault))
    rows = (
        ("code", fault.code),
        ("device", fault.device),
        ("cause lies in", " and ".join(who for who, holds in blame if holds)),
        ("mended by", fault.recoverable_by),
        ("you should", fault.action),
    )
    told = "".join(f"| {name} | {value} |\n" for name, value in rows if value not in {None, ""})
    return f"| | |\n|---|---|\n{told}\n" if told else ""


def _passed_over(skipped: Sequence[str]) -> str:
    return "".join(f"\n- not `{text}`" for text in skipped)


def _outcome(view: AttemptView, recovery: InProcessRecovery) -> str:
    ended = recovery.ended
    if ended is None:
        over = outcome_of(view, recovery) != RECOVERING
        return "**Failed**: the attempt ended first." if over else "Under way."
    if not ended.succeeded:
        return f"**Failed** after {ended.duration_s:.2f} s: {ended.why}."
    rows = (
        ("goes on from step", ended.step),
        ("steps done again", ended.steps_lost),
        ("new processes", _ranks(ended.replaced) or "none"),
        ("state from a replica", _ranks(ended.repaired) or "none"),
    )
    told = "".join(f"| {name} | {value} |\n" for name, value in rows)
    mark = SUB_HEALTHY_TEXT if recovery.left_sub_healthy else ""
    return f"**Mended** after {ended.duration_s:.2f} s.{mark}\n\n| | |\n|---|---|\n{told}"


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _less_likely(runners_up: Sequence[Fault]) -> str:
    if not runners_up:
        return ""
    rows = "".join(f"- {fault.fault_class}: `{fault.evidence[:200]}`\n" for fault in runners_up)
    return f"\nLess likely:\n\n{rows}"
