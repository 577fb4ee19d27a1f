"""The tasks of drills: each is one in the UI, and all of them a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from perdure.tasks.states import completed, failed
from perdure.training.drill.evaluation import DrillOutcome
from perdure.training.drill.runner import DrillRunner
from perdure.training.drill.table import Drill
from perdure.training.files import home_folder
from perdure.training.reporting.markdown import counted

PREFIX = "perdure-drill-"


def new_home(flow_run_id: str, run_count: int) -> Path:
    """The folder of drills for one start of a flow run.

    Raises:
        OSError: it cannot be made.
    """
    # A flow run that is retried keeps its id, and its runs must not meet those of the last try.
    home = home_folder() / "drills" / f"{PREFIX}{flow_run_id}-{run_count}"
    home.mkdir(parents=True)
    return home


def homes_of(flow_run_id: str) -> list[Path]:
    """The folders that all starts of a flow run have left."""
    return sorted((home_folder() / "drills").glob(f"{PREFIX}{flow_run_id}-*"))


@task(name="undisturbed", task_run_name="without a fault", cache_policy=NO_CACHE)
def undisturbed(runner: DrillRunner) -> int:
    """The run that all drills are compared with. Its steps."""
    steps = len(runner.undisturbed().curve)
    return completed(steps, counted(steps, "step"))


@task(name="play", task_run_name="{drill.name}", cache_policy=NO_CACHE)
def play(runner: DrillRunner, drill: Drill) -> DrillOutcome:
    """One drill; failed when something is not as expected."""
    outcome = runner.run(drill)
    if outcome.as_expected:
        return completed(outcome, outcome.line)
    return failed(outcome, outcome.line, name="NotAsExpected")


@task(name="clear", task_run_name="delete what is left", cache_policy=NO_CACHE)
def clear(runner: DrillRunner) -> None:
    """Delete what drills have left that were as expected."""
    runner.clear()


@task(name="report", task_run_name="table of all", cache_policy=NO_CACHE)
def publish_table(outcomes: Sequence[DrillOutcome], *, run_id: str | None) -> None:
    """The table of all of them, as an artifact of the flow run."""
    rows = [outcome.row for outcome in outcomes]
    if run_id is None:
        create_table_artifact(rows, key="drills", description="Drills on this machine")
    else:
        where = f"Drills on the nodes of {run_id}"
        create_table_artifact(rows, key=f"{run_id}-drills", description=where)
