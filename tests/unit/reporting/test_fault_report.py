"""The report of a fault answers seven questions, and says what is not known yet."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from perdure.training.journal.history import replay
from perdure.training.journal.records import AnyRecord, Member, NodeReleased, RunEnded
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.rungs import Decision, Rung
from perdure.training.reporting.fault_report import (
    QUESTIONS,
    FaultReport,
    ReportPlace,
    fault_reports,
)
from tests.unit.journal.histories import (
    BEGINNING,
    CRASH,
    CRASH_BEGAN,
    CRASH_FAILED,
    LINK_BEGAN,
    LINK_RECOVERED,
    NOW,
    SAVED,
    decided,
    over,
    placed,
    seen,
    started,
    stepped,
)

PLACE = ReportPlace("small", lambda key: f"file:///store/{key}")
LOST = Fault(FaultClass.NODE_LOST, 30.0, "the agent of <node-1> is gone", node="node-1", step=40)


def reports(*records: AnyRecord, recent: int = 5) -> list[FaultReport]:
    return fault_reports(replay([*BEGINNING, *records]), PLACE, recent=recent)


def answers(report: FaultReport) -> dict[str, str]:
    """By question, in markdown."""
    result = re.findall(r"^\*\*(.+?\?)\*\* (.*)$", report.body, flags=re.MULTILINE)
    return dict(result)


def lost(**changes: Any) -> list[AnyRecord]:
    return [over(fault=LOST, **changes), decided(1, Rung.POD_RESCHEDULE, isolate="node-1")]


MOVED = placed(2).model_copy(
    update={
        "members": (
            Member(index=0, node="node-0", schedule_cnt=1),
            Member(index=1, node="node-2", schedule_cnt=2),
        )
    }
)
AGAIN = started(1, 38).model_copy(update={"placement": 2})
TRAINS = stepped(1, 39, at_s=37.5).model_copy(update={"placement": 2})


def test_a_fault_under_recovery_says_what_is_known_and_what_is_not():
    (report,) = reports(*lost())
    result = answers(report)
    assert list(result) == list(QUESTIONS), "every question, in order"
    assert report.name == "fault-p1-a1"
    assert report.title == "node_lost -> pod_reschedule (under way): node-1, step 40"
    assert result["What broke?"].startswith("`node_lost`: node lost (\u8282\u70b9\u4e22\u5931)")
    assert result["Where?"] == "node-1, attempt 1.1, after step 40, at 1970-01-01 00:00:30 UTC"
    assert "`pod_reschedule`" in result["What was done?"]
    assert "Node **node-1** is isolated." in result["What was done?"]
    assert result["What did it cost?"] == "not known before it is over, no spare used"
    assert result["Is it over?"] == "Not yet: the recovery is under way"
    assert result["Must somebody act?"] == (
        "Yes, but it can wait. Have node-1 checked, then let it back in: "
        "`perdure nodes small --release node-1`"
    )
    assert result["Where are the logs?"] == (
        "`perdure logs small --attempt 1.1`; in the store: "
        "[`file:///store/runs/small/logs/p0001-a0001/`]"
        "(<file:///store/runs/small/logs/p0001-a0001/>)"
    )


def test_a_run_that_stands_still_without_a_node_asks_for_one_now():
    waiting = replace(PLACE, waits=True)
    (report,) = fault_reports(replay([*BEGINNING, *lost()]), waiting, recent=5)
    assert answers(report)["Is it over?"] == "Not yet: the run waits for a healthy node"
    assert answers(report)["Must somebody act?"].startswith("Yes, now")


def test_once_training_goes_on_the_report_says_so_with_steps_seconds_and_spare():
    (report,) = reports(*lost(), MOVED, AGAIN, TRAINS)
    result = answers(report)
    assert "(over)" in report.title
    assert result["Is it over?"] == (
        "Yes, since 1970-01-01 00:00:37 UTC: attempt 2.1 trains from step 38"
    )
    assert result["What did it cost?"] == (
        "2 steps done again, 7.5 s without training, spare used: node-2 in place of node-1"
    )
    release = NodeReleased(at_s=50.0, epoch=1, node="node-1")
    (later,) = reports(*lost(), MOVED, AGAIN, TRAINS, release)
    assert answers(later)["Must somebody act?"] == "No. node-1 was released"


def test_an_attempt_that_is_starting_is_not_the_end_of_the_recovery():
    (report,) = reports(*lost(), MOVED, AGAIN)
    assert answers(report)["Is it over?"] == "Not yet: attempt 2.1 is starting"


def test_a_run_that_is_cancelled_in_the_middle_of_a_recovery_keeps_its_fault():
    end = RunEnded(**NOW, outcome="cancelled", message="cancelled")
    (report,) = reports(*lost(), end)
    result = answers(report)
    assert result["Is it over?"] == "No, the run was cancelled first"
    assert result["What did it cost?"] == "nothing was trained after it, no spare used"
    assert "Node **node-1** is isolated." in result["What was done?"]


def test_a_run_that_stops_says_what_the_user_has_to_do():
    fault = Fault(FaultClass.USER_CODE_ERROR, 0.0, "x", action="Fix the program.", rank=3)
    (report,) = reports(over(fault=fault), decided(1, Rung.STOP))
    result = answers(report)
    assert result["Must somebody act?"] == (
        "Yes: Fix the program. Then start the run again: `perdure run JOB.yaml`"
    )
    assert result["Is it over?"] == "No, the run stops"
    assert "--attempt 1.1 --rank 3`" in result["Where are the logs?"]


def test_what_the_survivors_saved_and_what_else_it_may_be_are_told():
    other = Fault(FaultClass.COLLECTIVE_TIMEOUT, 0.0, "EI0002: waited <long>")
    (report,) = reports(*seen(SAVED), *lost(runners_up=(other,)))
    assert "End-of-life checkpoint of step 40 by ranks 0, 2." in report.body
    assert "## Less likely\n\n- collective\\_timeout: `EI0002: waited <long>`" in report.body


def test_no_text_of_a_program_is_taken_for_markup():
    fault = Fault(FaultClass.NATIVE_CRASH, 0.0, "in <region> | a", explanation="<b> or *c*")
    decision = decided(1).model_copy(
        update={"decision": Decision(Rung.IN_PLACE_RESTART, None, "a | <b>")}
    )
    (report,) = reports(over(fault=fault), decision)
    assert "a | &lt;b&gt;." in report.body
    assert "&lt;b&gt; or \\*c\\*" in report.body


def test_a_recovery_inside_the_processes_has_a_report_of_its_own():
    going, over_ = reports(*seen(LINK_BEGAN)), reports(*seen(LINK_BEGAN, LINK_RECOVERED))
    assert going[0].title == "link_down -> step_retry (recovering): rank 3 on node-1, step 14"
    assert over_[0].name == "fault-p1-a1-r1"
    result = answers(over_[0])
    assert result["What did it cost?"] == (
        "0 steps done again, 0.62 s without training, state from a replica for rank 3"
    )
    assert result["Is it over?"].startswith("Yes, since 1970-01-01 00:00:10 UTC")
    assert result["Must somebody act?"] == "No"
    assert result["Where are the logs?"].endswith("once the attempt has ended")
    assert answers(going[0])["Is it over?"] == "Not yet: the recovery is under way"


def test_a_recovery_that_failed_or_was_cut_off_says_so():
    (failed,) = reports(*seen(CRASH_BEGAN, CRASH_FAILED))
    assert answers(failed)["Is it over?"] == "No, it failed: no replica of rank 1"
    assert "- step\\_retry: switched off" in failed.body
    cut_off, _ = reports(*seen(CRASH_BEGAN), over(), decided())
    assert "the attempt ended first" in answers(cut_off)["Is it over?"]


def test_links_that_were_made_anew_leave_the_job_sub_healthy():
    retry = Decision(Rung.OPERATOR_RETRY, None, "x", sub_healthy=True)
    began = LINK_BEGAN.model_copy(update={"decision": retry})
    (report,) = reports(*seen(began, LINK_RECOVERED))
    assert "sub-healthy" in answers(report)["Is it over?"]


def test_reports_that_cannot_change_any_more_are_not_made_again():
    rows: list[AnyRecord] = []
    for number in range(1, 4):
        rows += [over(number), decided(number), started(number + 1), stepped(number + 1, 41)]
    assert [report.name for report in reports(*rows, recent=2)] == ["fault-p1-a3"]
    rows[1] = decided(1, Rung.POD_RESCHEDULE, isolate="node-0")
    assert [report.name for report in reports(*rows, recent=2)] == ["fault-p1-a1", "fault-p1-a3"]
    assert CRASH.node == "node-0"
