"""The drill flow: faults made on purpose on the nodes of a job, and what became of them."""

from __future__ import annotations

from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed, Failed

from perdure.tasks.credentials import credentials_of
from perdure.tasks.drill import clear, new_home, play, publish_table, undisturbed
from perdure.tasks.hooks import take_drills_down
from perdure.tasks.job_parameter import JobParameter
from perdure.tasks.states import data_of
from perdure.training.drill.runner import (
    ALL,
    find_obstacle,
    make_runner,
    parallel_kind,
    select_drills,
    select_runnable,
)


@flow(
    name="drill",
    flow_run_name="{name}",
    on_cancellation=[take_drills_down],
    on_crashed=[take_drills_down],
    persist_result=False,
)
def drill(
    name: str = ALL, job: JobParameter | None = None, parallelism: str | None = None
) -> State[Any]:
    """Run the drills of a name, each beside the same run without a fault.

    Args:
        name: name of a drill, or `all`.
        job: job that lends its engine and store, and is not run; none: this machine.
        parallelism: ddp, hsdp or fsdp2; none: the job's, else ddp.
    """
    selected, kind = select_drills(name), parallel_kind(parallelism, job)
    drills = select_runnable(selected, job)
    for case in selected:
        if case not in drills:
            get_run_logger().warning("%s is left out: %s", case.name, find_obstacle(case, job))
    credentials = credentials_of(job.storage) if job is not None else None
    home = new_home(flow_run.id, flow_run.run_count)
    runner = make_runner(job, drills, kind, home=home, credentials=credentials)
    where = ", ".join(runner.places)
    get_run_logger().info("logs and ledgers, until all was as expected: %s", where)
    undisturbed(runner)
    outcomes = [data_of(play(runner, case, return_state=True)) for case in drills]
    run_id = job.run_id if job is not None else None
    publish_table(outcomes, run_id=run_id, return_state=True)  # the states have it, too
    bad = [outcome.name for outcome in outcomes if not outcome.as_expected]
    if bad:
        return Failed(message=f"not as expected: {', '.join(bad)}; logs and ledgers: {where}")
    clear(runner, return_state=True)  # files left behind do not change the result
    return Completed(message=f"as expected: {', '.join(outcome.name for outcome in outcomes)}")
