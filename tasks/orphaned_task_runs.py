"""Task runs and flow runs that a dead supervisor left open; Prefect never ends them (3.8.8).

What became of each task run is in the ledger. An attempt that goes on has not failed: its task run
ends as `SupervisorLost` or, once another supervisor watches the attempt, as `Adopted`. A flow run
that was started without a worker stays Running when its process is killed; once another flow run
supervises the run, it ends as `Adopted`, too.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import LogCreate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateName,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import State, StateType, TaskRun
from prefect.client.schemas.sorting import TaskRunSort
from prefect.exceptions import ObjectNotFound

from perdure.tasks.entry import ALREADY_SUPERVISED
from perdure.tasks.runs import flow_runs_of
from perdure.tasks.states import BY_PLATFORM, UNDECIDED
from perdure.training.journal.attempt_view import AttemptView
from perdure.training.journal.history import RunHistory
from perdure.training.recovery.rungs import RESTARTS_IN_PLACE, RUNGS
from perdure.training.supervisor.exit_zero import good_end_text

LOST = "SupervisorLost"
ADOPTED = "Adopted"
WAITS = "waits to be adopted"
STOPPED = "StoppedOnRequest"
# As Prefect names what a signal ended: the task, and what it had done in a transaction (3.8.8).
CRASHED = "Crashed"
ROLLED_BACK = "RolledBack"
_OPEN = (StateType.PENDING, StateType.RUNNING, StateType.SCHEDULED, StateType.PAUSED)
_PAGE = 200
_ATTEMPT = re.compile(r"attempt (\d+)\.(\d+)\b")
_PLACEMENT = re.compile(r"placement (\d+) on ")


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """End of a task run, as far as the ledger knows."""

    type: StateType
    name: str
    message: str


def end_of_task(name: str, history: RunHistory, *, adopted_by: str | None) -> TaskEnd:
    """Decide on the state of a task run whose supervisor died.

    Args:
        name: name of the task run.
        history: ledger of the run, as read.
        adopted_by: the new supervisor, as text; None when there is none.
    """
    view = _attempt_of(name, history)
    if view is None:
        successor = f"; {adopted_by} goes on from the ledger" if adopted_by is not None else ""
        return TaskEnd(StateType.CRASHED, LOST, f"its supervisor is gone{successor}")
    if view.ended is None or _goes_on(name, view, history):
        return _living(view, adopted_by)
    if _is_cancelled_before_restart(name, view, history):
        return TaskEnd(StateType.COMPLETED, STOPPED, "stopped on request before the restart")
    return _ended(view)


def _attempt_of(name: str, history: RunHistory) -> AttemptView | None:
    """The attempt that a task watched; of a placement, its last one."""
    attempt, placement = _ATTEMPT.match(name), _PLACEMENT.match(name)
    if attempt is not None:
        key = (int(attempt[1]), int(attempt[2]))
        return next((view for view in history.attempts if view.key == key), None)
    if placement is not None:
        return next(reversed(history.attempts_in(int(placement[1]))), None)
    return None


def _goes_on(name: str, view: AttemptView, history: RunHistory) -> bool:
    """Whether a placement will have another attempt."""
    return history.ended is None and _restarts(name, view)


def _is_cancelled_before_restart(name: str, view: AttemptView, history: RunHistory) -> bool:
    """Whether a placement would have had another attempt, had the run not been cancelled."""
    ended = history.ended
    return ended is not None and ended.outcome == "cancelled" and _restarts(name, view)


def _restarts(name: str, view: AttemptView) -> bool:
    """Whether a placement was to have another attempt."""
    restarts = view.decision is not None and view.decision.rung in RESTARTS_IN_PLACE
    return _PLACEMENT.match(name) is not None and restarts


def _living(view: AttemptView, adopted_by: str | None) -> TaskEnd:
    attempt = "attempt {}.{}".format(*view.key)
    if adopted_by is None:
        text = f"its supervisor is gone; {attempt} goes on and {WAITS}"
        return TaskEnd(StateType.CRASHED, LOST, text)
    text = f"its supervisor is gone; {attempt} went on and was adopted by {adopted_by}"
    return TaskEnd(StateType.CANCELLED, ADOPTED, text)  # Crashed is the color of a loss


def _ended(view: AttemptView) -> TaskEnd:
    """The end that the supervisor could no longer report."""
    assert view.ended is not None  # noqa: S101 the caller looked
    ended, fault, step = view.ended, view.ended.fault, view.ended.to_step
    if ended.outcome == "completed":
        done = f"trained to step {step}" if step is not None else None
        return TaskEnd(StateType.COMPLETED, "Completed", good_end_text(done, ended.notes))
    if ended.outcome == "restarted":
        return TaskEnd(StateType.COMPLETED, "Restarted", f"restart.every_s, at step {step}")
    if ended.outcome == "ended from outside":
        where = f" at step {step}" if step is not None else ""
        return TaskEnd(StateType.COMPLETED, BY_PLATFORM, f"ended by the platform{where}")
    if fault is None:
        return TaskEnd(StateType.COMPLETED, STOPPED, "stopped on request")
    at = f" at step {step}" if step is not None else ""
    summary = f"{fault.fault_class} on {fault.where}{at}"
    if view.decision is None:
        return TaskEnd(StateType.FAILED, "Failed", f"{summary}: its supervisor is gone")
    rung = view.decision.rung
    return TaskEnd(StateType.FAILED, RUNGS[rung].state_name, f"{summary}: {rung}")


def close_orphaned_task_runs(
    client: SyncPrefectClient,
    history: RunHistory,
    *,
    flow_run_id: UUID | None,
    began: datetime,
    adopted_by: str | None,
) -> int:
    """End the task runs that supervisors before have left open, in any flow run of the run.

    Args:
        client: client of the Prefect server.
        history: ledger of the run, which names the flow runs.
        flow_run_id: the calling flow run, which may have left task runs open in an earlier process.
        began: start of this supervisor; later task runs are its own.
        adopted_by: the new supervisor, as text; None when there is none.

    Returns:
        How many were ended.

    Raises:
        Exception: the server does not answer.
    """
    flow_runs = flow_runs_of(history, flow_run_id)
    task_runs = list(_orphaned_task_runs(client, flow_runs, began)) if flow_runs else []
    for task_run in task_runs:
        end = end_of_task(task_run.name, history, adopted_by=adopted_by)
        state: State[None] = State(type=end.type, name=end.name, message=end.message)
        client.set_task_run_state(task_run.id, state, force=True)
        client.create_logs([_line(task_run, end)])  # its page shows no message of a state
    return len(task_runs)


def _line(task_run: TaskRun, end: TaskEnd) -> LogCreate:
    return LogCreate(
        name="perdure",
        level=logging.WARNING,
        message=f"{task_run.name}: {end.message}",
        timestamp=datetime.now(UTC),
        flow_run_id=task_run.flow_run_id,
        task_run_id=task_run.id,
    )


def close_flow_runs(client: SyncPrefectClient, history: RunHistory, *, successor: UUID) -> int:
    """End the flow runs that supervised a run before this one, as far as they are still open.

    Args:
        client: client of the Prefect server.
        history: ledger of the run, which names the flow runs.
        successor: the flow run that supervises the run now.

    Returns:
        How many were ended.

    Raises:
        Exception: the server does not answer.
    """
    num_ended = 0
    for flow_run_id in flow_runs_of(history):
        if flow_run_id == successor:
            continue
        try:
            state = client.read_flow_run(flow_run_id).state
        except ObjectNotFound:
            continue  # deleted
        if state is None or state.is_final() or state.name == ALREADY_SUPERVISED:
            continue  # over, or it lives and follows the run by now
        # Neither Crashed, which would have an automation start it again, nor a failure: it goes on.
        text = f"its process is gone; flow run {successor} supervises the run since then"
        ended: State[None] = State(type=StateType.CANCELLED, name=ADOPTED, message=text)
        client.set_flow_run_state(flow_run_id, ended, force=True)
        num_ended += 1
    return num_ended


def _orphaned_task_runs(
    client: SyncPrefectClient, flow_runs: list[UUID], supervisor_began: datetime
) -> Iterator[TaskRun]:
    """List the task runs that are not final, or whose state says nothing of what they watched."""
    types = TaskRunFilterStateType(any_=[*_OPEN, StateType.CRASHED])
    names = TaskRunFilterStateName(any_=[ROLLED_BACK, UNDECIDED])
    for wanted in (TaskRunFilterState(type=types), TaskRunFilterState(name=names)):
        task_runs = _task_runs(client, flow_runs, wanted)
        yield from (task_run for task_run in task_runs if _is_left(task_run, supervisor_began))


def _task_runs(
    client: SyncPrefectClient, flow_runs: list[UUID], wanted: TaskRunFilterState
) -> Iterator[TaskRun]:
    offset = 0
    while True:
        page = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=flow_runs)),
            task_run_filter=TaskRunFilter(state=wanted),
            sort=TaskRunSort.EXPECTED_START_TIME_ASC,
            limit=_PAGE,
            offset=offset,
        )
        yield from page
        if len(page) < _PAGE:
            return
        offset += _PAGE


def _is_left(task_run: TaskRun, supervisor_began: datetime) -> bool:
    # Times of the process that made it, not of the server.
    began = task_run.start_time or task_run.expected_start_time
    if began is None or began >= supervisor_began:
        return False
    state = task_run.state
    if state is None or not state.is_final():
        return True
    if state.name == UNDECIDED:
        return True
    if state.name == LOST:
        return (state.message or "").endswith(WAITS)
    # By the signal that ended the supervisor; that says nothing of what the task watched.
    watches = _ATTEMPT.match(task_run.name) or _PLACEMENT.match(task_run.name)
    return state.name in (CRASHED, ROLLED_BACK) and watches is not None
