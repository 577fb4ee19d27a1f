"""A flow run's state and the request to pause its run follow each other."""

from __future__ import annotations

import pytest
from prefect.client.schemas.objects import State
from prefect.states import (
    AwaitingRetry,
    Cancelling,
    Crashed,
    Failed,
    Paused,
    Pending,
    Running,
    Scheduled,
    Suspended,
)

from perdure.storage.errors import TimedOut
from perdure.storage.local import LocalStore
from perdure.tasks.pausing import PauseLink, ServedFlowRun, was_resumed
from perdure.training.wire.requests import read_control, write_control


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


class FlowRun(ServedFlowRun):
    """A flow run on a server that may be out of reach."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.is_down = False

    def _set(self, state: State) -> None:
        if self.is_down:
            raise ConnectionError("the server is down")
        self.state = state

    def show_paused(self, message: str) -> None:
        self._set(Paused(message=message))

    def lift_limit(self, state: State) -> None:
        self._set(Paused(name=state.name, reschedule=state.state_details.pause_reschedule))

    def resume(self) -> None:
        reschedules = self.state.state_details.pause_reschedule
        self._set(Scheduled(name="Resuming") if reschedules else Running())


class Linked:
    """A run and its flow run, polled."""

    def __init__(self, store) -> None:
        self.store, self.flow_run = store, FlowRun(Running())
        self.link = PauseLink(store, "run")
        self.paused_at: int | None = None

    def look(self, state: State | None = None) -> None:
        self.flow_run.state = state or self.flow_run.state
        self.link.look(self.flow_run.state, self.flow_run, paused_at=self.paused_at)

    @property
    def is_requested(self) -> bool:
        return read_control(self.store, "run").pause


@pytest.fixture
def linked(store):
    return Linked(store)


def test_the_pause_button_requests_a_pause_and_resume_withdraws_it(linked):
    linked.look()
    assert not linked.is_requested
    linked.look(Suspended())
    assert linked.is_requested
    linked.look()
    assert linked.is_requested
    linked.look(Scheduled(name="Resuming"))
    assert not linked.is_requested


def test_the_limit_of_the_pause_dialog_does_not_fail_a_run_of_months(linked):
    linked.look(Suspended(timeout_seconds=300))
    details = linked.flow_run.state.state_details
    assert (details.pause_timeout, details.pause_reschedule) == (None, True)
    assert linked.flow_run.state.name == "Suspended"


def test_a_limit_that_cannot_be_lifted_now_is_lifted_later(linked):
    linked.flow_run.is_down = True
    with pytest.raises(ConnectionError):
        linked.look(Suspended(timeout_seconds=300))
    linked.flow_run.is_down = False
    linked.look()
    assert linked.flow_run.state.state_details.pause_timeout is None
    assert linked.is_requested


@pytest.mark.parametrize("state", [Scheduled(name="Resuming"), Pending(), Running()])
def test_a_suspended_flow_run_that_is_resumed_is_another_processs_from_then_on(linked, state):
    linked.look(Suspended())
    assert not linked.link.is_handed_over
    linked.look(state)
    assert linked.link.is_handed_over
    assert not linked.is_requested


def test_a_flow_run_that_is_paused_in_place_stays_with_its_process(linked):
    linked.look(Paused())
    assert linked.is_requested
    linked.look(Running())
    assert not linked.is_requested
    assert not linked.link.is_handed_over


def test_a_run_paused_by_command_is_shown_as_paused_once_its_ranks_are_paused(linked, store):
    write_control(store, "run", pause=True)
    linked.look()
    assert linked.flow_run.state.is_running()
    linked.paused_at = 20
    linked.look()
    assert linked.flow_run.state.is_paused()
    assert linked.flow_run.state.message == "paused at step 20"
    assert not linked.flow_run.state.state_details.pause_reschedule, "this process goes on"


def test_the_resume_button_ends_a_pause_by_command(linked, store):
    write_control(store, "run", pause=True)
    linked.paused_at = 20
    linked.look()
    linked.look(Running())
    assert not linked.is_requested
    linked.look()  # the ranks have not gone on yet
    assert linked.flow_run.state.is_running()


@pytest.mark.parametrize(("paused", "after"), [(Paused(), "Running"), (Suspended(), "Resuming")])
def test_the_resume_command_ends_a_pause_by_button(linked, store, paused, after):
    linked.look(paused)
    write_control(store, "run", pause=False)
    linked.look()
    assert linked.flow_run.state.name == after
    linked.look()
    assert not linked.is_requested
    assert linked.link.is_handed_over == (after == "Resuming")


def test_a_request_right_after_a_resume_command_is_not_taken_for_the_former_one(linked, store):
    linked.look(Paused())
    write_control(store, "run", pause=False)
    linked.look()
    write_control(store, "run", pause=True)
    linked.look()
    assert linked.is_requested


def test_a_flow_run_that_does_not_resume_is_resumed_again(linked, store):
    linked.look(Suspended())
    write_control(store, "run", pause=False)
    linked.flow_run.is_down = True
    with pytest.raises(ConnectionError):
        linked.look()
    linked.flow_run.is_down = False
    linked.look()
    assert linked.flow_run.state.name == "Resuming"
    linked.look()
    assert not linked.is_requested
    assert linked.link.is_handed_over


@pytest.mark.parametrize("state", [Cancelling(), Failed(), Crashed()])
def test_ranks_do_not_go_on_because_the_flow_run_is_over(linked, state):
    linked.look(Suspended())
    linked.look(state)
    assert linked.is_requested
    assert not linked.link.is_handed_over


def test_a_request_that_the_store_did_not_take_is_written_again(linked, monkeypatch):
    put = LocalStore.put

    def refuse(*_arguments, **_options):
        raise TimedOut("no answer")

    monkeypatch.setattr(LocalStore, "put", refuse)
    with pytest.raises(TimedOut):
        linked.look(Suspended())
    monkeypatch.setattr(LocalStore, "put", put)
    linked.look()
    assert linked.is_requested


def test_a_flow_run_of_a_run_that_was_not_paused_is_left_alone(linked):
    linked.paused_at = 20  # was resumed, and its ranks do not go on yet
    linked.look()
    assert linked.flow_run.state.name == "Running"


def test_only_a_flow_run_that_was_resumed_withdraws_the_request_at_its_start():
    before: list[State] = [Scheduled(), Pending(), Running()]
    resumed = [*before, Suspended(), Scheduled(name="Resuming"), Pending(), Running()]
    assert was_resumed(resumed)
    assert not was_resumed(before)
    assert not was_resumed([])
    assert not was_resumed([*resumed, Crashed(), AwaitingRetry(), Pending(), Running()])
