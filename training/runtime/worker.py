"""The worker process of a session job: `python -m perdure.training.runtime.worker`.

It runs the job's recipe under torch elastic's error recorder, which leaves the exception and its
time for the node agent. Exit codes: 0 done, 75 restart me, 76 needs a rung above the process,
2 the user has to fix it; anything else is classified from log and code.

The worker forks a fork server for data loaders from itself. The server that multiprocessing starts
by itself is a new interpreter, which imports torch for seconds: longer than everything else that a
process needs to take another's place. At its very beginning a worker has all imports, and neither
threads nor a device: it can be forked then.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record

from perdure.training.config.job import Job
from perdure.training.diagnosis.exits import EXIT_DONE, EXIT_RESTART_ME, EXIT_USER
from perdure.training.errors import InputError
from perdure.training.log import start_logging
from perdure.training.runtime.context import WorkerContext
from perdure.training.runtime.errors import GivenUp, Interrupted, RecipeEndedEarly
from perdure.training.runtime.session import Session

NAME = "data-loaders"


def serve_forks() -> None:
    """Fork multiprocessing's fork server now; does nothing where that is not possible.

    Written against the private parts of Python 3.11 to 3.13; 3.14 authenticates clients.
    """
    server: Any = forkserver._forkserver  # noqa: SLF001 there is no public way
    is_known = hasattr(server, "_forkserver_pid") and not hasattr(server, "_forkserver_authkey")
    if not is_known or server._forkserver_pid is not None or threading.active_count() > 1:  # noqa: SLF001
        return
    resource_tracker.ensure_running()
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        Path(address).chmod(0o600)
        listener.listen()
        # Every client holds the writing end; when the last is gone, so is the server.
        alive, held = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(held)
            _serve(listener.detach(), alive, Path(address).parent)
        os.close(alive)
    server._forkserver_address = address  # noqa: SLF001
    server._forkserver_alive_fd = held  # noqa: SLF001
    server._forkserver_pid = pid  # noqa: SLF001


def _serve(listener: int, alive: int, folder: Path) -> None:
    """Be the fork server; never returns."""
    with suppress(BaseException):  # its end is a SystemExit
        gc.freeze()  # or the first collection in a loader would copy every page
        Path("/proc/self/comm").write_text(NAME, encoding="utf-8")
        forkserver.main(listener, alive, [])
    # The worker may have been killed: nothing else removes it.
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


_log = logging.getLogger("perdure.runtime")


def load_recipe(name: str) -> Callable[[Job], None]:
    """Import the function that `module:function` names.

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
