"""Recommended settings, and where a job departs from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from perdure.training.config.job import Job
from perdure.training.config.model import ParallelKind
from perdure.training.config.recovery import (
    RECOMMENDED_KEEP_LAST,
    CheckpointSpec,
    recommended_interval,
)

PLATFORM_HANG_TIMEOUT_S = 1800.0
TEMPORARY_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 to warn of


def departures(job: Job, num_parameters: int | None) -> Iterator[str]:
    """Yield a line for each setting of a job that departs from the recommended one.

    Args:
        job: a valid job.
        num_parameters: size of its model; None: not known, so that no interval is recommended.
    """
    yield from _temporary_places(job)
    if job.worker.is_command:
        return
    if job.checkpoint.has_interval and num_parameters is not None:
        recommended = recommended_interval(num_parameters)
        for field, value in recommended.items():
            if not _within(getattr(job.checkpoint, field), value):
                yield (
                    f"checkpoint: {_interval_text(job.checkpoint)}; recommended for "
                    f"{num_parameters / 1e6:,.1f} M parameters: {field}={value}"
                )
    if job.checkpoint.keep_last < RECOMMENDED_KEEP_LAST:
        yield f"checkpoint.keep_last={job.checkpoint.keep_last}; recommended: 5"
    if not job.restart.hang:
        yield "restart.hang=false: a hang will not be noticed; recommended: true"
    limit_s = job.restart.hang_timeout_s
    if limit_s is not None and limit_s > PLATFORM_HANG_TIMEOUT_S:
        yield f"restart.hang_timeout_s={limit_s:g} is longer than the platform's 30 minutes"
    if job.parallelism.kind is ParallelKind.DATA_PARALLEL:
        yield "parallelism.kind=data_parallel: one process drives all cards; ddp is faster"


def _temporary_places(job: Job) -> Iterator[str]:
    address, folder = job.storage.address, job.storage.folder
    if folder is not None and is_temporary(folder):
        yield f"storage.address={address} is temporary: a reboot deletes the run"
    if job.log_path is not None and is_temporary(Path(job.log_path)):
        yield f"log_path={job.log_path} is temporary: logs are gone after a reboot"


def is_temporary(path: Path) -> bool:
    """Whether a reboot may delete the files there."""
    return any(map(path.is_relative_to, TEMPORARY_FOLDERS))


def _within(chosen: int | None, recommended: int) -> bool:
    # Over 10B parameters the recommendation is a range, 100 to 200 steps.
    low = 100 if recommended == 200 else recommended
    return chosen is not None and low <= chosen <= recommended


def _interval_text(spec: CheckpointSpec) -> str:
    fields = ("every_steps", "every_epochs", "every_s", "mtbf_s")
    return ", ".join(f"{f}={getattr(spec, f)}" for f in fields if getattr(spec, f) is not None)
