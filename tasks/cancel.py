"""Cancelling a run by its name, whoever supervises it."""

from __future__ import annotations

from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterName,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Cancelled, Cancelling

from tasks.credentials import credentials_of
from training.errors import RunConflict
from training.home import home_folder
from training.job import Job
from training.supervisor.run import Run

UNFINISHED = (
    StateType.SCHEDULED,
    StateType.PENDING,
    StateType.RUNNING,
    StateType.PAUSED,
    StateType.CRASHED,
)


def cancel_run(job: Job) -> str:
    """Cancel through the run's supervisor; without one, take the containers down here.

    Returns:
        What was done, for a person.

    Raises:
        RunConflict: a supervisor lives, and the Prefect server knows none of its flow runs.
    """
    run = Run(job, home=home_folder(), credentials=credentials_of(job.storage))
    ended = run.refresh().ended
    if ended is not None:
        return f"{job.run_id}: has ended already: {ended.outcome}"
    try:
        run.take()
    except RunConflict:
        if not _tell_supervisors(job.run_id, Cancelling(message="perdure cancel")):
            raise
        return f"{job.run_id}: its supervisor has been told to cancel"
    run.end("cancelled", "perdure cancel")
    # Or an automation would bring the crashed flow run back.
    _tell_supervisors(job.run_id, Cancelled(message="perdure cancel"))
    return f"{job.run_id}: no supervisor was alive; its processes are stopped"


def _tell_supervisors(name: str, state: State[Any]) -> int:
    """Put every unfinished pretrain flow run of that name into a state. Returns their number."""
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=["pretrain"])),
            flow_run_filter=FlowRunFilter(
                name=FlowRunFilterName(any_=[name]),
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(UNFINISHED))),
            ),
            sort=FlowRunSort.START_TIME_DESC,
            limit=20,
        )
        for flow_run in found:
            client.set_flow_run_state(flow_run.id, state, force=True)
    return len(found)
