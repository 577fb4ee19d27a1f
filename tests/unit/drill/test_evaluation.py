"""The verdict on a drill, out of ledgers and curves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from perdure.training.config.drill import DrillFault, DrillKind
from perdure.training.config.model import ParallelKind
from perdure.training.drill.driver import Pauser, RunOutcome
from perdure.training.drill.evaluation import DrillOutcome, differences, judge, list_recoveries
from perdure.training.drill.job import drill_job
from perdure.training.drill.table import Drill, Expected
from perdure.training.journal.events import CheckpointRestored, LedgerEvent
from perdure.training.journal.history import RunHistory, replay
from perdure.training.journal.records import AnyRecord
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.protocol import LastSave, PauseBegan, PauseEnded, RecoveryEnded
from perdure.training.recovery.rungs import Rung
from tests.unit.journal.histories import (
    began,
    decided,
    ended,
    over,
    placed,
    seen,
    started,
    stepped,
)

CURVE = {step: (4.0 - step / 10, 1.0) for step in range(1, 7)}
FAULT_AT_S = 100.0
KILL = DrillFault(kind=DrillKind.KILL, rank=1, step=4)
DRILL = Drill("one", "SIGKILL of rank 1", Expected((Rung.PROCESS_REPLACE,)), faults=(KILL,))
FAULT = Fault(fault_class=FaultClass.NATIVE_CRASH, at_s=FAULT_AT_S + 0.5, evidence="killed")


BEGAN = began(1, Rung.PROCESS_REPLACE, FAULT)


def end(**changes: Any) -> RecoveryEnded:
    return ended(1, 3, at_s=FAULT_AT_S + 2.0, **changes)


def attempt(*events: LedgerEvent) -> list[AnyRecord]:
    return [placed(num_nodes=1, at_s=1.0), started(1, 0, at_s=2.0), *seen(*events)]


def restarted(*events: LedgerEvent, to_step: int, from_step: int) -> RunHistory:
    return replay(
        [
            *attempt(*events),
            over(1, at_s=101.0, to_step=to_step, fault=FAULT, duration_s=99.0),
            decided(),
            started(2, from_step, at_s=102.0),
            stepped(2, from_step + 1, 108.0),
        ]
    )


def outcome_of(history: RunHistory, **changes: Any) -> RunOutcome:
    run_outcome = RunOutcome(
        history=history,
        curve=CURVE,
        state={"rank00000.safetensors": "00"},
        fired_s={0: [FAULT_AT_S]},
        leftovers=(),
        ended="completed",
    )
    return replace(run_outcome, **changes)


RECOVERED = replay(attempt(BEGAN, end()))
UNDISTURBED = outcome_of(replay(attempt()), fired_s={})


def verdict(tmp_path, run_outcome: RunOutcome, drill: Drill = DRILL, **given: Any) -> DrillOutcome:
    job = drill_job(
        tmp_path,
        drill.name,
        kind=ParallelKind.DDP,
        steps=6,
        changes={"optimizer": {"warmup_steps": 0}, "drill": {"faults": drill.faults}},
    )
    options: dict[str, Any] = {"expected": drill.expected, "pauser": None, **given}
    return judge(drill, run_outcome, UNDISTURBED, job=job, **options)


def test_a_drill_whose_run_was_never_placed_says_so_and_the_next_one_is_run(tmp_path):
    outcome = verdict(tmp_path, outcome_of(replay([]), fired_s={}, ended="no room"))
    assert "the run ended: no room" in outcome.problems
    assert outcome.rungs == ()


def test_a_drill_that_went_as_expected_has_no_problem_and_its_times(tmp_path):
    outcome = verdict(tmp_path, outcome_of(RECOVERED))
    assert outcome.as_expected
    assert outcome.rungs == (Rung.PROCESS_REPLACE,)
    assert outcome.detected_s == pytest.approx(0.5)
    assert outcome.recovered_s == pytest.approx(2.0)
    assert (outcome.steps_lost, outcome.fired, outcome.left_over) == (0, 1, 0)
    assert outcome.curve_equal


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"fired_s": {}}, "0 of 1 faults happened"),
        ({"ended": "stopped by the ladder"}, "the run ended: stopped by the ladder"),
        ({"leftovers": ("rank-1",)}, "left over: rank-1"),
        ({"curve": {**CURVE, 5: (3.5, 1.1)}}, "the curve differs at 1 steps, first at step 5"),
        ({"curve": {s: CURVE[s] for s in (1, 2)}}, "the curve differs at 4 steps, first at step 3"),
        ({"state": {"rank00000.safetensors": "01"}}, "the curve is equal, the final state is not"),
    ],
)
def test_a_drill_reports_where_it_is_not_as_expected(tmp_path, changes, problem):
    outcome = verdict(tmp_path, outcome_of(RECOVERED, **changes))
    assert outcome.problems == (problem,)


def test_a_fault_without_a_recovery_is_a_problem(tmp_path):
    outcome = verdict(tmp_path, outcome_of(replay(attempt())))
    assert outcome.problems == ("recovered by nothing, expected process_replace",)
    assert (outcome.detected_s, outcome.recovered_s) == (None, None)


def test_a_failed_recovery_does_not_count_and_the_rung_after_it_does():
    history = restarted(BEGAN, end(succeeded=False), to_step=3, from_step=2)
    (recovery,) = list_recoveries(history)
    assert recovery.rung is Rung.IN_PLACE_RESTART
    assert (recovery.noticed_at_s, recovery.trains_at_s) == (FAULT_AT_S + 0.5, 108.0)
    assert recovery.steps_lost == 1


def test_steps_lost_beyond_what_the_rung_may_lose_are_a_problem(tmp_path):
    drill = replace(DRILL, expected=Expected((Rung.IN_PLACE_RESTART,), steps_lost=1))
    few = verdict(tmp_path, outcome_of(restarted(to_step=3, from_step=2)), drill)
    assert few.problems == ()
    many = verdict(tmp_path, outcome_of(restarted(to_step=3, from_step=0)), drill)
    assert many.problems == ("3 completed steps lost, expected at most 1",)


def test_the_survivors_save_is_expected_where_there_is_one(tmp_path):
    drill = replace(DRILL, expected=Expected((Rung.IN_PLACE_RESTART,), last_save=3))
    saved = restarted(LastSave(at_s=101.0, number=1, step=3), to_step=3, from_step=3)
    assert verdict(tmp_path, outcome_of(saved), drill).as_expected
    refused = LastSave(at_s=101.0, number=1, step=None, why="no rank of [1] lives")
    lost = restarted(refused, to_step=3, from_step=3)
    problem = "the survivors saved step None, expected 3 (no rank of [1] lives)"
    assert verdict(tmp_path, outcome_of(lost), drill).problems == (problem,)


def test_shards_that_were_read_in_the_store_are_counted_where_none_may_be(tmp_path):
    drill = replace(DRILL, expected=Expected((Rung.IN_PLACE_RESTART,), num_fetched=0))

    def verdict_of(num_fetched: int, shares: dict[str, int]) -> tuple[str, ...]:
        place = CheckpointRestored(
            at_s=101.0, number=1, step=3, shares=shares, num_fetched=num_fetched
        )
        history = restarted(place, to_step=3, from_step=3)
        return verdict(tmp_path, outcome_of(history), drill).problems

    assert verdict_of(0, {"memory": 4}) == ()
    assert verdict_of(4, {"store": 4}) == (
        "4 shards were read in the store, expected 0: step 3 restored, shares from store 4",
    )


def test_where_an_abnormal_step_was_accepted_the_curve_counts_up_to_it(tmp_path):
    drill = replace(DRILL, differs_from=4)
    other = {**CURVE, 4: (9.0, 9.0), 5: (9.0, 9.0)}
    assert verdict(tmp_path, outcome_of(RECOVERED, curve=other, state={}), drill).as_expected
    previous = verdict(tmp_path, outcome_of(RECOVERED, curve={**other, 3: (9.0, 9.0)}), drill)
    assert previous.problems == ("the curve differs at 1 steps, first at step 3",)


PAUSE = replace(DRILL, faults=(), pauses_at=3, expected=Expected(()))


def _paused(*, began_at: int = 4, ended_at: int = 4) -> RunOutcome:
    events = (
        PauseBegan(at_s=111.0, number=1, step=began_at),
        PauseEnded(at_s=115.0, number=1, step=ended_at),
    )
    return outcome_of(replay(attempt(*events)), fired_s={})


def _pauser(*looks: tuple[int, ...], resumed_s: float | None = 113.0) -> Pauser:
    pauser = Pauser(3, 4)
    pauser.requested_s, pauser.resumed_s = 110.0, resumed_s
    pauser.paused_at = list(looks)
    return pauser


def test_a_pause_keeps_all_ranks_at_one_step(tmp_path):
    pauser = _pauser((4, 4, 4, 4), (4, 4, 4, 4))
    outcome = verdict(tmp_path, _paused(), PAUSE, pauser=pauser)
    assert outcome.as_expected
    assert outcome.detected_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("one", "pauser", "problem"),
    [
        (_paused(), _pauser((4, 4, 3, 4)), "the ranks paused at steps [(4, 4, 3, 4)]"),
        (_paused(ended_at=5), _pauser((4, 4, 4, 4)), "pauses began at steps [4] and ended at [5]"),
        (_paused(), _pauser((4, 4, 4, 4), resumed_s=None), "the ranks were never seen paused"),
    ],
)
def test_a_pause_in_which_a_rank_moves_is_a_problem(tmp_path, one, pauser, problem):
    assert verdict(tmp_path, one, PAUSE, pauser=pauser).problems == (problem,)


def test_curves_are_compared_step_by_step_and_a_step_that_only_one_has_differs():
    assert differences(CURVE, CURVE) == []
    assert differences({1: (1.0, 1.0)}, {1: (1.0, 1.0), 2: (1.0, 1.0)}) == [2]
    assert differences({1: (1.0, 2.0), 2: (1.0, 1.0)}, {1: (1.0, 1.0)}, end_step=2) == [1]


OUTCOME = DrillOutcome(
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


def test_a_drill_as_expected_is_shown_with_its_times():
    assert OUTCOME.line == (
        "process_replace: detected after 0.05 s, recovered after 0.70 s, 0 steps lost, "
        "curve equal: yes"
    )
    assert list(OUTCOME.row.values()) == [
        "replace-rank", "SIGKILL of rank 3", "0.05", "process_replace", "0.70", "0", "yes", "0",
        "yes",
    ]  # fmt: skip


def test_of_a_drill_not_as_expected_the_problems_are_shown():
    bad = replace(OUTCOME, rungs=(), recovered_s=None, problems=("left over: x", "0 of 1 faults"))
    assert bad.line == "left over: x; 0 of 1 faults"
    assert (bad.row["rung"], bad.row["recovered s"]) == ("-", "-")
    assert bad.row["as expected"] == "NO"


def test_a_curve_that_may_differ_from_a_step_on_is_equal_up_to_it():
    assert replace(OUTCOME, differs_from=13).row["curve equal"] == "up to step 12"
    assert replace(OUTCOME, curve_equal=False).row["curve equal"] == "no"
