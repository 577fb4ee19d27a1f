"""What a supervisor learns from a ledger: attempts, recoveries, pauses, the failure rate."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from pydantic import TypeAdapter, ValidationError

from perdure.training.journal.events import EVENT, LedgerEvent
from perdure.training.journal.history import RunHistory, replay
from perdure.training.journal.records import (
    RECORD,
    AnyRecord,
    AttemptEventRecorded,
    CheckpointRecorded,
    NodeRefused,
    NodeReleased,
    RunEnded,
    RungFailed,
)
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.protocol import LastSave, PauseBegan, PauseEnded, RecoveryBegan
from perdure.training.recovery.rungs import Decision, Recovery, Rung
from perdure.training.reporting.rows import attempt_rows
from perdure.training.reporting.summary import faults_by_class
from tests.unit.journal.histories import (
    BEGINNING,
    CRASH,
    LINK,
    NOW,
    TAKEN,
    began,
    decided,
    ended,
    over,
    placed,
    started,
    stepped,
)

DAY_S = 86_400.0


def seen(event: LedgerEvent, attempt: int = 1) -> AttemptEventRecorded:
    return AttemptEventRecorded(**NOW, placement=1, attempt=attempt, event=event)


def committed(step: int, attempt: int = 1) -> CheckpointRecorded:
    return CheckpointRecorded(**NOW, placement=1, attempt=attempt, step=step)


def failed(
    attempt: int,
    rung: Rung = Rung.IN_PLACE_RESTART,
    *,
    isolate: str | None = None,
    outcome: str = "failed",
    duration_s: float = 5.0,
) -> list[AnyRecord]:
    """The end of an attempt, and the decision about it where a fault was the reason."""
    end = over(attempt, outcome, duration_s=duration_s)
    return [end, *([decided(attempt, rung, isolate)] if outcome == "failed" else [])]


def history_of(*records: AnyRecord) -> RunHistory:
    """The history of a run of which these are the records after its first attempt began."""
    return replay([*BEGINNING, *records])


def outlines(history: RunHistory) -> list[tuple[str, bool, bool]]:
    return [
        (recovery.rung.value, recovery.progressed, recovery.failed)
        for recovery in history.recoveries()
    ]


def progress(*records: AnyRecord) -> list[bool]:
    return [progressed for _, progressed, _ in outlines(history_of(*records))]


@pytest.mark.parametrize(
    "event",
    [
        began(1),
        ended(1),
        LastSave(at_s=1.0, number=2, step=None, why="no replica of rank 3 lives"),
        PauseBegan(at_s=1.0, number=3, step=7),
        PauseEnded(at_s=2.0, number=3, step=7),
    ],
)
def test_every_event_goes_through_log_and_ledger_unchanged(event):
    record = seen(event)
    assert RECORD.validate_json(RECORD.dump_json(record)) == record
    assert EVENT.validate_json(EVENT.dump_json(event)) == event


def test_recoveries_inside_the_processes_come_before_the_one_that_ended_their_attempt():
    history = history_of(
        seen(began(1)), seen(ended(1)), seen(began(2, Rung.PROCESS_REPLACE)),
        seen(ended(2, succeeded=False)), *failed(1), started(2),
        seen(began(1, Rung.OPERATOR_RETRY), 2), seen(ended(1), 2),
    )  # fmt: skip
    assert [rung for rung, _, _ in outlines(history)] == [
        "step_retry", "process_replace", "in_place_restart", "operator_retry",
    ]  # fmt: skip
    assert [recovery.fault.fault_class.value for recovery in history.recoveries()] == [
        "link_down", "link_down", "native_crash", "link_down",
    ]  # fmt: skip


def test_a_recovery_that_another_fault_cut_short_is_kept_apart_from_one_that_failed():
    cut = ended(1, None, succeeded=False).model_copy(update={"cut_short": True})
    history = history_of(
        seen(began(1)), seen(began(2, Rung.PROCESS_REPLACE)),
        seen(cut), seen(ended(2, None, succeeded=False)), *failed(1),
    )  # fmt: skip
    assert [recovery.cut_short for recovery in history.recoveries()] == [True, False, False]


def asked(
    attempt: int, to_step: int | None, fault_class: FaultClass = FaultClass.RESTART_REQUESTED
) -> list[AnyRecord]:
    """The end of an attempt whose program, or its platform, had it started again."""
    fault = Fault(fault_class, 1.0, "asked with exit code 85", node="node-0")
    return [over(attempt, fault=fault, to_step=to_step), decided(attempt)]


@pytest.mark.parametrize(
    ("steps", "progressed"),
    [
        ((20, 40, 60), [True, True, False]),
        ((20, 20, 20), [False, False, False]),
        ((20, None, 40), [True, False, False]),
        ((20, 10, 30), [True, True, False]),
    ],
)
def test_a_start_that_the_program_asked_for_is_free_once_the_next_one_comes_further(
    steps, progressed
):
    records: list[AnyRecord] = []
    for attempt, to_step in enumerate(steps, start=1):
        records += [*([started(attempt)] if attempt > 1 else []), *asked(attempt, to_step)]
    assert progress(*records) == progressed


@pytest.mark.parametrize(
    ("steps", "progressed"),
    [
        ((60, 120, 180), [True, True, False]),
        ((60, 60, 60), [False, False, False]),
        ((60, 30, 40), [False, True, False]),
        ((None, None, None), [False, False, False]),
    ],
    ids=["goes on", "stays there", "begins anew each time", "no step is known"],
)
def test_a_preemption_is_free_once_a_program_of_unknown_checkpoints_comes_further(
    steps, progressed
):
    records: list[AnyRecord] = []
    for attempt, to_step in enumerate(steps, start=1):
        begun = [started(attempt)] if attempt > 1 else []
        records += [*begun, *asked(attempt, to_step, FaultClass.PREEMPTED)]
    assert progress(*records) == progressed


def test_cancels_pauses_and_preemptions_with_a_save_between_use_up_no_budget():
    records: list[AnyRecord] = []
    number = 1
    for step in range(20, 140, 20):
        preempted = asked(number, step, FaultClass.PREEMPTED)
        stopped = over(number + 1, "stopped", to_step=step + 10)
        records += [committed(step, number), *preempted, started(number + 1, from_step=step)]
        records += [committed(step + 10, number + 1), stopped, started(number + 2, step + 10)]
        number += 2
    assert progress(*records) == [True] * 6


def test_where_checkpoints_are_known_they_show_the_progress_after_a_preemption():
    preempted = FaultClass.PREEMPTED
    records = [*asked(1, 60, preempted), started(2), *asked(2, 120, preempted)]
    assert progress(committed(20), *records) == [False, False]


def test_a_start_that_the_program_asked_for_is_no_fault_and_no_failure_between_saves():
    history = history_of(*asked(1, 20), started(2), *failed(2))
    ends = [view.ended for view in history.attempts]
    assert [end is not None and end.is_fault for end in ends] == [False, True]
    alone = history_of(*failed(1, duration_s=10.0))
    assert history.mtbf_s(100.0) == alone.mtbf_s(100.0)
    assert faults_by_class(history) == {FaultClass.NATIVE_CRASH: 1}


RECOVERED = (seen(began(1)), seen(ended(1, 14)))


@pytest.mark.parametrize(
    ("records", "progressed", "has_failed"),
    [
        ([seen(began(1))], False, False),
        ([seen(began(1)), seen(ended(1, None, succeeded=False))], False, True),
        ([seen(began(1)), *failed(1)], False, True),
        ([seen(began(1)), *failed(1, outcome="stopped")], False, True),
        ([seen(began(1)), *failed(1, outcome="completed")], False, False),
        ([*RECOVERED, committed(15)], True, False),
        ([*RECOVERED, committed(14)], False, False),
        # A supervisor that takes over reads hours of an attempt at once.
        ([committed(20), *RECOVERED], True, False),
    ],
    ids=[
        "goes on in a living attempt", "did not succeed", "its attempt failed first",
        "its attempt was stopped first", "its end was lost, its attempt completed",
        "a later step was committed", "a save from before the fault was committed after it",
        "the commit is on record before the recovery",
    ],
)  # fmt: skip
def test_a_recovery_has_progressed_by_a_new_step_and_failed_by_its_end(
    records, progressed, has_failed
):
    assert outlines(history_of(*records))[0] == ("step_retry", progressed, has_failed)


def test_only_recoveries_before_the_progress_are_free():
    second_round = (seen(began(2)), seen(ended(2, 25)))
    assert progress(*RECOVERED, committed(20), *second_round) == [True, False]


def test_what_the_survivors_save_after_a_failed_recovery_is_no_progress_of_it():
    history = history_of(
        seen(began(1)), seen(ended(1, 14, succeeded=False)),
        seen(LastSave(at_s=12.0, number=2, step=15)), *failed(1), committed(15),
    )  # fmt: skip
    assert outlines(history) == [("step_retry", False, True), ("in_place_restart", False, False)]
    assert history.attempts[0].last_save == LastSave(at_s=12.0, number=2, step=15)


def test_a_later_attempt_that_commits_a_new_step_makes_all_before_it_free():
    beginning: list[AnyRecord] = [
        seen(began(1)),
        seen(ended(1, succeeded=False)),
        *failed(1),
        started(2, 14),
    ]
    assert progress(*beginning) == [False, False]
    assert progress(*beginning, committed(20, attempt=2)) == [True, True]


def test_an_attempt_that_saves_what_it_began_with_at_the_end_of_its_life_got_nowhere():
    second_round: list[AnyRecord] = [started(2, 14), *failed(2), committed(14, attempt=2)]
    assert progress(*failed(1), *second_round) == [False, False]


def test_what_an_attempt_began_with_is_known_by_its_first_step():
    # The nodes' memory had step 18, the store 14: a commit of 18 brings nothing new.
    restored: list[AnyRecord] = [started(2, 14), stepped(2, 19), committed(18, attempt=2)]
    assert progress(*failed(1), *restored) == [False]


def test_budgets_start_anew_for_recoveries_inside_the_processes_too():
    history = history_of(
        seen(began(1)), *failed(1, Rung.STOP), RunEnded(**NOW, outcome="failed", message="over")
    )
    assert history.recoveries() == []


def test_an_attempt_lists_its_recoveries_with_their_ends():
    history = history_of(seen(began(1)), seen(ended(1)), seen(began(2)))
    first, second = history.attempts[0].recoveries
    assert (first.began, first.ended, first.succeeded) == (began(1), ended(1), True)
    assert (second.began, second.ended, second.succeeded) == (began(2), None, False)


def test_an_end_without_its_beginning_is_left_out():
    history = history_of(seen(ended(7)), seen(PauseEnded(at_s=1.0, number=8, step=3)))
    assert history.attempts[0].recoveries == []
    assert history.attempts[0].pauses == []
    assert history.recoveries() == []


def test_a_run_is_paused_from_the_moment_all_ranks_have_paused_until_they_go_on():
    stands, goes_on = PauseBegan(at_s=1.0, number=1, step=7), PauseEnded(at_s=5.0, number=1, step=7)
    assert history_of().pause is None
    paused = history_of(seen(stands))
    assert paused.pause is not None
    assert paused.pause.began == stands
    resumed = history_of(seen(stands), seen(goes_on))
    assert resumed.pause is None
    assert [(recovery.began, recovery.ended) for recovery in resumed.attempts[0].pauses] == [
        (stands, goes_on)
    ]


def test_nothing_that_has_ended_is_paused():
    stands = seen(PauseBegan(at_s=1.0, number=1, step=7))
    assert history_of(stands, *failed(1)).pause is None
    assert history_of(stands, *failed(1), started(2)).pause is None
    assert history_of(stands, RunEnded(**NOW, outcome="cancelled", message="")).pause is None


def test_a_past_recovery_fits_into_a_start_order():
    past = Recovery(fault=LINK, rung=Rung.STEP_RETRY, progressed=True)
    as_json = TypeAdapter(Recovery)
    assert as_json.validate_json(as_json.dump_json(past)) == past


@pytest.mark.parametrize("embedded", ["fault", "decision"])
def test_an_unknown_field_inside_of_an_embedded_fault_or_decision_is_an_error(embedded):
    document = json.loads(began(1).model_dump_json())
    assert EVENT.validate_python(document) == began(1)
    document[embedded]["invented"] = 1
    with pytest.raises(ValidationError, match="invented"):
        EVENT.validate_python(document)


def test_an_attempt_without_an_end_is_the_open_one():
    history = history_of(*failed(1), started(2))
    assert history.open_attempt is not None
    assert history.open_attempt.key == (1, 2)


def test_a_recovery_has_progressed_once_a_later_attempt_commits_a_checkpoint():
    records = [*failed(1), started(2)]
    assert outlines(history_of(*records)) == [("in_place_restart", False, False)]
    records.append(committed(20, attempt=2))
    assert outlines(history_of(*records)) == [("in_place_restart", True, False)]


def test_a_checkpoint_of_the_attempt_that_failed_is_no_progress():
    assert outlines(history_of(*failed(1), committed(10))) == [("in_place_restart", False, False)]


def test_where_steps_are_unknown_a_long_attempt_is_progress():
    history = history_of(*failed(1), started(2), *failed(2))
    assert [r.progressed for r in history.recoveries(progress_after_s=4.0)] == [True, False]
    assert [r.progressed for r in history.recoveries(progress_after_s=6.0)] == [False, False]


def test_a_node_stays_isolated_when_its_rescheduling_failed_and_another_was_decided():
    rung = Rung.POD_RESCHEDULE
    history = history_of(
        *failed(1, rung, isolate="node-1"),
        RungFailed(**NOW, placement=1, attempt=1, rung=rung, why="no agent started"),
        decided(1, Rung.JOB_RESCHEDULE),
    )
    assert history.isolated == ("node-1",)
    assert outlines(history) == [
        ("pod_reschedule", False, True),
        ("job_reschedule", False, False),
    ]


def test_isolated_nodes_stay_on_record_in_their_order():
    isolating = failed(1, Rung.JOB_RESCHEDULE_ISOLATED, isolate="node-1")
    assert history_of(*isolating, started(2)).isolated == ("node-1",)


def isolating(node: str, *classes: FaultClass) -> list[AnyRecord]:
    """Recoveries inside an attempt, each of which isolates a node."""
    decision = Decision(Rung.NODE_REPLACE, node, "lost")
    return [
        seen(
            RecoveryBegan(
                at_s=1.0, number=number, generation=number, decision=decision,
                fault=replace(LINK, fault_class=fault_class, node=node),
            )
        )
        for number, fault_class in enumerate(classes, 1)
    ]  # fmt: skip


LOST, GONE, DEFECT = FaultClass.NODE_LOST, FaultClass.CONTAINER_LOST, FaultClass.DEVICE_LOST


@pytest.mark.parametrize(
    ("records", "may"),
    [
        (isolating("node-1", LOST), True),
        (isolating("node-1", GONE), True),
        (isolating("node-1", LOST, GONE), True),
        (isolating("node-1", DEFECT), False),
        (isolating("node-1", LOST, DEFECT), False),
        (isolating("node-0", LOST), False),
        ([], False),
        ([NodeReleased(**NOW, node="node-1"), *isolating("node-1", LOST)], False),
        (
            [*isolating("node-1", LOST), NodeRefused(**NOW, placement=1, node="node-1", why="a")],
            False,
        ),
        (failed(1, Rung.JOB_RESCHEDULE_ISOLATED, isolate="node-1"), False),
    ],
)
def test_a_node_that_was_only_lost_may_rejoin_once(records, may):
    assert history_of(*records).may_rejoin("node-1") is may


def test_a_released_node_is_isolated_no_more_and_what_it_did_before_counts_no_more():
    rung = Rung.JOB_RESCHEDULE_ISOLATED
    isolating = (*failed(1, rung, isolate="node-0"), started(2))
    (isolation,) = history_of(*isolating).isolated_nodes
    assert (isolation.node, isolation.why) == ("node-0", "native_crash: SIGKILL")
    refusal = NodeRefused(**NOW, placement=1, node="node-0", why="devices: Alarm")
    release = NodeReleased(at_s=CRASH.at_s + 1, epoch=1, node="node-0")
    history = history_of(*isolating, refusal, release)
    assert history.isolated == ()
    assert history.recoveries() == []
    second_round = failed(2, rung, isolate="node-0")
    assert history_of(*isolating, release, *second_round).isolated == ("node-0",)


def test_a_rung_that_could_not_be_carried_out_is_a_failed_recovery():
    rung = Rung.POD_RESCHEDULE
    spent = RungFailed(**NOW, placement=1, attempt=1, rung=rung, why="no spare")
    history = history_of(*failed(1, rung), spent)
    assert outlines(history) == [("pod_reschedule", False, True)]
    assert history.undecided_attempt is not None, "the ladder is to be asked again"


SECOND = TAKEN.model_copy(update={"epoch": 2, "supervisor": "b", "pid": 2})


def test_budgets_start_anew_when_a_failed_run_is_started_again():
    end = RunEnded(**NOW, outcome="failed", message="user code")
    history = history_of(*failed(1, Rung.STOP), end, SECOND)
    assert history.recoveries() == []
    assert history.ended is None
    assert history.epoch == 2


def test_a_completed_run_stays_completed_when_it_is_taken_again():
    end = RunEnded(**NOW, outcome="completed", message="done")
    assert replay([*BEGINNING[:-1], end, SECOND]).ended_well


def test_the_table_of_attempts_counts_seconds_from_the_fault_to_the_next_step():
    first, second = attempt_rows(history_of(*failed(1), started(2), stepped(2, 11, 37.5)))
    assert first.seconds_to_next_step == 7.5
    assert (first.schedule_cnt, first.proc_start_cnt) == ("1,1", "1,1")
    assert (first.rung, first.to_step) == ("in_place_restart", 40)
    assert second.outcome == "training"


def test_an_attempt_that_was_restored_from_the_nodes_began_beyond_the_store():
    assert [row.from_step for row in attempt_rows(history_of())] == [10]
    assert [row.from_step for row in attempt_rows(history_of(stepped(1, 16, 20.0)))] == [15]


def lived(*attempts: tuple[str, float]) -> RunHistory:
    """A run whose attempts ended like this after so long."""
    records: list[AnyRecord] = [TAKEN, placed()]
    for number, (outcome, duration_s) in enumerate(attempts, start=1):
        records += [started(number), *failed(number, outcome=outcome, duration_s=duration_s)]
    return replay(records)


@pytest.mark.parametrize(
    ("attempts", "mtbf_s"),
    [
        ((), DAY_S),
        ((("failed", DAY_S),), DAY_S),
        ((("failed", 0.0),), DAY_S / 2),
        ((("stopped", DAY_S),), 2 * DAY_S),
        ((("failed", 3600.0),) * 99, (DAY_S + 99 * 3600) / 100),
    ],
)
def test_the_mean_time_between_failures_is_measured_from_the_jobs_expectation_on(attempts, mtbf_s):
    assert lived(*attempts).mtbf_s(DAY_S) == pytest.approx(mtbf_s)


def test_failures_bring_it_down_and_good_times_bring_it_up():
    bad = lived(("failed", 60.0), ("failed", 60.0))
    good = lived(("failed", 60.0), ("failed", 60.0), ("stopped", 30 * DAY_S))
    assert bad.mtbf_s(DAY_S) < DAY_S < good.mtbf_s(DAY_S)


def test_a_command_that_saves_the_same_steps_again_makes_no_progress():
    created = BEGINNING[1].model_copy(update={"job": {"worker": {"command": ["true"]}}})
    second_round = [*BEGINNING[2:], committed(10), *failed(1), started(2), stepped(2, 1)]
    same_history = replay([BEGINNING[0], created, *second_round, committed(10, 2), *failed(2)])
    assert [progressed for _, progressed, _ in outlines(same_history)] == [False, False]
    further = replay([BEGINNING[0], created, *second_round, committed(20, 2), *failed(2)])
    assert [progressed for _, progressed, _ in outlines(further)] == [True, False]
