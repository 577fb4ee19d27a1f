"""Pausing with Prefect: a flow run's state and the request to pause its run follow each other.

The side that changed since the last poll wins. Facts about Prefect 3.8.8: a state
`Suspended` (the pause button of a deployed run) has the engine end this process at the end of
the attempt, and Resume has a worker start another one; a state `Paused` does neither, Resume just
makes it Running. The dialog of the button sets a limit of 300 s, after which the server fails the
flow run.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.states import Paused, Running

from perdure.storage.objects import ObjectStore
from perdure.training.wire.requests import clear_requests, is_pause_wanted, write_control


class ServedFlowRun:
    """The flow run that supervises, as the server has it. Any call may fail.

    Args:
        client: client of the Prefect server.
        flow_run_id: id on that server.
    """

    def __init__(self, client: SyncPrefectClient, flow_run_id: UUID) -> None:
        self._client = client
        self._flow_run_id = flow_run_id

    def show_paused(self, message: str) -> None:
        """Put it into a state that Resume turns into Running, with this process going on."""
        self._client.set_flow_run_state(self._flow_run_id, Paused(message=message), force=True)

    def lift_limit(self, state: State[Any]) -> None:
        """Set the same state once more, without a limit."""
        unlimited: State[Any] = Paused(
            name=state.name,
            message=state.message,
            reschedule=state.state_details.pause_reschedule,
        )
        self._client.set_flow_run_state(self._flow_run_id, unlimited, force=True)

    def show_running(self, message: str) -> None:
        """Put it into the state that it has while this process supervises."""
        self._client.set_flow_run_state(self._flow_run_id, Running(message=message), force=True)

    def resume(self) -> None:
        """Do what the Resume button does."""
        self._client.resume_flow_run(self._flow_run_id)


class PauseLink:
    """Keeps one flow run and one run in step.

    Attributes:
        is_handed_over: whether another process supervises from now on; this one is to leave.
    """

    def __init__(self, store: ObjectStore, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._paused: State[Any] | None = None  # the state at the last look, if it was a pause
        self._is_resuming = False  # this process has it resume
        self.is_handed_over = False

    @property
    def is_paused(self) -> bool:
        """Whether the flow run was in a pause at the last look."""
        return self._paused is not None

    def look(self, state: State[Any], flow_run: ServedFlowRun, *, paused_at: int | None) -> None:
        """Compare both sides, and have the other one follow.

        Args:
            state: current state of the flow run.
            flow_run: flow run whose state may be set.
            paused_at: step at which all ranks are paused, None while they are not.

        Raises:
            Exception: server or store did not answer; the next look tries again.
        """
        if state.is_paused():
            self._see_paused(state, flow_run)
        elif self._paused is not None:
            self._see_no_longer_paused(state, self._paused)
        elif paused_at is not None and state.is_running() and self._is_wanted():
            flow_run.show_paused(f"paused at step {paused_at}")
            self._paused = Paused()

    def _see_paused(self, state: State[Any], flow_run: ServedFlowRun) -> None:
        if self._paused is None:
            write_control(self._store, self._run_id, pause=True)
        self._paused = state
        self._is_resuming = not self._is_wanted()
        if self._is_resuming:
            flow_run.resume()
            return
        if state.state_details.pause_timeout is not None:
            flow_run.lift_limit(state)

    def _see_no_longer_paused(self, state: State[Any], pause: State[Any]) -> None:
        if not (state.is_running() or state.is_scheduled() or state.is_pending()):
            return  # cancelled, or failed by the server: the ranks do not go on because of that
        if not self._is_resuming:  # or a next pause may be requested already
            clear_requests(self._store, self._run_id)
        self._paused, self._is_resuming = None, False
        # Another process may be Running under our name already when we look.
        rescheduled = pause.state_details.pause_reschedule
        self.is_handed_over = rescheduled or not state.is_running()

    def _is_wanted(self) -> bool:
        return is_pause_wanted(self._store, self._run_id)


def was_resumed(states: list[State[Any]]) -> bool:
    """Whether a flow run that has just begun to run did so because a user resumed it.

    Args:
        states: states of the flow run, oldest first.
    """
    earlier_states = [state for state in states if not (state.is_running() or state.is_pending())]
    return bool(earlier_states) and earlier_states[-1].name == "Resuming"
