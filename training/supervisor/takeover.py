"""What a supervisor does not take up: another job's run, and a run that may live elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from training.errors import RunConflict
from training.job import Job
from training.journal.history import RunHistory
from training.journal.ledger import Identity

# What the weights depend on must not change under a run's name.
_IDENTITY = ("model", "tokenizer", "seed", "batch", "optimizer", "precision", "worker")


def refuse_other_job(job: Job, before: dict[str, Any]) -> None:
    """Compare a job with the one that the run was created with.

    Raises:
        RunConflict: they would train different weights.
    """
    now = job.model_dump(mode="json")
    for field in _IDENTITY:
        if field in before and now[field] != before[field]:
            raise RunConflict(
                f"run_id={job.run_id} belongs to a job with another {field}; "
                "choose another run_id, or go back to the former job"
            )


def refuse_elsewhere(history: RunHistory, identity: Identity, home: Path) -> None:
    """A run with an open attempt is adopted where its containers are, or not at all.

    Raises:
        RunConflict: they are elsewhere.
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
