"""Which engine gives a job its containers: one line for each `kind` of the job's engine section."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from training.engines.base import Engine
from training.engines.fleet import Fleet
from training.engines.local import LocalEngine
from training.errors import InputError
from training.job import Job

ENGINES: Mapping[str, Callable[..., Engine]] = {"local": LocalEngine}


def make_engine(
    job: Job, *, home: Path, epoch: int, secrets_env: Mapping[str, str], created_s: float
) -> Engine:
    """The engine of a job.

    Args:
        job: its engine section names the kind.
        home: Perdure's folder on this machine.
        epoch: the supervisor's; agents obey the highest they have received.
        secrets_env: storage credentials for the agents' environment.
        created_s: when the run was created, seconds since the epoch; nodes' disks keep what
            belongs to this run alone, not to an earlier one of its name that was deleted.

    Raises:
        InputError: there is no engine of that kind.
    """
    if job.engine.kind not in ENGINES:
        raise InputError("engine.kind", f"{job.engine.kind!r} has no engine in the registry")
    make = ENGINES[job.engine.kind]
    return make(job, home=home, epoch=epoch, secrets_env=secrets_env, created_s=created_s)


def make_fleet(
    job: Job, *, home: Path, epoch: int, secrets_env: Mapping[str, str], created_s: float
) -> Fleet:
    """The engine of a job with what speaks to the agents; the arguments of `make_engine`."""
    engine = make_engine(job, home=home, epoch=epoch, secrets_env=secrets_env, created_s=created_s)
    return Fleet(engine, job, epoch=epoch)
