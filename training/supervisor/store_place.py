"""Whether a run may begin in a store that holds nothing of it.

The folder of a store may be new. Or runs were kept there, and what is seen now is the empty
folder below an unmounted file system: a new store would take the run's new records on the local
disk, apart from its old ones. A bucket does not vanish so, but its objects may have been deleted,
or the address may lead elsewhere. What this machine has noted of its runs tells one from the
other. A run is its name together with the address of its store.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from perdure.storage.address import StorageSpec, has_store, make_store
from perdure.training.errors import InputError, RunConflict
from perdure.training.job import Job
from perdure.training.supervisor.job_registry import job_path, known_job, known_runs

FIELD = "storage.address"
MAX_NAMED = 5


def begin_store(job: Job, home: Path) -> None:
    """Have the store of a run that starts: it is made where it is new.

    Raises:
        InputError: there was one before, and it is not there.
        StorageError: it cannot be made, or its file system does not answer.
    """
    if not has_store(job.storage):
        refuse_vanished(job, home)
        make_store(job.storage)


def refuse_vanished(job: Job, home: Path) -> None:
    """Check that the folder of a job, which holds no store, never held one that is known here.

    Raises:
        InputError: runs of this machine are kept there.
    """
    kept = list(_kept_at(job.storage, home))
    if not kept or any(_has_ledger(job.storage, run_id) for run_id in kept):
        return  # the store of a version that made no marker
    names = ", ".join(kept[:MAX_NAMED]) + (" and others" if len(kept) > MAX_NAMED else "")
    raise InputError(
        FIELD,
        f"{job.storage.address!r}: no store is in this folder, where this machine keeps {names}; "
        f"mount or move it back, and nothing is lost. If it was deleted on purpose, "
        f"choose another folder, or delete what is known of them: {job_path(home, '*').parent}",
    )


def refuse_lost_ledger(job: Job, home: Path) -> None:
    """Check that a run without a ledger is a new one, as far as this machine knows.

    Raises:
        RunConflict: it was started before, with the same address.
    """
    if job.run_id in _kept_at(job.storage, home):
        raise RunConflict(
            f"{FIELD}={job.storage.address!r} holds nothing of run {job.run_id}, which was started "
            "there; restore what was deleted, or choose another run_id. To start it from step 0, "
            f"delete what is known of it: {job_path(home, job.run_id).parent}"
        )


def _kept_at(spec: StorageSpec, home: Path) -> Iterator[str]:
    """The runs that were started on this machine with a store's address."""
    for run_id in known_runs(home):
        try:
            known = known_job(home, run_id)
        except InputError:
            continue  # of another version, or damaged
        if known.storage.address.rstrip("/") == spec.address.rstrip("/"):
            yield run_id


def _has_ledger(spec: StorageSpec, run_id: str) -> bool:
    return spec.folder is not None and (spec.folder / "runs" / run_id / "ledger").is_dir()
