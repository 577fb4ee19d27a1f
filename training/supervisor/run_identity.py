"""The identity of a run: whether a job may begin it in its store, or go on with it.

A run is its name together with the address of its store. The folder of a store may be new. Or runs
were kept there, and only the empty folder below an unmounted file system is left: a new store would
take the run's new records on the local disk, apart from its old ones. A bucket does not vanish so,
but its objects may have been deleted, or the address may lead elsewhere. The notes of this machine
about its runs decide between these cases. Settings that the weights depend on must not change under
a run's name, and a change to a run that is complete must not be ignored. Steps are completed
optimizer steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from perdure.storage.address import StorageSpec, has_store, make_store
from perdure.training.config.job import Job
from perdure.training.errors import InputError, RunConflict
from perdure.training.journal.history import RunHistory
from perdure.training.journal.ledger import Identity
from perdure.training.supervisor.job_registry import job_path, known_job, known_runs

FIELD = "storage.address"
MAX_NAMED_RUNS = 5


def begin_store(job: Job, home: Path) -> None:
    """Make the store of a run that starts where the store is new.

    Raises:
        InputError: there was a store before, and it is not there.
        StorageError: it cannot be made, or its file system does not answer.
    """
    if not has_store(job.storage):
        refuse_vanished(job, home)
        make_store(job.storage)


def refuse_vanished(job: Job, home: Path) -> None:
    """Check that the folder of a job, which holds no store, never held a store that is known here.

    Raises:
        InputError: runs of this machine are kept there.
    """
    run_ids = list(_runs_at(job.storage, home))
    if not run_ids or any(_has_ledger(job.storage, run_id) for run_id in run_ids):
        return  # the store of a version that made no marker
    names = ", ".join(run_ids[:MAX_NAMED_RUNS])
    names += " and others" if len(run_ids) > MAX_NAMED_RUNS else ""
    raise InputError(
        FIELD,
        f"{job.storage.address!r}: no store is in this folder, where this machine keeps {names}; "
        f"mount or move it back, and nothing is lost. If it was deleted on purpose, "
        f"choose another folder, or delete what is known of them: {job_path(home, '*').parent}",
    )


def check_takeover(job: Job, history: RunHistory, identity: Identity, home: Path) -> None:
    """Check that a supervisor may take a run, or create it where its ledger is empty.

    Args:
        job: to be run.
        history: the ledger's content, before it is taken.
        identity: the supervisor's.
        home: Perdure's folder on this machine.

    Raises:
        RunConflict: the run belongs to a different job, or its containers are another machine's or
            another home folder's, or its ledger is lost.
    """
    if history.job is None:
        _refuse_lost_ledger(job, home)
    refuse_other_job(job, history)
    if job.engine.on_this_machine:
        _refuse_elsewhere(history, identity, home)


def _refuse_lost_ledger(job: Job, home: Path) -> None:
    """Check that a run without a ledger is new, as far as this machine knows.

    Raises:
        RunConflict: it was started before, with the same address.
    """
    if job.run_id in _runs_at(job.storage, home):
        raise RunConflict(
            f"{FIELD}={job.storage.address!r} holds nothing of run {job.run_id}, which was started "
            "there; restore what was deleted, or choose another run_id. To start it from step 0, "
            f"delete what is known of it: {job_path(home, job.run_id).parent}"
        )


def _runs_at(spec: StorageSpec, home: Path) -> Iterator[str]:
    """List the runs that were started on this machine with a store's address."""
    for run_id in known_runs(home):
        try:
            job = known_job(home, run_id)
        except InputError:
            continue  # of another version, or damaged
        if job.storage.address.rstrip("/") == spec.address.rstrip("/"):
            yield run_id


def _has_ledger(spec: StorageSpec, run_id: str) -> bool:
    return spec.folder is not None and (spec.folder / "runs" / run_id / "ledger").is_dir()


_IDENTITY = ("model", "tokenizer", "seed", "batch", "optimizer", "precision", "worker", "init_from")
_MAX_CHARS = 120
MAX_NAMED_FIELDS = 8
PREFIX = "perdure."  # recipes of older runs lack it
REOPEN = "perdure run JOB.yaml --reopen"
_USER_SECTIONS = frozenset({"env", "env_from"})  # sections whose names are the user's


def is_complete(job: Job, history: RunHistory) -> bool:
    """Whether the run reached its target; a larger target than before is not reached yet."""
    if history.ended is None or not history.ended_well:
        return False
    if not job.worker.is_command:
        return history.committed_step >= job.steps
    if job.target_step is None:
        return True
    reached = history.ended.target_step
    if reached is None:  # the job named none, or the record is of an older version
        reached = int((history.job or {}).get("steps", 0))
    return job.target_step <= reached


def completed_before(job: Job, history: RunHistory) -> str:
    """Build the line about a run that is complete, and how it goes on all the same."""
    at = f", at step {history.committed_step}" if not job.worker.is_command else ""
    more = "a larger 'steps'" if job.target_step is not None else f"'{REOPEN}'"
    changed = sorted(_changed(history.job or {}, job.model_dump(mode="json")))
    text = f"run {job.run_id} was completed before{at}; {more} has it go on"
    if not changed:
        return text
    named, num_more = ", ".join(changed[:MAX_NAMED_FIELDS]), len(changed) - MAX_NAMED_FIELDS
    named += f" and {num_more} more" if num_more > 0 else ""
    return f"{text}; differs from the job that it was created with: {named}"


def refuse_other_job(job: Job, history: RunHistory) -> None:
    """Check that the job is the run's, as far as something depends on it.

    Raises:
        RunConflict: it would train other weights, or a completed run would ignore its command.
    """
    # Until something depends on them, settings of a run may still be corrected; a command's own
    # checkpoints are its own affair.
    depends = any(checkpoint.path is None for checkpoint in history.checkpoints)
    if history.job is not None and (depends or history.open_attempt):
        first = next(_differences(history.job, job.model_dump(mode="json")), None)
        if first is not None:
            raise RunConflict(
                f"run_id={job.run_id} belongs to a job with another {first}; "
                "choose another run_id, or go back to the former job"
                f"{_way_on(job, history)}"
            )
    if is_complete(job, history) and job.worker.is_command:
        _refuse_other_command(job, history)


def _way_on(job: Job, history: RunHistory) -> str:
    if job.worker.is_command or not history.checkpoints:
        return ""
    return f"; init_from: {{run: {job.run_id}}} begins another run with these weights"


def _refuse_other_command(job: Job, history: RunHistory) -> None:
    ended = history.ended
    assert ended is not None  # noqa: S101 the run is complete
    command = ended.command
    if command is None:
        command = ((history.job or {}).get("worker") or {}).get("command")
    if command is not None and tuple(command) != job.worker.command:
        raise RunConflict(
            f"run_id={job.run_id} was completed with another worker.command: "
            f"{_shown(list(command))}, here {_shown(list(job.worker.command or ()))}; "
            f"choose another run_id, or have the run go on with '{REOPEN}'"
        )


def _differences(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """List values of the run's identity that differ: path, then, now."""
    for field in _IDENTITY:
        if field in recorded:
            yield from _compared(field, recorded[field], now.get(field))


def _changed(recorded: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """List the paths of the values that differ; the values may be secret."""
    has_user_names = path.rstrip(".") in _USER_SECTIONS
    for name in recorded.keys() | now.keys():
        then, current = recorded.get(name), now.get(name)
        if isinstance(then, Mapping) and isinstance(current, Mapping):
            yield from _changed(then, current, f"{path}{name}.")
        elif _is_renamed_recipe(f"{path}{name}", then, current):
            continue
        elif then != current and (has_user_names or (name in recorded and name in now)):
            yield f"{path}{name}"


def _compared(path: str, recorded: Any, now: Any) -> Iterator[str]:
    if isinstance(recorded, Mapping) and isinstance(now, Mapping):
        # Every field is on record: a field that is missing is another version's.
        for name in (name for name in recorded if name in now):
            yield from _compared(f"{path}.{name}", recorded[name], now[name])
    elif recorded != now and not _is_renamed_recipe(path, recorded, now):
        yield f"{path}: {_shown(recorded)}, here {_shown(now)}"


def _is_renamed_recipe(path: str, recorded: Any, now: Any) -> bool:
    return path == "worker.recipe" and now == f"{PREFIX}{recorded}"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."


def _refuse_elsewhere(history: RunHistory, identity: Identity, home: Path) -> None:
    """Check that this supervisor can adopt the containers of an open attempt.

    Raises:
        RunConflict: they are another machine's, or another home folder's.
    """
    placed = history.placement
    if placed is None or history.open_attempt is None or not placed.host:
        return
    if placed.host == identity.host and placed.boot_id != identity.boot_id:
        return  # rebooted: nothing is left of it
    if (placed.host, placed.home) != (identity.host, str(home)):
        raise RunConflict(
            f"an attempt of run {history.job and history.job.get('run_id')} may be alive on "
            f"{placed.host} with PERDURE_HOME={placed.home}; start it there"
        )
