"""What a supervisor learns from a ledger."""

from __future__ import annotations

from training.journal.history import replay
from training.journal.records import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSeen,
    Decided,
    FirstStep,
    Member,
    Placed,
    RunCreated,
    RunEnded,
    RungFailed,
    SupervisorTook,
)
from training.recovery.decision import Decision
from training.recovery.faults import Fault, FaultClass
from training.recovery.rungs import Rung
from training.supervisor.report import attempt_rows

CRASH = Fault(FaultClass.NATIVE_CRASH, 10.0, "SIGKILL", node="node-1", rank=3, step=14)


def told(at_s: float = 0.0) -> dict:
    return {"at_s": at_s, "epoch": 1}


def beginning() -> list:
    return [
        SupervisorTook(**told(), supervisor="a", host="h", pid=1),
        RunCreated(**told(), job={}),
        Placed(
            **told(),
            placement=1,
            members=(
                Member(index=0, node="node-0", schedule_cnt=1),
                Member(index=1, node="node-1", schedule_cnt=1),
            ),
            avoid=(),
        ),
    ]


def attempt(number: int, rung: Rung | None = None, *, isolate: str | None = None) -> list:
    records: list = [AttemptStarted(**told(), placement=1, attempt=number, from_step=10)]
    if rung is None:
        return records
    return [
        *records,
        AttemptEnded(
            **told(12.0),
            placement=1,
            attempt=number,
            outcome="failed",
            to_step=14,
            proc_start_cnt={"node-0": number, "node-1": number},
            fault=CRASH,
            duration_s=5.0,
        ),
        Decided(
            **told(12.0), placement=1, attempt=number, decision=Decision(rung, isolate, "because")
        ),
    ]


def test_an_attempt_without_an_end_is_the_open_one():
    history = replay([*beginning(), *attempt(1, Rung.IN_PLACE_RESTART), *attempt(2)])
    assert history.open_attempt is not None
    assert history.open_attempt.key == (1, 2)


def test_a_recovery_has_progressed_once_a_later_attempt_commits_a_checkpoint():
    records = [*beginning(), *attempt(1, Rung.IN_PLACE_RESTART), *attempt(2)]
    assert [r.progressed for r in replay(records).recoveries()] == [False]
    records.append(CheckpointSeen(**told(), placement=1, attempt=2, step=20))
    assert [r.progressed for r in replay(records).recoveries()] == [True]


def test_a_checkpoint_of_the_attempt_that_failed_is_no_progress():
    records = [*beginning(), *attempt(1, Rung.IN_PLACE_RESTART)]
    records.append(CheckpointSeen(**told(), placement=1, attempt=1, step=10))
    assert [r.progressed for r in replay(records).recoveries()] == [False]


def test_where_steps_are_unknown_a_long_attempt_is_progress():
    two = [*beginning(), *attempt(1, Rung.IN_PLACE_RESTART), *attempt(2, Rung.IN_PLACE_RESTART)]
    history = replay(two)
    assert [r.progressed for r in history.recoveries(progress_after_s=4.0)] == [True, False]
    assert [r.progressed for r in history.recoveries(progress_after_s=6.0)] == [False, False]


def test_a_node_stays_isolated_when_its_rescheduling_failed_and_another_was_decided():
    records = [*beginning(), *attempt(1, Rung.POD_RESCHEDULE, isolate="node-1")]
    key = {"placement": 1, "attempt": 1}
    records.append(RungFailed(**told(), **key, rung=Rung.POD_RESCHEDULE, why="no agent started"))
    records.append(
        Decided(**told(), **key, decision=Decision(Rung.JOB_RESCHEDULE, None, "because"))
    )
    history = replay(records)
    assert history.isolated == ("node-1",)
    assert [(r.rung, r.failed) for r in history.recoveries()] == [
        (Rung.POD_RESCHEDULE, True),
        (Rung.JOB_RESCHEDULE, False),
    ]


def test_isolated_nodes_stay_on_record_in_their_order():
    history = replay(
        [*beginning(), *attempt(1, Rung.JOB_RESCHEDULE_ISOLATED, isolate="node-1"), *attempt(2)]
    )
    assert history.isolated == ("node-1",)


def test_a_rung_that_could_not_be_carried_out_is_a_failed_recovery():
    records = [*beginning(), *attempt(1, Rung.POD_RESCHEDULE)]
    records.append(
        RungFailed(**told(), placement=1, attempt=1, rung=Rung.POD_RESCHEDULE, why="no spare")
    )
    history = replay(records)
    assert [(r.rung, r.failed) for r in history.recoveries()] == [(Rung.POD_RESCHEDULE, True)]
    assert history.undecided is not None, "the ladder is to be asked again"


def test_budgets_start_anew_when_somebody_starts_a_failed_run_again():
    records = [*beginning(), *attempt(1, Rung.STOP)]
    records.append(RunEnded(**told(), outcome="failed", message="user code"))
    records.append(SupervisorTook(at_s=0.0, epoch=2, supervisor="b", host="h", pid=2))
    history = replay(records)
    assert history.recoveries() == []
    assert history.ended is None
    assert history.epoch == 2


def test_a_completed_run_stays_completed_when_it_is_taken_again():
    records = [*beginning(), RunEnded(**told(), outcome="completed", message="done")]
    records.append(SupervisorTook(at_s=0.0, epoch=2, supervisor="b", host="h", pid=2))
    assert replay(records).ended_well


def test_the_table_of_attempts_counts_seconds_from_the_fault_to_the_next_step():
    records = [*beginning(), *attempt(1, Rung.IN_PLACE_RESTART), *attempt(2)]
    records.append(FirstStep(**told(), placement=1, attempt=2, step=11, stepped_s=17.5))
    first, second = attempt_rows(replay(records))
    assert first.seconds_to_next_step == 7.5
    assert (first.schedule_cnt, first.proc_start_cnt) == ("1,1", "1,1")
    assert (first.rung, first.to_step) == ("in_place_restart", 14)
    assert second.outcome == "running"


def test_an_attempt_that_was_restored_from_the_nodes_began_beyond_the_store():
    first = FirstStep(**told(20.0), placement=1, attempt=1, step=16, stepped_s=20.0)
    before, after = replay([*beginning(), *attempt(1)]), replay([*beginning(), *attempt(1), first])
    assert [row.from_step for row in attempt_rows(before)] == [10]
    assert [row.from_step for row in attempt_rows(after)] == [15]
