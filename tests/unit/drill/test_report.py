"""Drills as rows and lines."""

from __future__ import annotations

from dataclasses import replace

from training.drill.report import line_of, row_of
from training.drill.verdict import Outcome
from training.recovery.rungs import Rung

OUTCOME = Outcome(
    name="replace-rank",
    parallelism="ddp",
    injected="SIGKILL of rank 3",
    fired=1,
    rungs=(Rung.PROCESS_REPLACE,),
    detected_s=0.05,
    recovered_s=0.7,
    steps_lost=0,
    curve_equal=True,
    differs_from=None,
    left_over=0,
    problems=(),
)


def test_a_drill_as_expected_is_told_with_its_times():
    assert line_of(OUTCOME) == (
        "process_replace: detected after 0.05 s, recovered after 0.70 s, 0 steps lost, "
        "curve equal: yes"
    )
    assert list(row_of(OUTCOME).values()) == [
        "replace-rank", "SIGKILL of rank 3", "0.05", "process_replace", "0.70", "0", "yes", "0",
        "yes",
    ]  # fmt: skip


def test_of_one_that_is_not_the_problems_are_told():
    bad = replace(OUTCOME, rungs=(), recovered_s=None, problems=("left over: x", "0 of 1 faults"))
    assert line_of(bad) == "left over: x; 0 of 1 faults"
    assert (row_of(bad)["rung"], row_of(bad)["recovered s"]) == ("-", "-")
    assert row_of(bad)["as expected"] == "NO"


def test_a_curve_that_may_differ_from_a_step_on_is_equal_up_to_it():
    assert row_of(replace(OUTCOME, differs_from=13))["curve equal"] == "up to step 12"
    assert row_of(replace(OUTCOME, curve_equal=False))["curve equal"] == "no"
