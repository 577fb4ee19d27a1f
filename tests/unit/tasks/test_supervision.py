"""The flow process as supervisor: what it shows of a run, and how it hands over."""

from __future__ import annotations

import logging

import pytest
from prefect.exceptions import Abort

from tasks import supervision as module
from tasks.supervision import Supervision
from tests.unit.journal.histories import (
    BEGINNING,
    COOLED,
    CRASH_BEGAN,
    CRASH_FAILED,
    END,
    GOES_ON,
    HOT,
    LINK_BEGAN,
    LINK_RECOVERED,
    STANDS,
    seen,
)
from training.errors import RunConflict
from training.job import parse_job
from training.journal.events import LedgerEvent, StepRecord
from training.journal.history import replay
from training.supervisor.watch import Progress
from training.wire.requests import read_control, write_control

STEP = StepRecord(15, 2.0, 1.0, 1e-3, 1e5, None, 0.0, 0.5, 8, 0, 1, 1)


class Recorder:
    """A reporter that remembers events, and which reports were written."""

    def __init__(self) -> None:
        self.events: list[tuple[str, object]] = []

    def recovery_began(self, view, recovery) -> None:
        self.events.append(("fault", recovery.began.number))

    def recovery_over(self, view, recovery) -> None:
        self.events.append(("recovery", (recovery.began.number, recovery.succeeded)))

    def event(self, kind, payload) -> None:
        self.events.append((kind, payload))

    def attempts(self, rows) -> None:
        self.rows = len(rows)

    def progress(self, step, target, text) -> None:
        self.text = text

    def account(self, build) -> None:
        self.accounted = build()

    def alerts(self, rows) -> None:
        self.alert_rows = rows


@pytest.fixture
def reported() -> Recorder:
    return Recorder()


@pytest.fixture
def supervision(tmp_path, reported, caplog):
    job = parse_job(
        {
            "run_id": "small",
            "storage": {"address": f"file://{tmp_path}/store"},
            "data": {"sources": ["/corpus"]},
        }
    )
    caplog.set_level(logging.INFO)
    made = Supervision(job, logging.getLogger("test"))
    made.reporter = reported
    return made


@pytest.fixture
def see(supervision):
    """Has the supervisor see these events, of which the last `fresh` are new."""

    def see(*events: LedgerEvent, fresh: int = 0, ended: bool = False, steps=()) -> str:
        records = [*BEGINNING, *seen(*events), *(END if ended else ())]
        supervision.run._writer.history = replay(records)
        new = events[len(events) - fresh :]
        supervision.on_progress(Progress(events=new, steps=steps, last=STEP))
        return supervision.activity

    return see


def test_the_activity_follows_recoveries_and_pauses(see):
    assert see(steps=[STEP]) == "training"
    assert see(LINK_BEGAN, fresh=1, steps=[STEP]) == "recovering: link_down -> step_retry"
    assert see(LINK_BEGAN) == "recovering: link_down -> step_retry"
    assert see(LINK_BEGAN, LINK_RECOVERED, fresh=1) == "training"
    assert see(STANDS, fresh=1) == "paused at step 20"
    assert see(STANDS, GOES_ON, fresh=1) == "training"


def test_a_supervisor_that_adopts_a_paused_attempt_shows_that_it_is_paused(see, reported):
    assert see(STANDS, fresh=0) == "paused at step 20"
    assert reported.events == [], "what is on record was reported by the supervisor before"


def test_a_recovery_that_is_read_whole_is_reported_whole(see, reported, caplog):
    see(LINK_BEGAN, LINK_RECOVERED, fresh=2)
    assert reported.events == [("fault", 1), ("recovery", (1, True))]
    assert reported.rows == 2
    assert "recovery 1: training goes on from step 14" in caplog.text


def test_a_pause_is_an_event(see, reported):
    see(STANDS, fresh=1)
    see(STANDS, GOES_ON, fresh=1)
    assert reported.events == [
        ("pause", {"paused": True, "step": 20}),
        ("pause", {"paused": False, "step": 20}),
    ]


def test_an_alert_is_an_event_and_a_row_that_shows_when_it_is_over(see, reported, caplog):
    see(HOT, fresh=1)
    assert [(row.state, row.where, row.lasted_s) for row in reported.alert_rows] == [
        ("open", "node-1, device 3", None)
    ]
    see(HOT, COOLED, fresh=1)
    assert [(row.state, row.lasted_s) for row in reported.alert_rows] == [("past", 12.5)]
    (raised, facts), (cleared, later) = reported.events
    assert (raised, cleared) == ("alert", "alert_cleared")
    assert {"point": "memory_high", "text": "memory at 98 %", "value": 98.0, "limit": 95.0,
            "node": "node-1", "attempt": 1, "at_s": 40.0}.items() <= facts.items()  # fmt: skip
    assert (later["point"], later["at_s"]) == ("memory_high", 52.5)
    assert "alert 1, memory_high: memory at 98 %" in caplog.text


def test_where_the_time_went_is_reported_and_stays_in_the_store(supervision, see, reported):
    see(steps=[STEP])
    supervision.report_account()
    assert reported.accounted.rows[-1]["owner"] == "wall time"
    png = supervision.run.store.get("runs/small/timeline.png")
    assert png == reported.accounted.png
    assert png.startswith(b"\x89PNG")


def test_a_recovery_that_its_attempts_end_cut_off_is_reported_as_failed(see, supervision, reported):
    see(LINK_BEGAN, LINK_RECOVERED, CRASH_BEGAN, ended=True)
    supervision.report_cut_off()
    assert reported.events == [("recovery", (2, False))]
    see(CRASH_BEGAN, CRASH_FAILED, ended=True)
    supervision.report_cut_off()
    assert len(reported.events) == 1, "its own end was reported already"


def test_an_end_whose_beginning_was_lost_ends_no_supervision(see, reported):
    see(LINK_RECOVERED, fresh=1)
    assert reported.events == []


class HandedOverTo:
    cancel_wanted = False
    is_handed_over = True


def test_a_supervisor_leaves_when_its_flow_run_is_another_processs(supervision, monkeypatch):
    assert not supervision.stop_wanted()
    monkeypatch.setattr(supervision, "_requests", HandedOverTo())
    with pytest.raises(Abort, match="another process supervises the run"):
        supervision.stop_wanted()


def test_what_is_handed_over_can_be_taken_at_once(supervision, monkeypatch, caplog):
    supervision._take()
    monkeypatch.setattr(supervision, "_requests", HandedOverTo())
    supervision._interrupted(Abort)
    assert list(supervision.run.store.list("runs/small/supervisor.json")) == []
    assert supervision.run.refresh().ended is None
    assert "another process supervises" in caplog.text


@pytest.fixture
def resumed(supervision, monkeypatch):
    """A supervisor of a flow run that was resumed; waits without time passing."""
    monkeypatch.setattr(supervision, "flow_run_id", "an id")
    monkeypatch.setattr(module, "_is_resumed", lambda _id: True)
    monkeypatch.setattr(module, "HANDOVER_POLL_S", 0.0)
    return supervision


def conflicts(supervision, monkeypatch, number: int) -> None:
    """The supervisor before needs a moment to leave."""
    take, left = supervision.run.take, iter(range(number))

    def taken():
        if next(left, None) is not None:
            raise RunConflict("one supervisor at a time")
        return take()

    monkeypatch.setattr(supervision.run, "take", taken)


def test_a_resumed_flow_run_waits_for_the_supervisor_before_to_leave(resumed, monkeypatch):
    write_control(resumed.run.store, "small", pause=True)
    conflicts(resumed, monkeypatch, 3)
    resumed._take()
    assert not read_control(resumed.run.store, "small").pause, "and has the run go on"


def test_a_supervisor_that_does_not_leave_is_a_conflict_in_the_end(resumed, monkeypatch):
    monkeypatch.setattr(module, "HANDOVER_S", 0.0)
    conflicts(resumed, monkeypatch, 10**6)
    with pytest.raises(RunConflict):
        resumed._take()


def test_a_run_that_is_merely_started_again_does_not_wait_for_another_supervisor(
    supervision, monkeypatch
):
    conflicts(supervision, monkeypatch, 1)
    with pytest.raises(RunConflict):
        supervision._take()


def test_a_paused_run_that_is_started_again_stays_paused_with_a_warning(supervision, caplog):
    write_control(supervision.run.store, "small", pause=True)
    supervision._take()
    assert read_control(supervision.run.store, "small").pause
    assert "its ranks wait for `perdure resume small`" in caplog.text
