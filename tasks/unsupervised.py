"""Remedies for a run that nobody supervises, whatever state its flow run shows. Pure.

A flow run's state is what the server last received, so it is only evidence: the ledger says what
lives. One rule holds for every state: a living attempt gets a supervisor, unless the user has
cancelled the run. A start that puts nothing new on record and does not last is a failed start;
after a few in a row the flow run fails, and a living attempt is tried again ever less often. An
order that comes too early does no harm: a second process of the same flow run leaves at once.
Times are seconds, since the epoch where they are points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from perdure.training.journal.history import RunHistory

MAX_FAILED_STARTS = 5
STEADY_S = 300.0  # a supervisor that lasted this long had started well
FIRST_PAUSE_S = 60.0
LONGEST_PAUSE_S = 3600.0
LEFT_OVER_PAUSE_S = 600.0  # between two tries to take down what an ended run has left over


class Remedy(StrEnum):
    """Action for a run that nobody supervises."""

    NOTHING = "nothing"
    RESCHEDULE = "reschedule"  # the same flow run is started again
    START = "start"  # a new flow run
    TAKE_DOWN = "take_down"  # what the user has cancelled, and nobody has ended
    CLEAR = "clear"  # what an ended run has left over is taken down
    GIVE_UP = "give_up"  # the flow run is failed


@dataclass(frozen=True, slots=True)
class FlowRunFacts:
    """Facts from the server about the flow run that last supervised.

    Attributes:
        state: type of its state, as Prefect has it.
        since_s: time at which it entered the state, seconds since the epoch.
        is_deployed: whether a worker can start it again.
        failed_starts: number of failed starts in a row, up to now.
        speaks_for_run: whether a cancellation of it is one of the run: the ledger names it, and
            it was not ended for the sake of another flow run.
    """

    state: str
    since_s: float
    is_deployed: bool
    failed_starts: int = 0
    speaks_for_run: bool = True

    @property
    def is_in_a_loop(self) -> bool:
        """Whether an automation would start it once more in a moment, and to no end."""
        return self.state == "CRASHED" and self.failed_starts >= MAX_FAILED_STARTS


@dataclass(frozen=True, slots=True)
class Row:
    """Remedies for one state of the flow run.

    Attributes:
        patience_s: time in which the run may still recover by itself.
        alive: while an attempt is open.
        otherwise: while none is.
    """

    patience_s: float
    alive: Remedy
    otherwise: Remedy


# The automation "Crashed -> run again" acts after 30 s, a lost heartbeat is noticed after 75 s.
ROWS: Mapping[str, Row] = {
    "SCHEDULED": Row(0.0, Remedy.NOTHING, Remedy.NOTHING),  # a worker takes it, when there is one
    "PENDING": Row(120.0, Remedy.RESCHEDULE, Remedy.RESCHEDULE),
    "RUNNING": Row(60.0, Remedy.RESCHEDULE, Remedy.RESCHEDULE),
    "PAUSED": Row(60.0, Remedy.RESCHEDULE, Remedy.NOTHING),
    "CRASHED": Row(35.0, Remedy.RESCHEDULE, Remedy.RESCHEDULE),
    "FAILED": Row(35.0, Remedy.RESCHEDULE, Remedy.NOTHING),
    "COMPLETED": Row(35.0, Remedy.RESCHEDULE, Remedy.NOTHING),
    "CANCELLING": Row(90.0, Remedy.TAKE_DOWN, Remedy.TAKE_DOWN),
    "CANCELLED": Row(35.0, Remedy.TAKE_DOWN, Remedy.TAKE_DOWN),
}

GONE = Row(60.0, Remedy.START, Remedy.NOTHING)  # deleted, or of another server


def remedy_for(
    history: RunHistory,
    *,
    supervised: bool,
    renewed_s: float,
    flow_run: FlowRunFacts | None,
    now_s: float,
) -> Remedy:
    """Choose the remedy for a run.

    Args:
        history: ledger of the run, as read.
        supervised: whether a supervisor lives.
        renewed_s: time of the last renewal of the lease; 0 when unknown.
        flow_run: flow run that last supervised; None when the server has none.
        now_s: seconds since the epoch.
    """
    if supervised or history.ended is not None:
        return _after_the_end(history, now_s) if not supervised else Remedy.NOTHING
    if flow_run is not None and flow_run.is_in_a_loop:
        return Remedy.GIVE_UP
    row = ROWS[flow_run.state] if flow_run is not None else GONE
    since_s = flow_run.since_s if flow_run is not None else 0.0
    if now_s - max(since_s, renewed_s) < row.patience_s:
        return Remedy.NOTHING
    alive = history.open_attempt is not None
    remedy = row.alive if alive else row.otherwise
    if remedy is Remedy.TAKE_DOWN and flow_run is not None and not flow_run.speaks_for_run:
        return GONE.alive if alive else GONE.otherwise
    if flow_run is None or remedy is not Remedy.RESCHEDULE:
        return remedy
    return _another_start(flow_run, now_s, alive=alive)


def _after_the_end(history: RunHistory, now_s: float) -> Remedy:
    """The remedy for a run that has ended, whose containers the platform may have kept."""
    ended = history.ended
    has_leftovers = ended is not None and bool(ended.leftovers)
    is_due = ended is not None and now_s - ended.at_s >= LEFT_OVER_PAUSE_S
    return Remedy.CLEAR if has_leftovers and is_due else Remedy.NOTHING


def _another_start(flow_run: FlowRunFacts, now_s: float, *, alive: bool) -> Remedy:
    """The way in which a run is started again, when it is due."""
    if not flow_run.is_deployed:
        return Remedy.START if alive else Remedy.NOTHING
    if flow_run.failed_starts < MAX_FAILED_STARTS:
        return Remedy.RESCHEDULE
    if flow_run.state != "FAILED":
        return Remedy.GIVE_UP
    due = now_s - flow_run.since_s >= pause_after(flow_run.failed_starts)
    return Remedy.RESCHEDULE if due else Remedy.NOTHING


def pause_after(failed_starts: int) -> float:
    """Seconds until a living attempt is tried again, after so many failed starts in a row."""
    beyond = max(0, failed_starts - MAX_FAILED_STARTS)
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(beyond, 16)))


def failed_starts(states: Sequence[tuple[str, float]], *, advanced_s: float) -> int:
    """Count the failed starts in a row, up to the last start.

    Args:
        states: type and time of every state of a flow run, oldest first.
        advanced_s: time of the last record in the ledger that a mere start does not write.
    """
    count, began_s, running_s = 0, None, None
    for state, at_s in states:
        if state in ("PENDING", "RUNNING"):
            began_s = at_s if began_s is None else began_s
            running_s = at_s if state == "RUNNING" and running_s is None else running_s
        elif state in ("CRASHED", "FAILED") and began_s is not None:
            lasted_s = at_s - running_s if running_s is not None else 0.0
            count = 0 if lasted_s >= STEADY_S or advanced_s >= began_s else count + 1
            began_s, running_s = None, None
    return count
