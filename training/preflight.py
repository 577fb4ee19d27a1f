"""What can be checked before anything is started: storage, corpus, tokenizer, environment.

Cheap: seconds at most. Every problem is an InputError that names field, value and what is
allowed.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from storage.address import Credentials, StorageSpec, check_reachable, open_store
from storage.errors import StorageError
from training.environment import check_environment
from training.errors import InputError
from training.job import Job
from training.trainer.data.corpus import CorpusError, check_sources
from training.trainer.data.tokenizer import open_tokenizer


def check_job(
    job: Job, *, credentials: Credentials | None = None, with_storage: bool = True
) -> None:
    """Check a job against this machine.

    Args:
        job: validated by itself already.
        credentials: keys of the job's store; None: boto3's default chain.
        with_storage: whether to write and read a probe object.

    Raises:
        InputError: the first problem.
    """
    check_environment(job)
    _check_program(job)
    if not job.worker.is_command:
        _check_data(job)
    if with_storage:
        _check_storage(job.storage, credentials, job.run_id)


def _check_program(job: Job) -> None:
    cwd = Path(job.worker.cwd or ".")
    if not cwd.is_dir():
        raise InputError("worker.cwd", f"{str(cwd)!r} is not a folder")
    if job.worker.command is not None:
        program = job.worker.command[0]
        if "$" not in program and shutil.which(program) is None and not (cwd / program).exists():
            raise InputError("worker.command", f"{program!r} is no program on this machine")
        return
    module = job.recipe.partition(":")[0]
    in_cwd = (cwd / (module.replace(".", "/") + ".py")).exists()
    if not in_cwd and not _is_importable(module):
        raise InputError("worker.recipe", f"{job.recipe!r}: no module named {module!r}")


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _check_data(job: Job) -> None:
    assert job.data is not None  # noqa: S101 the job's validation asks for it
    try:
        check_sources(job.data)
    except CorpusError as error:
        raise InputError("data.sources", str(error)) from error
    try:
        open_tokenizer(job.tokenizer)
    except (ValueError, OSError) as error:
        raise InputError("tokenizer.path", str(error)) from error


def _check_storage(spec: StorageSpec, credentials: Credentials | None, run_id: str) -> None:
    try:
        check_reachable(open_store(spec, credentials), f"runs/{run_id}/")
    except (StorageError, ValueError) as error:
        raise InputError("storage.address", f"{spec.address!r}: {error}") from error
