"""The jobs of the runs that were started on this machine, by run_id."""

from __future__ import annotations

from pathlib import Path

from pydantic_core import from_json

from perdure.training.config.job import Job, parse_job
from perdure.training.errors import InputError
from perdure.training.files import private_folder, write_whole

MAX_LISTED = 10


def remember_job(home: Path, job: Job) -> None:
    """Note on this machine where a run's storage is, for commands that get its name alone."""
    path = job_path(home, job.run_id)
    private_folder(path.parent)
    # Whole: the scheduled retention reads it any time.
    write_whole(path, job.model_dump_json(indent=1), private=True)
    unmark_ended(home, job.run_id)


def job_path(home: Path, run_id: str) -> Path:
    """Return the path where `remember_job` keeps the job of a run."""
    return home / "runs" / run_id / "job.json"


def known_runs(home: Path) -> list[str]:
    """List the run_ids with a job on this machine, ascending."""
    return sorted(path.parent.name for path in (home / "runs").glob("*/job.json"))


def unended_runs(home: Path) -> list[str]:
    """List the run_ids of runs that are not known to have ended."""
    return [run_id for run_id in known_runs(home) if not _end_path(home, run_id).exists()]


def mark_ended(home: Path, run_id: str) -> None:
    """Note on this machine that a run has ended; `remember_job`, when it is taken, undoes that."""
    _end_path(home, run_id).touch()


def unmark_ended(home: Path, run_id: str) -> None:
    """Undo `mark_ended`."""
    _end_path(home, run_id).unlink(missing_ok=True)


def _end_path(home: Path, run_id: str) -> Path:
    return job_path(home, run_id).with_name("ended")


def known_job(home: Path, run_id: str) -> Job:
    """Read the job of a run that was started on this machine.

    Raises:
        InputError: there is no such run, or its file cannot be read or holds no job of this
            version.
    """
    path = job_path(home, run_id)
    try:
        document = from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        listed = ", ".join(known_runs(home)[-MAX_LISTED:]) or "none"
        asked = f"{run_id!r}: no such run on this machine" if run_id else "name a run"
        raise InputError("run_id", f"{asked}; known: {listed} (PERDURE_HOME is {home})") from None
    except OSError as error:
        raise InputError("run_id", f"{path}: {error.strerror}") from None
    except ValueError:  # neither UTF-8 nor JSON
        raise InputError("run_id", f"{path} is no job") from None
    return parse_job(document)
