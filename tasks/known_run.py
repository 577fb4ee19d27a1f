"""A run as the machine that runs this process has it."""

from __future__ import annotations

from perdure.tasks.credentials import credentials_of
from perdure.training.config.job import Job
from perdure.training.files import home_folder
from perdure.training.supervisor.run import Run


def run_of(job: Job) -> Run:
    """The run of a job in this machine's home, with the credentials of its storage."""
    return Run(job, home=home_folder(), credentials=credentials_of(job.storage))
