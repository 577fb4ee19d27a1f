"""Cancelling a run by its name, whoever supervises it."""

from __future__ import annotations

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterName,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Cancelling

from tasks.credentials import credentials_of
from training.errors import RunConflict
from training.home import home_folder
from training.job import Job
from training.supervisor.run import Run


def cancel_run(job: Job) -> str:
    """Cancel through the run's supervisor; without one, take the containers down here.

    Returns:
        What was done, for a person.
    """
    run = Run(job, home=home_folder(), credentials=credentials_of(job.storage))
    try:
        run.take()
    except RunConflict:
        with get_client(sync_client=True) as client:
            flow_run = _running(client, job.run_id)
            if flow_run is None:
                raise
            client.set_flow_run_state(flow_run.id, Cancelling(message="perdure cancel"))
        return f"{job.run_id}: its supervisor has been told to cancel"
    run.end("cancelled", "perdure cancel")
    return f"{job.run_id}: no supervisor was alive; its processes are stopped"


def _running(client: SyncPrefectClient, name: str) -> FlowRun | None:
    found = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            name=FlowRunFilterName(any_=[name]),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING])),
        ),
        sort=FlowRunSort.START_TIME_DESC,
        limit=1,
    )
    return found[0] if found else None
