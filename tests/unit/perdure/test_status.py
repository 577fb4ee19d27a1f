"""`perdure status`: from the ledger and the store alone, on a terminal and for scripts."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from dataclasses import asdict, replace

import pytest
import yaml
from typer.testing import CliRunner

from perdure.cli import app
from perdure.monitor import RunMonitor
from perdure.run_status import RunStatus
from perdure.status import plain_status, status_panel
from perdure.storage.errors import StorageError
from perdure.training.config.job import parse_job
from perdure.training.engines.base import Snapshot
from perdure.training.journal.events import CheckpointRestored, StepRecord
from perdure.training.journal.records import CheckpointRecorded, RunCreated, RunEnded
from perdure.training.journal.steps import metrics_prefix
from perdure.training.journal.waits import Wait, WaitKind
from perdure.training.supervisor.job_registry import job_path, remember_job
from perdure.training.supervisor.observing import AttemptSnapshot
from perdure.training.supervisor.run_handle import RunHandle
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.store_outage import StoreOutage
from perdure.training.wire.agent_status import (
    AgentState,
    AgentStatus,
    HangReport,
    Pulse,
    RankStatus,
    ShownStep,
    WorkerStatus,
)
from perdure.training.wire.node import DeviceSample, NodeSample
from perdure.training.wire.store_wait import Waiter, write_wait
from tests.jobs import job_document
from tests.unit.journal.histories import (
    BEGINNING,
    CRASH_BEGAN,
    END,
    HOT,
    LINK_BEGAN,
    LINK_RECOVERED,
    NOTICED,
    NOW,
    SKIPPED,
    seen,
    started,
)
from tests.unit.perdure.commands import append, perdure, shown

STEP = StepRecord(1, 2.0, 1.0, 1e-3, 12_000.0, None, 1.0, 0.5, 8, 0, 1, 1)
SAVED = CheckpointRecorded(**NOW, placement=1, attempt=1, step=10)


@pytest.fixture
def document(tmp_path):
    return job_document(tmp_path, run_id="small", steps=60)


@pytest.fixture
def run(document, perdure_home):
    return RunHandle(parse_job(document), home=perdure_home)


# An ill device whose port is down as well, one that is well, one with nothing but its port down.
DEVICES = (
    DeviceSample(index=0, health="Alarm", link_is_up=False),
    DeviceSample(index=1, health="OK"),
    DeviceSample(index=2, health="OK", link_is_up=False),
)


def hung_node() -> AgentStatus:
    return AgentStatus(
        node="node-1", member=1, state=AgentState.RUNNING, schedule_cnt=1, proc_start_cnt=1,
        placement=1, attempt=1,
        workers=(WorkerStatus(rank=1, local_rank=0, pid=7, step=20, phase="step"),),
        hang=HangReport(rank=1, silent_s=70.0, limit_s=60.0, phase="step", step=20),
        sample=NodeSample(at_s=1.0, devices=DEVICES),
    )  # fmt: skip


class Observed:
    """An observer of the open attempt that always sees the same."""

    def __init__(self, snapshot: AttemptSnapshot) -> None:
        self._snapshot = snapshot

    def observe(self) -> AttemptSnapshot:
        """What it sees."""
        return self._snapshot


def train(run, *numbers: int) -> None:
    records = [replace(STEP, step=n, at_s=float(n), loss=4.0 - n / 20) for n in numbers]
    lines = "".join(json.dumps(asdict(record)) + "\n" for record in records)
    key = f"{metrics_prefix('small', 1, 1)}{numbers[0]:08d}-{numbers[-1]:08d}.jsonl"
    run.store.put(key, lines.encode())


def test_a_script_reads_step_pace_and_where_the_time_went(run):
    append(run, *BEGINNING, SAVED)
    train(run, *range(1, 21))
    document = RunMonitor(run).snapshot(now_s=30.0).status.document
    json.dumps(document)
    assert (document["state"], document["supervised"]) == ("running", False)
    assert (document["step"], document["committed_step"], document["target_step"]) == (20, 10, 60)
    assert document["eta_s"] == pytest.approx(40 * 19.5 / 20, abs=0.1)
    assert (document["tokens_per_s"], document["loss"], document["last_step_age_s"]) == (
        12_000.0,
        3.0,
        10.0,
    )
    assert document["ettr"] == pytest.approx(10 / 30, abs=1e-3)
    assert sum(document["time_s"].values()) == pytest.approx(document["wall_s"])
    assert [node["state"] for node in document["nodes"]] == [None, None]


SERVER_WAIT = Wait(kind=WaitKind.SERVER, since_s=7.0, why="http://127.0.0.1:4200: it answers 503")
LOCK_WAIT = Wait(kind=WaitKind.LOCK, since_s=8.0, why="process 7 on vm has it")


@pytest.mark.parametrize("wait", [SERVER_WAIT, LOCK_WAIT], ids=["server", "lock"])
def test_a_wait_before_the_run_is_taken_is_its_phase_for_people_and_scripts(run, document, wait):
    append(run, *BEGINNING)
    remember_job(run.home, run.job)
    write_wait(job_path(run.home, "small").parent, wait, by=Waiter.STARTER)
    snapshot = RunMonitor(run).snapshot(now_s=30.0)
    assert snapshot.status.document["waits"] == wait.model_dump(mode="json")
    for text in (shown(status_panel(snapshot, 160)), shown(plain_status(snapshot, 160))):
        assert f"phase: {wait.text}" in text


def test_a_wait_of_a_supervisor_elsewhere_is_the_phase_here(run):
    append(run, *BEGINNING)
    wait = Wait(kind=WaitKind.NODE, since_s=7.0, why="exceeded quota: small")
    lease = {
        "supervisor": "a", "host": "elsewhere", "boot_id": "b", "pid": 1, "process_started_s": 1.0,
        "epoch": 1, "renewed_s": time.time(), "wait": wait.model_dump(),
    }  # fmt: skip
    run.store.put("runs/small/supervisor.json", json.dumps(lease).encode())
    snapshot = RunMonitor(run).snapshot(now_s=30.0)
    assert snapshot.status.waits == wait
    assert "waiting for a free node since" in shown(plain_status(snapshot, 160))


def test_a_wait_for_the_server_beside_a_living_supervisor_is_none_of_the_run(run, document):
    supervisor = RunSupervisor(run.job, home=run.home)
    supervisor.take()
    write_wait(job_path(run.home, "small").parent, SERVER_WAIT, by=Waiter.STARTER)
    child = os.fork()
    if child == 0:  # for another process, the supervisor is one that lives
        waits: Wait | None = SERVER_WAIT
        try:
            waits = RunMonitor(run).snapshot(now_s=30.0).status.waits
        finally:
            os._exit(0 if waits is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_terminal_shows_faults_and_what_was_done_and_open_alerts(run):
    append(run, *BEGINNING, *seen(LINK_BEGAN, LINK_RECOVERED, HOT, CRASH_BEGAN))
    train(run, 11, 12)
    snapshot = RunMonitor(run).snapshot(now_s=60.0)
    for text in (shown(status_panel(snapshot, 160)), shown(plain_status(snapshot, 160))):
        assert "ALERT memory_high: memory at 98 % (node-1, device 3)" in text
        assert "link_down on rank 3 on node-1 at step 14, attempt 1.1 -> step_retry" in text
        assert "native_crash on rank 1 on node-0" in text
        assert "node-0: not reachable from this machine" in text
        assert "running, step 12 / 60" in text
        assert "productive_step" in text
        assert "no process supervises it" in text
    assert [fault["fault_class"] for fault in snapshot.status.document["faults"]] == [
        "native_crash", "link_down",
    ]  # fmt: skip


def test_where_the_newest_attempt_got_its_state_from_is_told(run):
    place = CheckpointRestored(
        at_s=20.0,
        number=1,
        step=10,
        shares={"memory": 2, "memory of a partner": 2},
        partners={"node-2": "node-0"},
        why="of step 15 the nodes lack the shares of ranks 2, 3",
    )
    append(run, *BEGINNING, *seen(place))
    snapshot = RunMonitor(run).snapshot(now_s=60.0)
    told = (
        "attempt 1.1: step 10 restored, shares from memory 2, memory of a partner 2 (node-2 from "
        "copies on node-0; of step 15 the nodes lack the shares of ranks 2, 3)"
    )
    assert told in shown(plain_status(snapshot, 300))
    (document,) = snapshot.status.document["restored"]
    assert (document["attempt"], document["step"], document["num_fetched"]) == ("1.1", 10, 0)
    assert document["partners"] == {"node-2": "node-0"}


def test_an_attempt_without_a_supervisor_is_observed(run, monkeypatch):
    append(run, *BEGINNING)
    hung = hung_node()
    well = hung.model_copy(update={"node": "node-0", "hang": None, "sample": None})
    attempt = AttemptSnapshot(
        Snapshot({0: well, 1: hung}), (replace(STEP, step=21, at_s=21.0),), (LINK_BEGAN,)
    )

    monkeypatch.setattr(run, "observer", lambda: Observed(attempt))
    monitor = RunMonitor(run)
    snapshot = monitor.snapshot(now_s=22.0)
    assert snapshot.status.document["step"] == 21, "newer than anything in the store"
    assert [fault["rung"] for fault in snapshot.status.document["faults"]] == ["step_retry"]
    text = shown(status_panel(snapshot, 160))
    assert "node-0: running, ok; rank 1 step after step 20" in text
    wrong = "rank 1 silent for 70 s; device 0: Alarm, link down; device 2: link down"
    assert f"node-1: running, {wrong}" in text
    monitor.snapshot(now_s=23.0)
    assert len(snapshot.history.attempts[0].events) == 1


def test_what_is_wrong_with_the_program_is_said_once(run, perdure_home):
    remember_job(perdure_home, run.job)
    again = started(2)
    append(run, *BEGINNING, *seen(NOTICED), *END, again, *seen(NOTICED, attempt=2))
    assert perdure("status", "small").count("the program: divides twice") == 1
    assert json.loads(perdure("status", "small", "--json"))["notices"] == ["divides twice"]


def test_abnormal_steps_and_skipped_batches_are_shown_where_there_are_any(run, perdure_home):
    remember_job(perdure_home, run.job)
    append(run, *BEGINNING, *seen(LINK_BEGAN, LINK_RECOVERED))
    assert json.loads(perdure("status", "small", "--json"))["abnormal"] is None
    assert "abnormal" not in perdure("status", "small")
    append(run, *seen(SKIPPED))
    assert json.loads(perdure("status", "small", "--json"))["abnormal"] == {
        "steps": 1,
        "skipped_batches": 1,
        "newest": {"at_s": 1.75, "step": 13, "value": "loss 4.5, gradient norm no number"},
    }
    line = (
        "1 abnormal step, 1 batch skipped, the newest at step 13: loss 4.5, gradient norm no number"
    )
    snapshot = RunMonitor(run).snapshot(now_s=60.0)
    assert line in shown(status_panel(snapshot, 160))
    assert line in shown(plain_status(snapshot, 160))


def test_status_of_a_job_file_needs_no_run_on_this_machine(run, document, tmp_path):
    append(run, *BEGINNING, *END, RunEnded(**NOW, outcome="failed", message="over"))
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    text = perdure("status", path)
    assert "state: failed" in text
    assert "native_crash on rank 1 on node-0" in text
    assert "newest fault:\n    fault_class: native_crash\n" in text
    assert "evidence: SIGKILL" in text
    assert re.search(r"\n    at: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\n", text)
    assert "at_s" not in text


def test_status_is_printed_once_when_piped_and_as_one_object_for_scripts(run, perdure_home):
    remember_job(perdure_home, run.job)
    assert json.loads(perdure("status", "small", "--json"))["state"] == "not started"
    assert "state: not started" in perdure("status", "small")


def test_a_ledger_that_cannot_be_written_is_shown_with_since_when(run, perdure_home):
    run = RunSupervisor(run.job, home=perdure_home)
    run.take()
    outage = StoreOutage(perdure_home, "small", logging.getLogger("test"))
    assert json.loads(perdure("status", "small", "--json"))["ledger_unwritable"] is None
    outage.failed(StorageError("the disk is full"))
    document = json.loads(perdure("status", "small", "--json"))
    assert (document["state"], document["ledger_unwritable"]["why"]) == (
        "running", "the disk is full",
    )  # fmt: skip
    text = perdure("status", "small")
    assert "state: running, but its ledger cannot be written\n" in text
    assert re.search(r"its ledger cannot be written since 2\d{3}-.* UTC: the disk is full", text)
    run.ledger.renew()
    assert json.loads(perdure("status", "small", "--json"))["ledger_unwritable"] is None


def test_the_printed_schema_describes_the_status_of_any_run(run, monkeypatch):
    began = RunMonitor(run).snapshot(now_s=1.0).status
    append(run, *BEGINNING, SAVED, *seen(LINK_BEGAN, LINK_RECOVERED, HOT, SKIPPED, NOTICED))
    train(run, 11, 12)
    snapshot = AttemptSnapshot(Snapshot({1: hung_node()}, lost=("node-8",), unanswered=("node-9",)))
    monkeypatch.setattr(run, "observer", lambda: Observed(snapshot))
    trains = RunMonitor(run).snapshot(now_s=60.0).status
    append(run, *END, RunEnded(**NOW, outcome="failed", message="over"))
    failed = RunMonitor(run).snapshot(now_s=90.0).status
    assert [status.state for status in (began, trains, failed)] == [
        "not started", "running", "failed",
    ]  # fmt: skip
    assert [set(node) for node in trains.document["nodes"][1:]] == [{"node", "state", "health"}] * 2
    assert failed.fault is not None
    schema = json.loads(perdure("schema", "--status"))
    for status in (began, trains, failed):
        assert set(status.document) == set(schema["properties"]) == set(schema["required"])
        assert RunStatus.model_validate(status.document) == status
    assert all(field.get("description") for field in schema["properties"].values())


def test_a_run_that_is_not_known_is_wrong_input():
    assert CliRunner().invoke(app, ["status", "nowhere"]).exit_code != 0


def test_without_a_name_the_runs_are_listed_the_one_that_changed_last_first(run, perdure_home):
    assert "no run was started on this machine" in perdure("status")
    append(run, *BEGINNING, SAVED)
    remember_job(perdure_home, run.job)
    away = parse_job({**job_document(run_id="away"), "storage": {"address": "s3://bucket/x"}})
    remember_job(perdure_home, away)
    job_path(perdure_home, "away").write_text("no job")
    rows = json.loads(perdure("status", "--json"))["runs"]
    assert [(row["run_id"], row["state"], row["step"]) for row in rows] == [
        ("small", "running", 10),
        ("away", None, None),
    ]
    assert "is no job" in rows[1]["problem"]
    text = perdure("status")
    assert "no process supervises it" in text
    assert text.index("small") < text.index("away")


def of_command(step: int | None, age_s: float | None = None) -> AgentStatus:
    """A node of a command, whose one rank writes a heartbeat if it has a step."""
    rank = RankStatus(
        rank=3, local_rank=1, pid=77, step=step, phase="step" if step is not None else None,
        pulse=Pulse(entered=0, left=0, step_age_s=age_s, process_state="S"),
    )  # fmt: skip
    return AgentStatus(
        node="node-1", member=1, state=AgentState.RUNNING, schedule_cnt=1, proc_start_cnt=1,
        placement=1, attempt=1, is_command=True, ranks=(rank,),
        workers=(WorkerStatus(rank=1, local_rank=0, pid=70),),
    )  # fmt: skip


@pytest.fixture
def order(tmp_path, perdure_home, monkeypatch):
    """A command under way; what its node answers is put into the list."""
    document = job_document(tmp_path, run_id="order", worker={"command": ["true"]})
    run = RunHandle(parse_job(document), home=perdure_home)
    append(run, BEGINNING[0], RunCreated(**NOW, job=document), *BEGINNING[2:])
    answers: list[AgentStatus] = []

    class AttemptObserver:
        def observe(self) -> AttemptSnapshot:
            return AttemptSnapshot(Snapshot(dict(enumerate(answers))))

    monkeypatch.setattr(run, "observer", AttemptObserver)
    return run, answers


def test_of_a_command_what_nothing_shows_is_not_known(order):
    run, answers = order
    answers.append(of_command(None))
    snapshot = RunMonitor(run).snapshot(now_s=60.0)
    facts = {name: snapshot.status.document[name] for name in ("step", "committed_step", "ettr")}
    assert facts == dict.fromkeys(facts)
    (node,) = snapshot.status.document["nodes"]
    assert [(one["rank"], one["local_rank"], one["pid"]) for one in node["ranks"]] == [(3, 1, 77)]
    text = shown(plain_status(snapshot, 160))
    assert "step: not known\n" in text
    assert "ettr: not known\n" in text
    assert "node-1: running, ok; rank 3 runs" in text
    assert "running, step not known" in shown(status_panel(snapshot, 160))


def test_of_a_command_its_output_shows_the_step(order):
    run, answers = order
    answers.append(of_command(None).model_copy(update={"shown": ShownStep(step=12, age_s=2.5)}))
    snapshot = RunMonitor(run).snapshot(now_s=60.0)
    assert (snapshot.status.document["step"], snapshot.status.document["last_step_age_s"]) == (
        12,
        2.5,
    )
    assert "rank 3 runs; step 12 by its output" in shown(plain_status(snapshot, 160))


def test_of_a_command_its_heartbeats_show_the_step(order):
    run, answers = order
    answers.append(of_command(1238, 2.5))
    document = RunMonitor(run).snapshot(now_s=60.0).status.document
    assert (document["step"], document["last_step_age_s"]) == (1238, 2.5)
    answers[0] = of_command(1239)
    snapshot = RunMonitor(run).snapshot(now_s=60.0)
    assert snapshot.status.document["step"] == 1239, "restored, and no step completed since"
    assert "rank 3 step after step 1239" in shown(status_panel(snapshot, 160))
