"""A run as the machine that runs this process has it."""

from __future__ import annotations

from perdure.tasks.credentials import credentials_of
from perdure.training.config.job import Job
from perdure.training.files import home_folder
from perdure.training.supervisor.run_handle import RunHandle
from perdure.training.supervisor.run_supervisor import RunSupervisor


def run_of(job: Job) -> RunHandle:
    """The run of a job in this machine's home, with the credentials of its storage."""
    return RunHandle(job, home=home_folder(), credentials=credentials_of(job.storage))


def supervisor_of(job: Job) -> RunSupervisor:
    """The same for a process that is about to take the run."""
    return RunSupervisor(job, home=home_folder(), credentials=credentials_of(job.storage))
