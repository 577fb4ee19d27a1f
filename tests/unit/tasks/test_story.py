"""What is reported of a run while it is supervised: activity, events, tables, the account."""

from __future__ import annotations

import logging

import pytest

from tasks.story import RunStory
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
from training.job import parse_job
from training.journal.events import LedgerEvent, StepRecord
from training.journal.history import replay
from training.supervisor.run import Run
from training.supervisor.watch import Progress

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
def run(tmp_path) -> Run:
    job = parse_job(
        {
            "run_id": "small",
            "storage": {"address": f"file://{tmp_path}/store"},
            "data": {"sources": ["/corpus"]},
        }
    )
    return Run(job, home=tmp_path)


@pytest.fixture
def story(run, reported, caplog) -> RunStory:
    caplog.set_level(logging.INFO)
    return RunStory(run, reported, logging.getLogger("test"), target_step=1000)


@pytest.fixture
def see(run, story):
    """Has the supervisor see these events, of which the last `fresh` are new."""

    def see(*events: LedgerEvent, fresh: int = 0, ended: bool = False, steps=()) -> str:
        records = [*BEGINNING, *seen(*events), *(END if ended else ())]
        run._writer.history = replay(records)
        new = events[len(events) - fresh :]
        story.on_progress(Progress(events=new, steps=steps, last=STEP))
        return story.activity

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


def test_where_the_time_went_is_reported_and_stays_in_the_store(run, story, see, reported):
    see(steps=[STEP])
    story.report_account()
    assert reported.accounted.rows[-1]["owner"] == "wall time"
    png = run.store.get("runs/small/timeline.png")
    assert png == reported.accounted.png
    assert png.startswith(b"\x89PNG")


def test_a_recovery_that_its_attempts_end_cut_off_is_reported_as_failed(see, story, reported):
    see(LINK_BEGAN, LINK_RECOVERED, CRASH_BEGAN, ended=True)
    story.report_cut_off()
    assert reported.events == [("recovery", (2, False))]
    see(CRASH_BEGAN, CRASH_FAILED, ended=True)
    story.report_cut_off()
    assert len(reported.events) == 1, "its own end was reported already"


def test_an_end_whose_beginning_was_lost_ends_no_supervision(see, reported):
    see(LINK_RECOVERED, fresh=1)
    assert reported.events == []
