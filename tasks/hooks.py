"""Ending a run from outside its flow: after a cancellation or a crash, and by its name.

`on_cancellation`, and `on_crashed` after a kill, run in a new process of the worker: they
rely on ledger, engine and the states of the flow run alone, and may run a second time.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import httpx
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import PrefectException
from prefect.logging.loggers import flow_run_logger
from prefect.states import Cancelled, Cancelling

from perdure.storage.errors import StorageError, TransientError
from perdure.tasks.credentials import credentials_of
from perdure.tasks.drill import homes_of
from perdure.tasks.entry import job_of
from perdure.tasks.following import is_follower
from perdure.tasks.orphaned_task_runs import close_orphaned_task_runs
from perdure.tasks.prefect_client import without_retries
from perdure.tasks.reporting import Log
from perdure.tasks.runs import flow_runs_of, run_of, supervisor_of
from perdure.tasks.story import report_end
from perdure.training.config.job import Job
from perdure.training.errors import RunConflict
from perdure.training.files import home_folder
from perdure.training.journal.history import RunHistory
from perdure.training.supervisor.cancelling import cancel_on_this_machine
from perdure.training.supervisor.job_registry import known_job, known_runs
from perdure.training.supervisor.run_handle import RunHandle
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.runbook import cancel

UNFINISHED = (
    StateType.SCHEDULED,
    StateType.PENDING,
    StateType.RUNNING,
    StateType.PAUSED,
    StateType.CRASHED,  # final for Prefect, not for an automation
)


def take_down(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:  # noqa: ARG001
    """After a cancellation: no process of the run is left, and ledger and UI have the reason."""
    job = job_of(flow_run)
    if job is None:
        return
    logger = flow_run_logger(flow_run, flow)
    if is_follower(flow_run.id):
        logger.info("it only followed: run %s is not taken down", job.run_id)
        return
    take_down_run(supervisor_of(job), flow_run.id, logger)


def take_drills_down(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:  # noqa: ARG001
    """After the end of a flow run of drills, whatever it was: no process of theirs is left."""
    logger = flow_run_logger(flow_run, flow)
    for home in homes_of(str(flow_run.id)):
        for run_id in known_runs(home):
            job = known_job(home, run_id)
            _end(RunSupervisor(job, home=home, credentials=credentials_of(job.storage)), logger)


def leave_adoptable(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:  # noqa: ARG001
    """After a crash: log and show that a living attempt waits to be adopted."""
    logger = flow_run_logger(flow_run, flow)
    job = job_of(flow_run)
    if job is None:
        logger.warning("crashed without a job")
        return
    if is_follower(flow_run.id):
        logger.warning("it only followed: run %s has lost no supervisor", job.run_id)
        return
    run = run_of(job)
    history = run.ledger.read()
    if history.job is None or history.ended is not None:
        return
    if not run.ledger.is_supervised():
        _close_orphaned_task_runs(run, flow_run.id, logger)
    if history.open_attempt is not None:
        logger.warning(
            "the supervisor is gone; attempt %d.%d goes on and waits to be adopted",
            *history.open_attempt.key,
        )
        return
    logger.warning("the supervisor is gone between two attempts; start the run again")


def take_down_run(run: RunSupervisor, flow_run_id: UUID, logger: Log) -> bool:
    """Stop every process of a run that nobody supervises; ledger and UI have the end.

    Returns:
        Whether the run is cancelled: not where a supervisor has it, or where it ended otherwise.
    """
    done = _end(run, logger)
    if run.refresh().ended is not None:
        try:
            report_end(run, flow_run_id, logger)
        except StorageError as error:
            logger.warning("the end of the run is not shown: %s", error)
        _close_orphaned_task_runs(run, flow_run_id, logger)
    return done


def _close_orphaned_task_runs(run: RunHandle, flow_run_id: UUID, logger: Log) -> None:
    """End the task runs of the supervisor that is gone, as far as the server lets us."""
    try:
        with get_client(sync_client=True) as client:
            now = datetime.now(UTC)
            history = run.refresh()
            close_orphaned_task_runs(
                client, history, flow_run_id=flow_run_id, began=now, adopted_by=None
            )
    except (httpx.HTTPError, PrefectException) as error:
        logger.warning("task runs of the supervisor that is gone stay open: %s", error)


def _end(run: RunSupervisor, logger: Log) -> bool:
    history = run.ledger.read()
    if history.job is None or history.ended is not None:
        return history.ended is not None and history.ended.outcome == "cancelled"
    try:
        run.take()
        run.end("cancelled", "cancelled")
    except RunConflict as error:
        logger.warning("not taken down: %s", error)
        return False
    logger.info("run %s is taken down", run.job.run_id)
    return True


def cancel_run(job: Job) -> str:
    """Cancel through the run's supervisor; without one, take the containers down here.

    Returns:
        What was done, for the user.
    """
    try:
        RunHandle(
            job, home=home_folder(), credentials=credentials_of(job.storage), is_brief=True
        ).refresh()
    except TransientError as error:
        return cancel_on_this_machine(home_folder(), job.run_id, error)
    run = supervisor_of(job)
    asked: State[Any] = Cancelling(message="perdure cancel")
    done = cancel(run, by_server=lambda history: bool(_set_flow_runs(history, asked)))
    if run.history.ended is not None:
        # Or an automation would bring the crashed flow run back.
        _set_flow_runs(run.history, Cancelled(message="perdure cancel"))
    return done


def _set_flow_runs(history: RunHistory, state: State[Any]) -> int:
    """Put every unfinished flow run of a run into a state.

    Returns:
        Their number; 0 where the server does not answer, which is a warning.
    """
    flow_runs = flow_runs_of(history)
    if not flow_runs:
        return 0
    try:
        return _set_unfinished(flow_runs, state)
    except (httpx.HTTPError, PrefectException, OSError) as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        logging.getLogger("perdure").warning("no flow run of it is %s: %s", state.name, why)
        return 0


def _set_unfinished(flow_runs: list[UUID], state: State[Any]) -> int:
    # Without retries: for a server that is gone, the caller would wait for half an hour.
    with without_retries(), get_client(sync_client=True) as client:
        unfinished = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(
                id=FlowRunFilterId(any_=flow_runs),
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(UNFINISHED))),
            ),
            sort=FlowRunSort.START_TIME_DESC,
            limit=20,
        )
        for flow_run in unfinished:
            client.set_flow_run_state(flow_run.id, state, force=True)
    return len(unfinished)
