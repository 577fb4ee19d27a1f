"""A run as this machine has it, and the flow runs that its ledger names.

A name is not enough to find a run's flow runs. Machines that share a server have stores of their
own and count `{n}` each for itself, so two runs of one name may train at once.
"""

from __future__ import annotations

from uuid import UUID

from perdure.tasks.credentials import credentials_of
from perdure.training.config.job import Job
from perdure.training.files import home_folder
from perdure.training.journal.history import RunHistory
from perdure.training.supervisor.run_handle import RunHandle
from perdure.training.supervisor.run_supervisor import RunSupervisor


def run_of(job: Job) -> RunHandle:
    """The run of a job in this machine's home, with the credentials of its storage."""
    return RunHandle(job, home=home_folder(), credentials=credentials_of(job.storage))


def supervisor_of(job: Job) -> RunSupervisor:
    """The run of a job, for a process that is about to supervise it."""
    return RunSupervisor(job, home=home_folder(), credentials=credentials_of(job.storage))


def flow_runs_of(history: RunHistory, flow_run_id: UUID | None = None) -> list[UUID]:
    """List the flow runs that have supervised a run, the newest last.

    Args:
        history: ledger of the run, as read.
        flow_run_id: the calling flow run, which counts before the ledger names it.
    """
    named = list(map(UUID, history.flow_runs))
    return named if flow_run_id is None or flow_run_id in named else [*named, flow_run_id]
