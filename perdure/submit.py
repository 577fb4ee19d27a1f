"""`perdure submit`: hand a job to the platform that owns the nodes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated

import typer

from perdure.console import JobFile, Overrides
from perdure.training.config.engine import LaunchedEngineSpec
from perdure.training.config.job import Job
from perdure.training.config.job_file import load_job
from perdure.training.engines.launched.slurm_script import slurm_script
from perdure.training.errors import InputError, PerdureError

SUBMIT_TIMEOUT_S = 60.0


class SubmitPlatform(StrEnum):
    """Platforms that a job can be handed to."""

    SLURM = "slurm"


_SCRIPTS: Mapping[SubmitPlatform, Callable[[Job, tuple[str, ...], tuple[str, ...]], str]] = {
    SubmitPlatform.SLURM: slurm_script
}


def submit(
    job_file: JobFile,
    overrides: Overrides = None,
    *,
    platform: Annotated[SubmitPlatform, typer.Option("--platform", help="whose nodes")],
    option: Annotated[
        list[str] | None,
        typer.Option("--option", help="an option of sbatch, such as --time=1-0; may be repeated"),
    ] = None,
    only_print: Annotated[
        bool, typer.Option("--print", help="print the batch script, and hand in nothing")
    ] = False,
) -> None:
    """Hand a job to the platform, which starts `perdure launch` on every node.

    The job file and this Python environment must be at the same place on all nodes.
    """
    job = load_job(job_file, overrides or ())
    if not isinstance(job.engine, LaunchedEngineSpec):
        text = f"{job.engine.kind}: a job on a platform's nodes needs kind: launched"
        raise InputError("engine.kind", text)
    for line in option or ():
        if not line.startswith("-") or not line.isprintable():
            raise InputError("--option", f"{line!r} must be one option of sbatch, as --time=1-0")
    settings = [word for value in overrides or () for word in ("--set", value)]
    words = (sys.executable, "-m", "perdure", "launch", str(job_file.resolve()), *settings)
    script = _SCRIPTS[platform](job, words, tuple(option or ()))
    if only_print:
        print(script, end="")
        return
    print(_sbatch(script))


def _sbatch(script: str) -> str:
    """Hand a script to Slurm. Returns its answer.

    Raises:
        PerdureError: Slurm is not there, or refuses.
    """
    program = shutil.which("sbatch")
    if program is None:
        raise PerdureError("sbatch is not installed here; --print shows the script")
    try:
        done = subprocess.run(
            [program], input=script, capture_output=True, text=True, check=True,
            timeout=SUBMIT_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        raise PerdureError(f"sbatch refuses the job: {error.stderr.strip()}") from None
    except subprocess.TimeoutExpired:
        raise PerdureError(f"sbatch did not answer within {SUBMIT_TIMEOUT_S:g} s") from None
    return done.stdout.strip()
