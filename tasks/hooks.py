"""Flow hooks: what is left to do when the flow run is over but its process may be gone.

`on_cancellation`, and `on_crashed` after a kill, run in a new process of the worker: they
rely on the ledger and the engine alone and may run a second time.
"""

from __future__ import annotations

from typing import Any

from prefect import Flow
from prefect.client.schemas.objects import FlowRun, State
from prefect.logging.loggers import flow_run_logger

from tasks.credentials import credentials_of
from tasks.drilling import homes_of
from tasks.reporting import Log
from training.errors import RunConflict
from training.home import home_folder
from training.job import Job
from training.supervisor.job_registry import known_job, known_runs
from training.supervisor.run import Run


def take_down(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:  # noqa: ARG001
    """After a cancellation: no process of the run is left, and the ledger says why."""
    _end(_run_of(flow_run), flow_run_logger(flow_run, flow))


def take_drills_down(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:  # noqa: ARG001
    """After the end of a flow run of drills, whatever it was: no process of theirs is left."""
    logger = flow_run_logger(flow_run, flow)
    for home in homes_of(str(flow_run.id)):
        for run_id in known_runs(home):
            job = known_job(home, run_id)
            _end(Run(job, home=home, credentials=credentials_of(job.storage)), logger)


def leave_adoptable(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:  # noqa: ARG001
    """After a crash: say in the flow run's log that a living attempt waits to be adopted."""
    logger = flow_run_logger(flow_run, flow)
    run = _run_of(flow_run)
    history = run.ledger.read()
    if history.job is None or history.ended is not None:
        return
    if history.open_attempt is not None:
        logger.warning(
            "the supervisor is gone; attempt %d.%d goes on and waits to be adopted",
            *history.open_attempt.key,
        )
        return
    logger.warning("the supervisor is gone between two attempts; start the run again")


def _end(run: Run, logger: Log) -> None:
    history = run.ledger.read()
    if history.job is None or history.ended is not None:
        return
    try:
        run.take()
    except RunConflict as error:
        logger.warning("not taken down: %s", error)
        return
    run.end("cancelled", "cancelled")
    logger.info("run %s is taken down", run.job.run_id)


def _run_of(flow_run: FlowRun) -> Run:
    job = Job.model_validate(flow_run.parameters["job"])
    return Run(job, home=home_folder(), credentials=credentials_of(job.storage))
