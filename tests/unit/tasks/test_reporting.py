"""Reports to the Prefect server: they never delay a run, and none is lost while it goes on."""

from __future__ import annotations

import logging
import threading

import pytest

from tasks import reporting
from tasks.reporting import Reporter, labels_of
from tests.unit.journal.histories import (
    CRASH_BEGAN,
    CRASH_FAILED,
    DAMAGED,
    GOES_ON,
    LINK_BEGAN,
    LINK_RECOVERED,
    SAVED,
    STANDS,
    failed,
    history_of,
)
from training.journal.events import StepRecord
from training.recovery.faults import Fault, FaultClass, RecoverableBy
from training.recovery.rungs import Decision, Rung
from training.supervisor.report import (
    activity_of,
    event_text,
    fault_report,
    progress_text,
    recovery_report,
    story_rows,
)


@pytest.fixture
def reporter(monkeypatch):
    monkeypatch.setattr(reporting, "RETRY_S", 0.01)
    reporter = Reporter("run", None, logging.getLogger("test"))
    reporter.start()
    yield reporter
    reporter.close()


def test_what_the_server_did_not_take_is_sent_again_until_it_does(reporter, caplog):
    sent = threading.Event()
    refusals = iter([ConnectionError("down"), ConnectionError("down"), None])

    def send() -> None:
        refusal = next(refusals)
        if refusal is not None:
            raise refusal
        sent.set()

    reporter._submit("fault-p1-a1", send)
    assert sent.wait(5)
    assert caplog.text.count("does not take") == 1, "an outage is one line in the log"


def test_of_updates_to_the_same_artifact_only_the_newest_is_sent(reporter):
    busy, release, done = threading.Event(), threading.Event(), threading.Event()
    seen: list[int] = []

    def occupy() -> None:
        busy.set()
        release.wait(5)

    reporter._submit("first", occupy)
    assert busy.wait(5)
    for number in range(5):
        reporter._submit("progress", lambda number=number: seen.append(number))
    reporter._submit("last", done.set)
    release.set()
    assert done.wait(5)
    assert seen == [4]


def test_closing_does_not_wait_for_a_server_that_is_down(monkeypatch):
    monkeypatch.setattr(reporting, "CLOSE_TIMEOUT_S", 5.0)
    reporter = Reporter("run", None, logging.getLogger("test"))
    refused = threading.Event()

    def send() -> None:
        refused.set()
        raise ConnectionError("down")

    reporter.start()
    reporter._submit("attempts", send)
    assert refused.wait(5)
    reporter.close()
    assert not reporter._thread.is_alive()


def test_a_fault_report_names_class_evidence_place_decision_and_isolation():
    fault = Fault(FaultClass.NODE_LOST, 0.0, "the agent of node-1 is gone", node="node-1", step=77)
    decision = Decision(
        Rung.POD_RESCHEDULE, "node-1", "node_lost: pod_reschedule", ("in_place_restart: off",)
    )
    text = fault_report(failed(fault, decision))
    assert "**Decision: `pod_reschedule`.** node_lost: pod_reschedule" in text
    for word in ("node_lost", "node-1", "after step 77", "is gone", "isolated"):
        assert word in text


def test_a_fault_report_names_the_cause_what_to_do_and_what_else_it_may_be():
    fault = Fault(
        FaultClass.DEVICE_MEMORY_ERROR,
        0.0,
        "UCE ERROR",
        node="node-1",
        device=3,
        code="507053",
        action="Have the device tested.",
        recoverable_by=RecoverableBy.ISOLATE,
        user_fault=False,
        hardware_fault=True,
    )
    other = Fault(FaultClass.COLLECTIVE_TIMEOUT, 0.0, "EI0002: waited too long")
    text = fault_report(failed(fault, Decision(Rung.STOP, None, "over"), runners_up=(other,)))
    for row in (
        "| code | 507053 |",
        "| device | 3 |",
        "| cause lies in | hardware |",
        "| recovered by | isolate |",
        "| you should | Have the device tested. |",
        "- collective_timeout: `EI0002: waited too long`",
    ):
        assert row in text


def test_a_fault_report_shows_what_the_survivors_saved():
    fault, decision = Fault(FaultClass.NATIVE_CRASH, 0.0, "SIGKILL"), Decision(Rung.STOP, None, "x")
    assert "End-of-life checkpoint of step 40 by ranks 0, 2." in fault_report(
        failed(fault, decision, SAVED)
    )
    nothing = SAVED.model_copy(update={"step": None, "why": "rank 1 has no replica"})
    assert "No end-of-life checkpoint: rank 1 has no replica." in fault_report(
        failed(fault, decision, nothing)
    )


def report_of(*events, ended: bool = False) -> str:
    view = history_of(*events, has_ended=ended).attempts[0]
    return recovery_report(view, view.recoveries[-1])


def test_the_report_of_a_recovery_names_fault_decision_and_outcome():
    text = report_of(LINK_BEGAN, LINK_RECOVERED)
    for words in (
        "## link_down at rank 3 on node-1",
        "Attempt 1.1, generation 1, after step 14.",
        "EI0006",
        "`step_retry`**, inside the processes. link_down at rank 3 on node-1: step_retry\n",
        "**Recovered** after 0.62 s.",
        "| goes on from step | 14 |",
        "| new processes | none |",
        "| state from a replica | 3 |",
    ):
        assert words in text


def test_the_report_of_a_recovery_that_failed_names_the_cause():
    text = report_of(CRASH_BEGAN, CRASH_FAILED)
    assert "**Failed** after 1.50 s: no replica of rank 1." in text
    assert "- not `step_retry: switched off`" in text
    assert "Under way." in report_of(CRASH_BEGAN)
    assert "**Failed**: the attempt ended first." in report_of(CRASH_BEGAN, ended=True)


def test_reconnected_links_leave_the_job_sub_healthy():
    decision = Decision(Rung.OPERATOR_RETRY, None, "", sub_healthy=True)
    began = LINK_BEGAN.model_copy(update={"decision": decision})
    assert "The job is sub-healthy" in report_of(began, LINK_RECOVERED)
    assert "sub-healthy" not in report_of(LINK_BEGAN, LINK_RECOVERED)
    failed = LINK_RECOVERED.model_copy(update={"succeeded": False, "why": "too late"})
    assert "sub-healthy" not in report_of(began, failed)
    history = history_of(began, LINK_RECOVERED)
    assert [m.began.number for m in history.sub_healthy] == [1]
    assert [row.outcome for row in story_rows(history)][1:] == ["recovered, sub-healthy"]
    assert history_of(began, failed).sub_healthy == []


LINES = {
    DAMAGED: "checkpoint of step 40 is damaged, set aside, the one before is taken: rank 3's file",
    DAMAGED.model_copy(
        update={"is_repaired": True}
    ): "checkpoint of step 40 is damaged, repaired from a node: rank 3's file",
    LINK_BEGAN: "recovery 1, generation 1: link_down at rank 3 on node-1: EI0006 -> step_retry",
    LINK_RECOVERED: "recovery 1: training goes on from step 14 after 0.62 s, 0 steps done again",
    CRASH_FAILED: "recovery 2 failed: no replica of rank 1",
    SAVED: "end-of-life checkpoint of step 40 by ranks 0, 2",
    STANDS: "pause 4: every rank is paused at step 20",
    GOES_ON: "pause 4 is over: training goes on from step 20",
}


@pytest.mark.parametrize(("event", "text"), LINES.items())
def test_every_note_is_a_line_of_the_log(event, text):
    assert event_text(event) == text


@pytest.mark.parametrize(
    ("events", "activity"),
    [
        ((), None),
        ((LINK_BEGAN,), "recovering: link_down -> step_retry"),
        ((LINK_BEGAN, LINK_RECOVERED), None),
        ((LINK_BEGAN, LINK_RECOVERED, STANDS), "paused at step 20"),
        ((STANDS, GOES_ON), None),
    ],
)
def test_a_run_that_does_not_train_shows_what_it_does(events, activity):
    assert activity_of(history_of(*events)) == activity
    assert activity_of(history_of(*events, has_ended=True)) is None


@pytest.fixture
def reported(monkeypatch):
    """What a reporter reports, by name, without a server."""
    reporter = Reporter("run", None, logging.getLogger("test"))
    events: list[tuple[str, dict]] = []
    monkeypatch.setattr(reporter, "event", lambda kind, payload: events.append((kind, payload)))
    return reporter, events


def test_a_recovery_inside_the_processes_is_two_events_and_one_report(reported):
    reporter, events = reported
    under_way = history_of(LINK_BEGAN).attempts[0]
    reporter.recovery_began(under_way, under_way.recoveries[0])
    over = history_of(LINK_BEGAN, LINK_RECOVERED).attempts[0]
    reporter.recovery_over(over, over.recoveries[0])
    (fault, noticed), (recovery, outcome) = events
    assert (fault, noticed["fault_class"], noticed["rank"]) == ("fault", "link_down", 3)
    assert recovery == "recovery"
    assert {
        "fault_class": "link_down", "rung": "step_retry", "generation": 1, "step": 14,
        "duration_s": 0.62, "steps_lost": 0, "succeeded": True,
    }.items() <= outcome.items()  # fmt: skip
    assert list(reporter._waiting) == ["fault-p1-a1-r1"]


def test_what_automations_can_ask_for_is_a_label_of_the_event():
    assert labels_of({"fault_class": FaultClass.HANG, "node": None, "evidence": "x"}) == {
        "perdure.fault_class": "hang"
    }


def test_the_progress_line_shows_step_loss_speed_and_ettr():
    last = StepRecord(15, 2.0, 1.0, 1e-3, 1e5, None, 0.0, 0.5, 8, 0, 1, 1)
    assert progress_text(last, 60, "training", ettr=0.914) == (
        "step 15 / 60, loss 2.0000, 100,000 tokens/s, ETTR 91.4%: training"
    )
    assert progress_text(None, 60, "starting") == "starting"
