"""The flow process as supervisor: how it takes a run, and hands it over."""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import Abort
from prefect.states import Cancelled, Completed, Crashed, Failed, Paused, Suspended

from perdure.tasks import supervision as module
from perdure.tasks.supervision import RequestPoller, Supervision
from perdure.training.errors import AlreadySupervised, RunConflict
from perdure.training.journal.waits import Wait, WaitKind
from perdure.training.preflight.job import CheckedJob
from perdure.training.wire.requests import read_control, write_control
from tests.jobs import small_job


@pytest.fixture
def supervision(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    checked = CheckedJob(small_job(tmp_path, run_id="small"))
    return Supervision(checked, logging.getLogger("test"))


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
    waits: list[Wait | None] = []
    monkeypatch.setattr(resumed.run, "on_wait", waits.append)
    resumed._take()
    assert [wait.kind if wait else None for wait in waits] == [WaitKind.LOCK] * 3 + [None]
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
    assert "its ranks wait for 'perdure resume small'" in caplog.text


def taken_by(supervision, monkeypatch, flow_run: str | None) -> None:
    """Another supervisor lives, and is a process of this flow run."""

    def refused():
        raise AlreadySupervised("one supervisor at a time", flow_run=flow_run)

    monkeypatch.setattr(supervision.run, "take", refused)


def test_a_second_process_of_a_flow_run_leaves_its_state_to_the_one_that_supervises(
    supervision, monkeypatch, caplog
):
    own = uuid4()
    monkeypatch.setattr(supervision, "flow_run_id", own)
    monkeypatch.setattr(module, "_is_resumed", lambda _id: False)
    taken_by(supervision, monkeypatch, str(own))
    given_back = []
    monkeypatch.setattr(module, "client_without_retries", nullcontext)
    monkeypatch.setattr(module, "give_back_end", lambda _client, flow: given_back.append(flow))
    with pytest.raises(Abort):
        supervision._take()
    assert given_back == [own]
    assert "an earlier process of this flow run supervises the run" in caplog.text


@pytest.mark.parametrize("other", [None, str(uuid4())], ids=["none", "another"])
def test_the_supervisor_of_another_flow_run_is_a_conflict(supervision, monkeypatch, other):
    monkeypatch.setattr(supervision, "flow_run_id", uuid4())
    monkeypatch.setattr(module, "_is_resumed", lambda _id: False)
    taken_by(supervision, monkeypatch, other)
    with pytest.raises(AlreadySupervised):
        supervision._take()


def test_a_superseded_supervisor_leaves_the_lease_to_the_next_one(supervision):
    supervision._take()
    supervision._lease.superseded = AlreadySupervised("by another", flow_run=None)
    supervision._interrupted(Abort)
    assert len(list(supervision.run.store.list("runs/small/supervisor.json"))) == 1


class Server:
    """What the poller asks of a server, for one flow run."""

    def __init__(self, state: State) -> None:
        self.state = state

    def read_flow_run(self, _id) -> FlowRun:
        return FlowRun(flow_id=uuid4(), state=self.state)

    def set_flow_run_state(self, _id, state: State, *, force: bool) -> None:
        assert force
        self.state = state


def look(poller, server) -> None:
    poller._look(server)


@pytest.mark.parametrize("end", [Crashed(), Failed(), Completed()])
def test_a_living_supervisor_takes_back_the_report_of_its_end(supervision, end):
    poller = RequestPoller(uuid4(), supervision.run)
    server = Server(end)
    look(poller, server)
    assert server.state.is_running()
    assert server.state.message == "the supervisor lives"


def test_a_supervisor_that_has_ended_leaves_its_own_last_state(supervision):
    poller = RequestPoller(uuid4(), supervision.run)
    poller.close()
    server = Server(Completed())
    look(poller, server)
    assert server.state.is_completed()


def test_a_cancelled_flow_run_is_not_put_right(supervision):
    poller = RequestPoller(uuid4(), supervision.run)
    server = Server(Cancelled())
    look(poller, server)
    assert server.state.is_cancelled()
    assert poller.cancel_wanted


@pytest.mark.parametrize("paused", [Paused(), Suspended()])
def test_a_paused_run_that_is_said_to_have_crashed_stays_paused(supervision, paused):
    poller = RequestPoller(uuid4(), supervision.run)
    server = Server(paused)
    look(poller, server)
    server.state = Crashed()
    look(poller, server)
    assert server.state.is_paused()
    assert read_control(supervision.run.store, "small").pause


def test_what_a_poll_has_begun_is_over_before_the_flow_run_has_its_last_state(
    supervision, monkeypatch
):
    began, answered, done = threading.Event(), threading.Event(), []

    def slow() -> None:
        began.set()
        answered.wait(240)
        done.append("the supervisor lives")

    monkeypatch.setattr(module, "CONTROL_PERIOD_S", 0.01)
    poller = RequestPoller(uuid4(), supervision.run)
    monkeypatch.setattr(poller, "tick", slow)
    monkeypatch.setattr(supervision, "_requests", poller)
    supervision._lease.start()
    poller.start()
    assert began.wait(240)
    threading.Timer(0.2, answered.set).start()
    supervision._end_threads()
    assert done == ["the supervisor lives"]
    assert not poller.is_alive()
