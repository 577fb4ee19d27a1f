"""A run in few words: title and table of its attempts, its last line, its abnormal steps.

Pure, from the ledger alone. A step that is abnormal again when it is executed again, or after a
restart, counts once; so does each batch that was passed over.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from perdure.training.journal.attempt_view import AttemptView
from perdure.training.journal.events import BatchSkipped
from perdure.training.journal.history import RunHistory
from perdure.training.recovery.faults import LOSSES, Fault, FaultClass
from perdure.training.recovery.protocol import AttemptGivenUp
from perdure.training.reporting.ettr import duration_text
from perdure.training.reporting.markdown import counted, listed
from perdure.training.reporting.rows import AttemptRow, measured_text, state_word

MAX_NODES = 2  # by name in a row
MAX_VALUE = 100
_REFUSAL = re.compile(r"((?:loss|gradient norm) is .+?) at step (\d+)")  # of NumericAnomaly


def attempts_title(history: RunHistory) -> str:
    """Sum the attempts up in a line."""
    num = len(history.attempts)
    if history.ended is not None:
        word = history.ended.outcome.capitalize()
        return f"{word} after {counted(num, 'attempt')}" if num else f"{word} before any attempt"
    if not num:
        return "No attempt yet"
    last = history.attempts[-1]
    name = "{}.{}".format(*last.key)
    earlier = sum(
        attempt.ended is not None and attempt.ended.is_fault for attempt in history.attempts
    )
    if last.ended is None:
        failures = f", after {counted(earlier, 'failed attempt')}" if earlier else ""
        return f"Attempt {name} is {state_word(history, last)}{failures}"
    fault = last.ended.fault
    if fault is None:
        return f"Attempt {name} has {last.ended.outcome}"
    answer = f"the answer is {last.decision.rung}" if last.decision is not None else "to be decided"
    return f"Attempt {name} failed ({fault.fault_class}), {answer}"


def attempts_table(rows: Sequence[AttemptRow]) -> list[dict[str, str]]:
    """Build the table of attempts for the UI: few and narrow columns, or the last are cut off."""
    return [
        {
            "attempt": f"{row.placement}.{row.attempt}"
            + (f", generation {row.generation}" if row.generation is not None else ""),
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
    if row.to_step is None:
        return f"from {row.from_step}"
    return f"{row.from_step} to {row.to_step}"


def _nodes_text(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - MAX_NODES} more" if len(nodes) > MAX_NODES else ""
    return ", ".join(nodes[:MAX_NODES]) + more


def faults_by_class(history: RunHistory) -> Counter[FaultClass]:
    """Count faults; a fault that was not recovered inside the processes counts once.

    Nodes that are lost, one after the other or at once, are a fault each.
    """
    counts: Counter[FaultClass] = Counter()
    for view in history.attempts:
        ended = view.ended.fault if view.ended is not None and view.ended.is_fault else None
        inside = view.recoveries
        if ended is not None:
            counts[ended.fault_class] += 1 + (ended.num_other_nodes if _is_loss(ended) else 0)
            if inside and not inside[-1].succeeded and not _is_other(inside[-1].began.fault, ended):
                inside = inside[:-1]
        counts.update(recovery.began.fault.fault_class for recovery in inside)
    return counts


def _is_loss(fault: Fault) -> bool:
    return fault.fault_class in LOSSES


def _is_other(fault: Fault, ended: Fault) -> bool:
    """Whether a node was lost before the one that ended the attempt, which does not count it."""
    are_losses = _is_loss(fault) and _is_loss(ended) and not ended.num_other_nodes
    return are_losses and None not in (fault.node, ended.node) and fault.node != ended.node


def final_message(end: str, history: RunHistory, *, ettr: float | None) -> str:
    """Build the message of a run's final state: steps, attempts, faults, isolated nodes, ETTR.

    Abnormal steps and skipped batches are in it where there were any.
    """
    faults = [
        f"{number} {fault_class}"
        for fault_class, number in sorted(faults_by_class(history).items())
    ]
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


@dataclass(frozen=True, slots=True)
class AbnormalStep:
    """An abnormal step or skipped batch.

    Attributes:
        step: None for a command whose steps are not known.
        value: loss or norm, in words.
    """

    at_s: float
    step: int | None
    value: str


@dataclass(frozen=True, slots=True)
class AbnormalSteps:
    """All abnormal steps of a run, at least one.

    Attributes:
        steps: how many were abnormal, with those of skipped batches.
        skipped_batches: how many batches were passed over.
    """

    steps: int
    skipped_batches: int
    newest: AbnormalStep

    @property
    def text(self) -> str:
        """Both numbers and the newest step on a line."""
        skipped = counted(self.skipped_batches, "batch", "batches")
        passed = f", {skipped} skipped" if self.skipped_batches else ""
        where = f" at step {self.newest.step}" if self.newest.step is not None else ""
        count = counted(self.steps, "abnormal step")
        return f"{count}{passed}, the newest{where}: {self.newest.value}"


def abnormal_steps(history: RunHistory) -> AbnormalSteps | None:
    """Find the abnormal steps of a run; None where there is none."""
    batches: dict[int, BatchSkipped] = {}
    for view in history.attempts:
        for event in view.events:
            if isinstance(event, BatchSkipped):  # once more after a restart: it is known
                batches.setdefault(event.batch.start, event)
    skipped = {event.batch.step for event in batches.values()}
    by_step = {}
    for view in history.attempts:
        for fault in _faults_of(view):
            step = _from_fault(fault)
            if step.step is None or step.step not in skipped:
                by_step[view.key if step.step is None else step.step] = step
    every = [*by_step.values(), *map(_from_batch, batches.values())]
    if not every:
        return None
    return AbnormalSteps(len(every), len(batches), max(every, key=lambda step: step.at_s))


def _faults_of(view: AttemptView) -> Iterator[Fault]:
    """List faults of abnormal steps, in order; the fault that ends the attempt may come twice."""
    faults = [recovery.began.fault for recovery in view.recoveries]
    faults += [event.fault for event in view.events if isinstance(event, AttemptGivenUp)]
    if view.ended is not None and view.ended.fault is not None:
        faults.append(view.ended.fault)
    yield from (fault for fault in faults if fault.fault_class is FaultClass.NUMERIC_ANOMALY)


def _from_fault(fault: Fault) -> AbnormalStep:
    refusal = _REFUSAL.search(fault.evidence)
    if refusal is not None:
        return AbnormalStep(fault.at_s, int(refusal[2]), refusal[1])
    value = " ".join(fault.evidence.split())[:MAX_VALUE]
    # The fault has the step that was completed before.
    return AbnormalStep(fault.at_s, None if fault.step is None else fault.step + 1, value)


def _from_batch(event: BatchSkipped) -> AbnormalStep:
    return AbnormalStep(event.at_s, event.batch.step, measured_text(event.batch))
