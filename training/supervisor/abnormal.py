"""The steps of a run that were abnormal, and the batches that it passed over because of them.

Pure, from the ledger alone. A step that is abnormal again when it is executed again, or after a
restart, is one; each batch that was passed over is one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from perdure.training.journal.attempt_view import AttemptView
from perdure.training.journal.events import BatchSkipped
from perdure.training.journal.history import RunHistory
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.protocol import AttemptGivenUp
from perdure.training.supervisor.markdown import counted
from perdure.training.supervisor.report import measured_text

MAX_VALUE = 100
_REFUSAL = re.compile(r"((?:loss|gradient norm) is .+?) at step (\d+)")  # of NumericAnomaly


@dataclass(frozen=True, slots=True)
class AbnormalStep:
    """One finding.

    Attributes:
        step: that was abnormal, None for a command whose steps are not known.
        value: loss or norm, in words.
    """

    at_s: float
    step: int | None
    value: str


@dataclass(frozen=True, slots=True)
class AbnormalSteps:
    """All of a run, of which there is at least one.

    Attributes:
        steps: how many were abnormal, those of skipped batches with them.
        skipped_batches: how many batches were passed over.
        newest: the last finding.
    """

    steps: int
    skipped_batches: int
    newest: AbnormalStep

    @property
    def text(self) -> str:
        """The same on one line."""
        skipped = counted(self.skipped_batches, "batch", "batches")
        passed = f", {skipped} skipped" if self.skipped_batches else ""
        where = f" at step {self.newest.step}" if self.newest.step is not None else ""
        found = counted(self.steps, "abnormal step")
        return f"{found}{passed}, the newest{where}: {self.newest.value}"


def abnormal_steps(history: RunHistory) -> AbnormalSteps | None:
    """What of a run was abnormal, None where nothing was."""
    batches: dict[int, BatchSkipped] = {}
    for view in history.attempts:
        for event in view.events:
            if isinstance(event, BatchSkipped):  # once more after a restart: it is known
                batches.setdefault(event.batch.start, event)
    left = {event.batch.step for event in batches.values()}
    found = {}
    for view in history.attempts:
        for fault in _faults_of(view):
            step = _of_fault(fault)
            if step.step is None or step.step not in left:
                found[view.key if step.step is None else step.step] = step
    every = [*found.values(), *map(_of_batch, batches.values())]
    if not every:
        return None
    return AbnormalSteps(len(every), len(batches), max(every, key=lambda one: one.at_s))


def _faults_of(view: AttemptView) -> Iterator[Fault]:
    """Those of abnormal steps, in order; the one that ends the attempt may be there twice."""
    faults = [one.began.fault for one in view.recoveries]
    faults += [event.fault for event in view.events if isinstance(event, AttemptGivenUp)]
    if view.ended is not None and view.ended.fault is not None:
        faults.append(view.ended.fault)
    yield from (one for one in faults if one.fault_class is FaultClass.NUMERIC_ANOMALY)


def _of_fault(fault: Fault) -> AbnormalStep:
    refusal = _REFUSAL.search(fault.evidence)
    if refusal is not None:
        return AbnormalStep(fault.at_s, int(refusal[2]), refusal[1])
    value = " ".join(fault.evidence.split())[:MAX_VALUE]
    # The fault has the step that was completed before.
    return AbnormalStep(fault.at_s, None if fault.step is None else fault.step + 1, value)


def _of_batch(event: BatchSkipped) -> AbnormalStep:
    return AbnormalStep(event.at_s, event.batch.step, measured_text(event.batch))
