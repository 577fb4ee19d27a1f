"""How many steps of a run were abnormal, and which was the last."""

from __future__ import annotations

from typing import Any

from perdure.training.journal.events import BatchSkipped
from perdure.training.journal.history import replay
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.protocol import AttemptGivenUp
from perdure.training.reporting.summary import AbnormalStep, abnormal_steps
from tests.unit.journal.histories import (
    BEGINNING,
    LINK_BEGAN,
    SKIPPED,
    began,
    decided,
    history_of,
    over,
    seen,
    started,
)

HIGH = "gradient norm is 900, the limit is 800"


def abnormal(at_s: float, evidence: str = f"{HIGH} at step 14", step: int | None = 13) -> Fault:
    """As the ranks report it: with the step that was completed before."""
    return Fault(FaultClass.NUMERIC_ANOMALY, at_s, evidence, step=step)


def skipped(number: int, *, at_s: float, is_known: bool = False) -> BatchSkipped:
    """The batch of a number, of eight samples."""
    changes: dict[str, Any] = {"start": 8 * number, "stop": 8 * number + 8}
    batch = SKIPPED.batch.model_copy(update=changes)
    return BatchSkipped(at_s=at_s, number=batch.stop, batch=batch, is_known=is_known)


def test_a_run_without_abnormal_steps_has_none():
    assert abnormal_steps(history_of(LINK_BEGAN, has_ended=True)) is None


def test_a_step_that_is_abnormal_again_is_one_step_with_its_newest_value():
    second = abnormal(20.0, "gradient norm is 901, the limit is 800 at step 14")
    result = abnormal_steps(history_of(began(1, fault=abnormal(10.0)), began(2, fault=second)))
    assert result is not None
    assert result.newest == AbnormalStep(20.0, 14, "gradient norm is 901, the limit is 800")
    assert (result.steps, result.skipped_batches) == (1, 0)
    assert result.text == (
        "1 abnormal step, the newest at step 14: gradient norm is 901, the limit is 800"
    )


def test_the_fault_that_ends_an_attempt_counts_once_beside_the_report_of_its_ranks():
    fault = abnormal(30.0, "loss is nan at step 14")
    given_up = AttemptGivenUp(at_s=30.0, number=2, fault=fault, why="not a number")
    line = abnormal(
        31.0, "perdure.training.runtime.errors.NumericAnomaly: loss is nan at step 14", step=11
    )
    end = over(fault=line)
    later = began(3, fault=abnormal(40.0, "loss is inf at step 20", step=19))
    records = [*BEGINNING, *seen(given_up), end, decided(), started(2), *seen(later, attempt=2)]
    result = abnormal_steps(replay(records))
    assert result is not None
    assert (result.steps, result.newest) == (2, AbnormalStep(40.0, 20, "loss is inf"))


def test_batches_count_once_each_however_many_restarts_pass_over_them():
    first = seen(skipped(12, at_s=1.0), skipped(13, at_s=2.0))
    second = seen(skipped(12, at_s=9.0, is_known=True), attempt=2)
    records = [*BEGINNING, *first, over(), decided(), started(2), *second]
    result = abnormal_steps(replay(records))
    assert result is not None
    assert (result.steps, result.skipped_batches, result.newest.at_s) == (2, 2, 2.0)


def test_of_a_command_that_ended_the_line_is_the_value():
    line = "AssertionError: found NaN in local grad norm"
    result = abnormal_steps(replay([*BEGINNING, over(fault=abnormal(5.0, line, step=None))]))
    assert result is not None
    assert result.text == f"1 abnormal step, the newest: {line}"
