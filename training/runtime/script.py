"""A script as its user has it, run in a rank's process as `python script.py` would run it.

The process joins its session first: whoever sets process groups up later, as accelerate does,
finds them set up, and a callback of perdure.integrations finds the session. `worker.integration`
takes over the loop of a script that knows nothing of Perdure.
"""

from __future__ import annotations

import runpy
import sys
from importlib import import_module
from pathlib import Path

from perdure.training.config.job import Job
from perdure.training.runtime.session import join


def main(job: Job) -> None:
    """Run worker.script to its end."""
    assert job.worker.script is not None  # noqa: S101 else another recipe is in effect
    path, *arguments = job.worker.script
    join()
    sys.argv = [path, *arguments]
    sys.path[0] = str(Path(path).resolve().parent)
    if (integration := job.worker.integration) is not None:
        import_module(f"perdure.integrations.{integration}").take_over()
    # For a main program Python makes `__file__` absolute; a name beside it has to be found.
    runpy.run_path(str(Path(path).absolute()), run_name="__main__")
