"""Step records for tests of the journal."""

from __future__ import annotations

from dataclasses import replace

from perdure.training.journal.events import StepRecord

RECORD = StepRecord(
    step=1, loss=0.1 + 0.2, grad_norm=1.5, lr=1e-3, tokens_per_s=1e5, mfu=None,
    at_s=1_700_000_000.25, step_s=0.5, position=8, epoch=0, placement=1, attempt=1,
)  # fmt: skip


def record(step: int, *, attempt: tuple[int, int] = (1, 1), loss: float = 2.0) -> StepRecord:
    placement, number = attempt
    return replace(RECORD, step=step, loss=loss, placement=placement, attempt=number)
