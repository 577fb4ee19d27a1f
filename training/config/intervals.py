"""Intervals and limits of a job that contradict each other.

Looked at in a job file alone: a run that was started with such a job is still read, and goes on.
"""

from __future__ import annotations

from collections.abc import Iterator

from perdure.training.config.job import Job
from perdure.training.errors import InputError


def check_intervals(job: Job) -> None:
    """Check intervals against the run, and limits against what they watch.

    Raises:
        InputError: the first contradiction.
    """
    for field, problem in _contradictions(job):
        raise InputError(field, problem)


def _contradictions(job: Job) -> Iterator[tuple[str, str]]:
    yield from _beyond_the_run(job)
    watch, saves = job.watch, job.checkpoint
    # A default is none of the user's: no sample within it raises no alert.
    low_for_s = watch.low_for_s if "low_for_s" in watch.model_fields_set else None
    pairs = (
        ("watch.low_for_s", low_for_s, "watch.sample_every_s", watch.sample_every_s,
         "no sample is taken meanwhile"),
        ("watch.command_quiet_s", watch.command_quiet_s if job.worker.is_command else None,
         "watch.sample_every_s", watch.sample_every_s, "no sample is taken meanwhile"),
        ("checkpoint.mtbf_s", saves.mtbf_s, "checkpoint.every_s", saves.every_s,
         "most failures would come before the first save"),
        ("engine.orphan_timeout_s", job.engine.orphan_timeout_s, "engine.grace_s",
         job.engine.grace_s, "agents would end before their workers"),
    )  # fmt: skip
    for limit, limit_s, watched, watched_s, why in pairs:
        if limit_s is not None and watched_s is not None and limit_s < watched_s:
            yield limit, f"{limit_s:g} is less than {watched}={watched_s:g}: {why}"


def _beyond_the_run(job: Job) -> Iterator[tuple[str, str]]:
    """Find what would first happen after the last step."""
    target = job.target_step
    if target is None:
        return
    for index, fault in enumerate(job.drill.faults):
        if fault.step > target:
            yield f"drill.faults.{index}.step", f"{fault.step} is after the run: at most {target}"
        if fault.rank >= job.engine.world_size:
            ranks = f"the ranks are 0 to {job.engine.world_size - 1}"
            yield f"drill.faults.{index}.rank", f"{fault.rank} is none of the job's: {ranks}"
