"""What is reported of a run while it is supervised: activity, events, tables, the account."""

from __future__ import annotations

import base64
import logging
import time
from collections import Counter
from dataclasses import replace

import pytest

from perdure.tasks.artifacts import Artifact
from perdure.tasks.story import UPDATE_PERIOD_S, RunReporter
from perdure.training.engines.base import Snapshot
from perdure.training.journal.attempt_view import CUT_OFF
from perdure.training.journal.events import LedgerEvent, StepRecord
from perdure.training.journal.history import replay
from perdure.training.journal.waits import Wait, WaitKind
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.watch import Progress
from perdure.training.wire.agent_status import AgentState, AgentStatus
from tests.jobs import small_job
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

STEP = StepRecord(15, 2.0, 1.0, 1e-3, 1e5, None, 0.0, 0.5, 8, 0, 1, 1)


class Recorder:
    """A reporter that remembers events and artifacts."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict]] = []
        self.times: list[float | None] = []
        self.shown: dict[str, Artifact] = {}
        self.counts: Counter[str] = Counter()

    def event(self, kind, payload, *, at_s=None) -> None:
        self.events.append((kind, payload))
        self.times.append(at_s)

    def artifact(self, artifact: Artifact) -> None:
        self.shown[artifact.name] = artifact
        self.counts[artifact.name] += 1

    def artifacts(self, name, build) -> None:
        for artifact in build():
            self.artifact(artifact)


@pytest.fixture
def reported() -> Recorder:
    return Recorder()


@pytest.fixture
def run(tmp_path, monkeypatch) -> RunSupervisor:
    run = RunSupervisor(small_job(tmp_path, run_id="small"), home=tmp_path)
    monkeypatch.setattr(run, "refresh", lambda: run.history)  # as `see` has it
    return run


@pytest.fixture
def story(run, reported, caplog) -> RunReporter:
    caplog.set_level(logging.INFO)
    return RunReporter(run, reported, logging.getLogger("test"), target_step=1000)


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
    assert see(STANDS, fresh=1).startswith("paused at step 20 since ")
    assert see(STANDS, GOES_ON, fresh=1) == "training"


def test_a_supervisor_that_adopts_a_paused_attempt_shows_that_it_is_paused(see, reported):
    assert see(STANDS, fresh=0).startswith("paused at step 20 since ")
    assert reported.events == [], "what is on record was reported by the supervisor before"


def test_a_recovery_that_is_read_whole_is_reported_whole(see, reported, caplog):
    see(LINK_BEGAN, LINK_RECOVERED, fresh=2)
    (fault, noticed), (recovery, outcome) = reported.events
    assert (fault, noticed["fault_class"], noticed["rank"]) == ("fault", "link_down", 3)
    assert recovery == "recovery"
    assert {
        "fault_class": "link_down", "node": "node-1", "rung": "step_retry", "generation": 1,
        "step": 14, "duration_s": 0.62, "steps_lost": 0, "succeeded": True,
    }.items() <= outcome.items()  # fmt: skip
    assert reported.times == [LINK_BEGAN.fault.at_s, LINK_RECOVERED.at_s], "of the fault itself"
    assert len(reported.shown["attempts"].content) == 2
    assert "(recovered)" in reported.shown["fault-p1-a1-r1"].description
    levels = {record.message[:10]: record.levelname for record in caplog.records}
    assert levels == {"recovery 1": "INFO"}
    assert caplog.records[0].levelname == "WARNING", "a fault, although it was mended"


def test_the_end_of_an_attempt_is_one_line_two_events_and_a_report(see, story, reported, caplog):
    see(ended=True)
    caplog.clear()
    for _caller in ("the hook", "the task around it"):
        story.attempt_ended("native_crash on rank 1", log=logging.getLogger("test"))
    (record,) = caplog.records
    assert (record.levelname, record.message) == (
        "WARNING",
        "attempt 1.1 ended: native_crash on rank 1",
    )
    (fault, _), (recovery, facts) = reported.events
    assert (fault, recovery) == ("fault", "recovery")
    assert {
        "fault_class": "native_crash",
        "node": "node-0",
        "rung": "in_place_restart",
    }.items() <= (facts.items())
    assert "(under way)" in reported.shown["fault-p1-a1"].description
    assert story.activity == "recovering: native_crash -> in_place_restart"


def test_what_does_not_follow_from_a_step_is_told_at_once_and_the_rest_now_and_then(
    see, story, reported, monkeypatch
):
    now = [1000.0]
    monkeypatch.setattr("perdure.tasks.story.time.monotonic", lambda: now[0])
    see(steps=[STEP])
    sent = reported.counts["progress"]
    for _ in range(10):
        now[0] += 2.0
        story.on_progress(Progress(steps=[STEP], last=STEP))
    assert reported.counts["progress"] == sent
    see(LINK_BEGAN, fresh=1)
    assert reported.counts["progress"] == sent + 1, "a fault at once"
    now[0] += UPDATE_PERIOD_S + 1
    story.on_progress(Progress(last=STEP))
    assert reported.counts["progress"] == sent + 2


@pytest.mark.parametrize("outcome", ["cancelled", "completed", "failed"])
def test_at_the_end_the_progress_says_how_it_ended(see, story, reported, outcome):
    see(steps=[STEP])
    story.end(outcome)
    assert reported.shown["progress"].description.startswith(f"{outcome}, step")
    assert "ETTR" in reported.shown["progress"].description, "of the whole run"
    assert {"loss", "timeline", "ettr"} <= set(reported.shown)


def test_a_pause_is_an_event(see, reported):
    see(STANDS, fresh=1)
    see(STANDS, GOES_ON, fresh=1)
    assert reported.events == [
        ("pause", {"paused": True, "step": 20}),
        ("pause", {"paused": False, "step": 20}),
    ]


def test_an_alert_is_an_event_and_a_row_that_shows_when_it_is_over(see, reported, caplog):
    see(HOT, fresh=1)
    (row,) = reported.shown["alerts"].content
    assert (row["state"], row["where"], row["lasted"]) == ("open", "node-1, device 3", "")
    assert reported.shown["needs-you"].description == "1 thing needs you"
    see(HOT, COOLED, fresh=1)
    (row,) = reported.shown["alerts"].content
    assert (row["state"], row["lasted"]) == ("past", "12.5 s")
    assert reported.shown["needs-you"].description == "Nothing needs you"
    alerts = [(kind, facts) for kind, facts in reported.events if kind.startswith("alert")]
    (raised, facts), (cleared, later) = alerts
    assert (raised, cleared) == ("alert", "alert_cleared")
    assert {"point": "memory_high", "text": "memory at 98 %", "value": 98.0, "limit": 95.0,
            "node": "node-1", "attempt": 1, "at_s": 40.0}.items() <= facts.items()  # fmt: skip
    assert (later["point"], later["at_s"]) == ("memory_high", 52.5)
    assert "alert 1, memory_high: memory at 98 %" in caplog.text


def test_where_the_time_went_is_reported_and_stays_in_the_store(run, story, see, reported):
    see(steps=[STEP])
    story.end("completed")
    assert reported.shown["ettr"].content[-1]["owner"] == "wall time"
    png = run.store.get("runs/small/timeline.png")
    assert base64.b64encode(png).decode() in reported.shown["timeline"].content
    assert png.startswith(b"\x89PNG")


def test_a_recovery_that_its_attempts_end_cut_off_is_reported_as_failed(see, story, reported):
    see(LINK_BEGAN, LINK_RECOVERED, CRASH_BEGAN, ended=True)
    story.attempt_ended(None, log=logging.getLogger("test"))
    recoveries = [facts for kind, facts in reported.events if kind == "recovery"]
    assert [(facts["number"], facts["succeeded"]) for facts in recoveries] == [(2, False)]


def test_a_recovery_whose_own_end_was_reported_is_not_reported_with_its_attempts_end(
    see, story, reported
):
    see(CRASH_BEGAN, CRASH_FAILED, ended=True)
    reported.events.clear()
    story.attempt_ended(None, log=logging.getLogger("test"))
    assert reported.events == []


def test_an_end_whose_beginning_was_lost_ends_no_supervision(see, reported):
    see(LINK_RECOVERED, fresh=1)
    assert reported.events == []


def test_somebody_is_called_once_for_each_thing_and_again_when_it_comes_back(see, reported):
    for _ in range(2):
        see(HOT, fresh=1)
    calls = [facts for kind, facts in reported.events if kind == "action_required"]
    assert [(call["need"], call["what"]) for call in calls] == [
        ("alert", "Alert: memory_high on node-1, device 3")
    ]
    assert calls[0]["why"] == "memory at 98 %"
    assert calls[0]["action"] == "Look at node-1, device 3"
    see(HOT, COOLED, fresh=1)
    see(HOT, fresh=1)
    assert [kind for kind, _ in reported.events].count("action_required") == 2


@pytest.mark.parametrize(
    ("kind", "need"),
    [
        (WaitKind.NODE, "The run waits for a node"),
        (WaitKind.PLATFORM, "The platform starts no containers"),
        (WaitKind.AGENTS, "No agent answers"),
        (WaitKind.STORE, None),
        (WaitKind.RESUME, None),
    ],
)
def test_a_wait_calls_for_somebody_once_it_has_lasted_a_minute(story, reported, kind, need):
    for since_s in (time.time(), 1_000.0, 1_000.0):
        story.waits(Wait(kind=kind, since_s=since_s, why="0/3 nodes are available"))
    calls = [facts for kind, facts in reported.events if kind == "action_required"]
    assert [call["what"] for call in calls] == ([need] if need else [])
    assert all(call["why"] == "0/3 nodes are available" for call in calls)
    story.waits(None)
    if need:
        assert reported.shown["needs-you"].description == "Nothing needs you"


def test_a_recovery_that_the_end_of_its_attempt_cut_off_is_reported_once(see, story, reported):
    see(CRASH_BEGAN, fresh=1)
    cut_off = CRASH_FAILED.model_copy(update={"why": f"{CUT_OFF}: node_lost at n1"})
    see(CRASH_BEGAN, cut_off, ended=True)
    story.attempt_ended(None, log=logging.getLogger("test"))
    assert [kind for kind, _ in reported.events] == ["fault", "recovery"]


STORE_WAIT = Wait(kind=WaitKind.STORE, since_s=1_000.0, why="SlowDown")


def test_a_wait_for_the_store_is_the_phase_once_no_step_comes(story, see, reported):
    see(steps=[STEP])
    story.waits(STORE_WAIT)
    assert story.phase == "waiting for the store since 1970-01-01 00:16:40 UTC: SlowDown"
    assert reported.shown["progress"].description.startswith(story.phase)
    story.waits(None)
    assert story.phase == "training"
    assert reported.shown["progress"].description.startswith("training")


def test_a_run_that_trains_beside_a_wait_says_both(story, see):
    see(steps=[STEP])
    story._last = replace(STEP, at_s=time.time())
    story.waits(STORE_WAIT)
    assert story.phase.startswith("training; waiting for the store since ")


def test_a_wait_that_an_agent_reports_is_the_phase(story, see):
    see(steps=[STEP])
    status = AgentStatus(
        node="node-0", member=0, state=AgentState.RUNNING, schedule_cnt=1, proc_start_cnt=1,
        placement=1, attempt=1, store_wait=STORE_WAIT,
    )  # fmt: skip
    story.on_progress(Progress(snapshot=Snapshot({0: status}), last=STEP))
    assert story.phase == STORE_WAIT.text
    story.on_progress(Progress(last=STEP))
    assert story.phase == "training"
