"""How a flow run follows a run that another one supervises."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from uuid import UUID, uuid4

import httpx
import psutil
import pytest
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import Abort
from prefect.states import (
    AwaitingRetry,
    Cancelled,
    Cancelling,
    Completed,
    Crashed,
    Failed,
    Paused,
    Pending,
    Running,
    Scheduled,
    Suspended,
)

from perdure.tasks import following
from perdure.tasks.entry import ALREADY_SUPERVISED
from perdure.tasks.following import ALONE_S, Follower, followed
from perdure.training.journal.ledger import Identity
from perdure.training.journal.records import RunCreated, RunEnded
from perdure.training.supervisor.run_handle import RunHandle
from tests.jobs import small_job

OWN, OTHER = uuid4(), uuid4()


class Server:
    """What a follower asks of a server, for one flow run."""

    def __init__(self) -> None:
        self.state: State = Running()
        self.shown: list[State] = []
        self.is_away = False

    @contextmanager
    def client(self):
        if self.is_away:
            raise httpx.ConnectError("away")
        yield self

    def read_flow_run(self, flow_run_id: UUID) -> FlowRun:
        assert flow_run_id == OWN
        return FlowRun(flow_id=uuid4(), state=self.state)

    def set_flow_run_state(self, flow_run_id: UUID, state: State, *, force: bool) -> None:
        assert (flow_run_id, force) == (OWN, True)
        self.state = state
        self.shown.append(state)


class Time:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def server(monkeypatch) -> Server:
    made = Server()
    monkeypatch.setattr(following, "client_without_retries", made.client)
    return made


def taken(run: RunHandle, flow_run: UUID) -> RunHandle:
    """The run as the parent of this process has taken it."""
    parent = psutil.Process(os.getppid())
    facts = {"pid": parent.pid, "process_started_s": parent.create_time()}
    run.ledger.take(
        Identity.of_this_process(flow_run=str(flow_run)).model_copy(update=facts),
    )
    return run


@pytest.fixture
def supervisor(tmp_path, perdure_home) -> RunHandle:
    """A run that another process supervises."""
    run = taken(RunHandle(small_job(tmp_path), home=perdure_home), OTHER)
    run.ledger.append(RunCreated, job=run.job.model_dump(mode="json"), cwd=str(tmp_path))
    return run


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def follower(supervisor, server, time, perdure_home) -> Follower:
    run = RunHandle(supervisor.job, home=perdure_home)
    return Follower(run, OWN, logging.getLogger("test"), clock=time)


def test_a_follower_shows_once_whom_it_follows_and_writes_nothing_to_the_ledger(
    follower, server, supervisor
):
    before = supervisor.refresh()
    assert follower.look() is None
    assert follower.look() is None
    (shown,) = server.shown
    assert (shown.is_running(), shown.name) == (True, ALREADY_SUPERVISED)
    assert str(OTHER) in shown.message
    assert supervisor.refresh() == before


def test_a_follower_names_the_next_supervisor(follower, server, supervisor, perdure_home):
    follower.look()
    supervisor.ledger.release()
    third = uuid4()
    taken(RunHandle(supervisor.job, home=perdure_home), third)
    follower.look()
    assert [str(third) in shown.message for shown in server.shown] == [False, True]


@pytest.mark.parametrize("end", [Crashed(), Failed(), Completed()])
def test_a_living_follower_takes_back_the_report_of_its_end(follower, server, end):
    follower.look()
    server.state = end
    assert follower.look() is None
    assert server.state.name == ALREADY_SUPERVISED


@pytest.mark.parametrize("asked", [Cancelling(), Cancelled()])
def test_a_cancelled_follower_ends_alone(follower, server, supervisor, asked):
    server.state = asked
    end = follower.look()
    assert end is not None
    assert end.is_cancelled()
    assert "the run goes on without it" in end.message
    assert supervisor.refresh().ended is None


@pytest.mark.parametrize("state", [Paused(), Suspended(), Scheduled(), AwaitingRetry(), Pending()])
def test_a_follower_leaves_to_another_process_of_its_flow_run(follower, server, state):
    server.state = state
    with pytest.raises(Abort):
        follower.look()
    assert server.shown == []


def test_a_follower_takes_over_only_what_nobody_comes_back_for(follower, server, supervisor, time):
    follower.look()
    supervisor.ledger.release()
    time.now_s = ALONE_S
    assert follower.look() is None
    assert not follower.has_taken_over
    time.now_s += 1.0
    assert follower.look() is None
    assert follower.has_taken_over
    assert server.state.name == "Running"


def test_what_was_not_seen_during_an_outage_is_no_reason_to_take_over(
    follower, server, supervisor, time, caplog
):
    follower.look()
    supervisor.ledger.release()
    time.now_s, server.is_away = 2 * ALONE_S, True
    for _ in range(3):
        assert follower.look() is None
    assert not follower.has_taken_over
    assert caplog.text.count("cannot be followed now") == 1
    server.is_away = False
    follower.look()
    assert not follower.has_taken_over, "the supervisor may renew its lease in a moment"
    time.now_s += ALONE_S + 1.0
    follower.look()
    assert follower.has_taken_over


@pytest.mark.parametrize("outcome", ["completed", "failed", "cancelled"])
def test_a_follower_ends_as_its_run_has_ended(follower, supervisor, outcome):
    supervisor.ledger.append(RunEnded, outcome=outcome, message="why", target_step=9)
    follower._run.job = supervisor.job.model_copy(update={"steps": 0})  # its target is reached
    end = follower.look()
    assert end is not None
    assert end.type.value == outcome.upper()
    assert end.message.startswith("why; 0 attempts")
    assert str(OTHER) in end.message


def test_the_end_of_a_run_is_not_that_of_one_who_wants_more_steps(follower, supervisor):
    supervisor.ledger.append(RunEnded, outcome="completed", message="done", target_step=9)
    assert follower.look() is None


def test_an_end_before_the_present_supervisor_is_none(follower, supervisor, perdure_home):
    supervisor.ledger.append(RunEnded, outcome="completed", message="done", target_step=9)
    supervisor.ledger.release()
    taken(RunHandle(supervisor.job, home=perdure_home), OTHER)
    follower._run.job = supervisor.job.model_copy(update={"steps": 0})
    assert follower.look() is None


FOLLOWS: State = Running(name=ALREADY_SUPERVISED)


@pytest.mark.parametrize(
    ("states", "goes_on"),
    [
        ([], False),
        ([Scheduled(), Pending()], False),
        ([Pending(), Running(), FOLLOWS, Crashed(), AwaitingRetry(), Pending()], True),
        ([Pending(), Running(), FOLLOWS, Suspended(), Scheduled(), Pending()], True),
        ([Pending(), FOLLOWS, Crashed(), AwaitingRetry(), Pending(), Crashed(), Pending()], True),
        ([Pending(), Running(), FOLLOWS, Running(), Crashed(), AwaitingRetry(), Pending()], False),
        ([Pending(), Running(), FOLLOWS, Cancelled(), AwaitingRetry(), Pending()], False),
        ([Pending(), Running(), FOLLOWS, Failed(), AwaitingRetry(), Pending()], False),
        ([Pending(), Running(), Crashed(), AwaitingRetry(), Pending()], False),
    ],
)
def test_a_follower_that_is_started_again_goes_on_following_unless_it_had_ended(states, goes_on):
    assert followed(states) is goes_on
