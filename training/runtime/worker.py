"""The worker process of a session job: `python -m perdure.training.runtime.worker`.

Runs the job's recipe under torch elastic's error recorder, which leaves the exception and its
time for the node agent. Exit codes: 0 done, 75 restart me, 76 needs a rung above the process,
2 the user has to fix it; anything else is classified from log and code.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable

from torch.distributed.elastic.multiprocessing.errors import record

from perdure.training.diagnosis.exits import EXIT_DONE, EXIT_RESTART_ME, EXIT_USER
from perdure.training.errors import InputError
from perdure.training.job import Job
from perdure.training.log import start_logging
from perdure.training.runtime.context import WorkerContext
from perdure.training.runtime.errors import GivenUp, Interrupted, RecipeEndedEarly
from perdure.training.runtime.forking import serve_forks
from perdure.training.runtime.session import Session

_log = logging.getLogger("perdure.runtime")


def load_recipe(name: str) -> Callable[[Job], None]:
    """The function that `module:function` names.

    Raises:
        InputError: no such module or function.
    """
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InputError("worker.recipe", f"{name}: no module named {error.name}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise InputError("worker.recipe", f"{name}: {module_name} has no such function")
    recipe: Callable[[Job], None] = function
    return recipe


@record
def main() -> None:
    """Run this rank's recipe."""
    job = WorkerContext.from_environment().job
    if job.data is not None and job.data.num_workers:
        serve_forks()  # before the program starts threads
    how = "returned"
    try:
        load_recipe(job.recipe)(job)
    except (GivenUp, Interrupted) as exc:  # outside of the loop, which handles them itself
        _log.info(f"this rank ends: {exc}")
        sys.exit(EXIT_RESTART_ME)
    except SystemExit as end:
        if end.code not in (None, EXIT_DONE):
            raise
        how = "called sys.exit()"
    if Session.ended_at < job.steps:
        at = f"{how} at step {Session.completed_step()} of {job.steps}"
        if job.worker.script is not None:
            name = job.worker.script[0]
            raise RecipeEndedEarly(
                f"{name} {at}: a callback of perdure.integrations, or its training_steps, takes "
                "the loop to that step"
            )
        raise RecipeEndedEarly(
            f"the recipe {at}: it loops over session.steps(until=job.steps) to its end, which "
            "saves the last step"
        )
    Session.leave()


def run() -> None:
    """Run this rank's recipe as the whole of a process; ends it with the worker's exit code."""
    start_logging()
    sys.path.insert(0, "")
    try:
        main()
    except InputError as error:
        _log.error(str(error))
        sys.exit(EXIT_USER)


if __name__ == "__main__":
    run()
