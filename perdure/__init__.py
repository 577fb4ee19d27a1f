"""Pretraining that outlasts its faults: the public face of Perdure.

A training program joins its run and loops over its steps::

    session = perdure.join()
    session.register(model=model, optimizer=optimizer, data=loader)
    for step in session.steps(until=1000):
        with step:
            step.backward(model(step.batch()))
            step.apply()

A notebook reads what the run has saved::

    reader = perdure.checkpoints("my-run")
    weights = reader.load(names="model/*")

A name is imported on first use, so that a command line that only reads a job does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.reader import checkpoints
    from perdure.training.config.job import Job
    from perdure.training.config.job_file import load_job
    from perdure.training.recovery.replicas import ParallelLayout
    from perdure.training.runtime.session import Session, join

__all__ = ["Job", "ParallelLayout", "Session", "checkpoints", "join", "load_job"]

_HOMES = {
    "Job": "perdure.training.config.job",
    "ParallelLayout": "perdure.training.recovery.replicas",
    "Session": "perdure.training.runtime.session",
    "checkpoints": "perdure.reader",
    "join": "perdure.training.runtime.session",
    "load_job": "perdure.training.config.job_file",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'perdure' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
