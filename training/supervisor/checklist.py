"""Is the job set up to outlast its faults? Policy alone, nothing is started.

Steps are completed optimizer steps, times seconds.
"""

from __future__ import annotations

from collections.abc import Iterator

from training.job import Job
from training.supervisor.job_checks import recovery_notes
from training.wire.check import Check, Outcome

MANY_SAVES_LOST = 0.25  # of all steps, to do again after the worst moment to fail


def checklist(job: Job) -> Iterator[Check]:
    """One check for every thing that recovery stands on."""
    if not job.worker.is_command:
        yield _interval(job)
        yield _retention(job)
    yield _restarts(job)
    yield _spares(job)
    yield _replicas(job)


def _interval(job: Job) -> Check:
    spec = job.checkpoint
    allowed = f"at most {MANY_SAVES_LOST:.0%} of {job.steps} steps"
    if not spec.has_interval:
        seen = "none of the job's own: the recommended one for the model's size is taken"
        return _told("checkpoint_interval", Outcome.OK, seen, allowed)
    chosen = [
        f"{name}={getattr(spec, name)}"
        for name in ("every_steps", "every_epochs", "every_s", "mtbf_s")
        if getattr(spec, name) is not None
    ]
    seen = ", ".join(chosen)
    every = spec.every_steps
    if every is not None and every > job.steps:
        told = f"{seen}: no save before the end, at step {job.steps}"
        return _told("checkpoint_interval", Outcome.WARNING, told, allowed)
    if every is not None and every > MANY_SAVES_LOST * job.steps:
        told = f"{seen}: a fault costs up to {every} of {job.steps} steps"
        return _told("checkpoint_interval", Outcome.WARNING, told, allowed)
    if spec.every_s is not None and spec.mtbf_s is not None and spec.every_s > spec.mtbf_s:
        told = f"{seen}: more time between saves than between failures"
        return _told("checkpoint_interval", Outcome.WARNING, told, "every_s below mtbf_s")
    return _told("checkpoint_interval", Outcome.OK, seen, allowed)


def _retention(job: Job) -> Check:
    kept = job.checkpoint.keep_last
    outcome = Outcome.OK if kept > 1 else Outcome.WARNING
    why = "" if kept > 1 else ": a damaged one leaves nothing to go back to"
    return _told("retention", outcome, f"keep_last={kept}{why}", "more than one checkpoint")


def _restarts(job: Job) -> Check:
    spec = job.restart
    seen = (
        f"max_restarts={spec.max_restarts}, unconditional={spec.unconditional}, "
        f"in_place={spec.in_place}, hang={spec.hang}"
    )
    off = [name for name in ("unconditional", "hang") if not getattr(spec, name)]
    told = f"{seen}: {' and '.join(off)} off, some faults end the run" if off else seen
    return _told(
        "restart_policy", Outcome.WARNING if off else Outcome.OK, told, "every fault has an answer"
    )


def _spares(job: Job) -> Check:
    spares = job.engine.spares
    outcome = Outcome.OK if spares else Outcome.WARNING
    why = "" if spares else ": a node that is isolated is not replaced"
    return _told("spares", outcome, f"spares={spares}{why}", "a spare node")


def _replicas(job: Job) -> Check:
    if job.worker.is_command:
        seen = "a command's state is not known: it is restarted from its own checkpoints"
        return _told("replicas", Outcome.SKIPPED, seen)
    wished = [note.line for note in recovery_notes(job) if note.is_warning]
    copies = job.layout.copies
    if wished:
        return _told("replicas", Outcome.WARNING, "; ".join(wished))
    if copies == 1:
        seen = "one copy of every shard: a lost process costs the steps since the last save"
        return _told("replicas", Outcome.WARNING, seen, "two copies or more")
    return _told("replicas", Outcome.OK, f"{copies} copies of every shard", "two copies or more")


def _told(name: str, outcome: Outcome, seen: str, allowed: str = "") -> Check:
    return Check(name=name, outcome=outcome, seen=seen, allowed=allowed)
