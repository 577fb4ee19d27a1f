"""A run in few words at every moment of its life: title and table of its attempts, its last line.

Pure, from the ledger alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from perdure.training.journal.history import RunHistory
from perdure.training.recovery.faults import FaultClass
from perdure.training.supervisor.abnormal import abnormal_steps
from perdure.training.supervisor.accounts import duration_text
from perdure.training.supervisor.markdown import counted, listed
from perdure.training.supervisor.report import AttemptRow, state_word

MAX_NODES = 2  # of a row by name


def attempts_title(history: RunHistory) -> str:
    """What the attempts amount to now."""
    num = len(history.attempts)
    if history.ended is not None:
        word = history.ended.outcome.capitalize()
        return f"{word} after {counted(num, 'attempt')}" if num else f"{word} before any attempt"
    if not num:
        return "No attempt yet"
    last = history.attempts[-1]
    name = "{}.{}".format(*last.key)
    earlier = sum(
        one.ended is not None and one.ended.outcome == "failed" for one in history.attempts
    )
    if last.ended is None:
        after = f", after {counted(earlier, 'failed attempt')}" if earlier else ""
        return f"Attempt {name} is {state_word(history, last)}{after}"
    fault = last.ended.fault
    if fault is None:
        return f"Attempt {name} has {last.ended.outcome}"
    answer = f"the answer is {last.decision.rung}" if last.decision is not None else "to be decided"
    return f"Attempt {name} failed ({fault.fault_class}), {answer}"


def attempts_table(rows: Sequence[AttemptRow]) -> list[dict[str, str]]:
    """The table of attempts for the UI: few and narrow columns, or the last are cut off."""
    return [
        {
            "attempt": f"{row.placement}.{row.attempt}{_inside(row)}",
            "state": row.outcome,
            "fault": row.fault.split(":")[0],
            "answer": row.rung,
            "steps": _steps_text(row),
            "back after": duration_text(row.seconds_to_next_step)
            if row.seconds_to_next_step is not None else "",
            "nodes": _nodes_text(row.nodes.split(",")),
        }
        for row in rows
    ]  # fmt: skip


def _steps_text(row: AttemptRow) -> str:
    if row.from_step is None:
        return f"to {row.to_step}" if row.to_step is not None else ""
    to = f"{row.from_step} to {row.to_step}"
    return to if row.to_step is not None else f"from {row.from_step}"


def _nodes_text(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - MAX_NODES} more" if len(nodes) > MAX_NODES else ""
    return ", ".join(nodes[:MAX_NODES]) + more


def _inside(row: AttemptRow) -> str:
    return f", generation {row.generation}" if row.generation is not None else ""


def faults_by_class(history: RunHistory) -> Counter[FaultClass]:
    """How often what broke; one that was not recovered inside the processes is counted once."""
    found: Counter[FaultClass] = Counter()
    for view in history.attempts:
        ended = view.ended.fault if view.ended is not None else None
        inside = view.recoveries
        if ended is not None:
            found[ended.fault_class] += 1
            if inside and not inside[-1].succeeded:
                inside = inside[:-1]
        found.update(one.began.fault.fault_class for one in inside)
    return found


def final_message(end: str, history: RunHistory, *, ettr: float | None) -> str:
    """The message of a run's final state: steps, attempts, faults, isolated nodes, ETTR.

    Abnormal steps and skipped batches are in it where there were any.
    """
    faults = [f"{number} {one}" for one, number in sorted(faults_by_class(history).items())]
    attempts = counted(len(history.attempts), "attempt")
    placements = counted(len(history.placements), "placement")
    parts = [
        end,
        f"{attempts} on {placements}",
        f"faults: {listed(faults)}" if faults else "no fault",
        f"isolated: {', '.join(history.isolated)}" if history.isolated else "no node isolated",
    ]
    abnormal = abnormal_steps(history)
    if abnormal is not None:
        parts.append(abnormal.text)
    if ettr is not None:
        parts.append(f"ETTR {ettr:.1%}")
    return "; ".join(parts)
