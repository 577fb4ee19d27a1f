"""The engines, by the `kind` of a job's engine section: each has a line here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from perdure.training.config.job import Job
from perdure.training.engines.base import Engine
from perdure.training.engines.fleet import Fleet
from perdure.training.engines.local import LocalEngine
from perdure.training.errors import InputError
from perdure.training.wire.node import Check


def _kubernetes(job: Job, **options: Any) -> Engine:
    # The client takes a second to import, and most processes use no cluster.
    from perdure.training.engines.kubernetes.engine import KubernetesEngine  # noqa: PLC0415

    return KubernetesEngine(job, **options)


def _launched(job: Job, **options: Any) -> Engine:
    from perdure.training.engines.launched.engine import LaunchedEngine  # noqa: PLC0415 rarely used

    return LaunchedEngine(job, **options)


def _cluster_checks(job: Job) -> Sequence[Check]:
    from perdure.training.engines.kubernetes.cluster_checks import check_cluster  # noqa: PLC0415 same

    return check_cluster(job)


def _launched_checks(job: Job) -> Sequence[Check]:
    from perdure.training.engines.launched.controllers import check_controllers  # noqa: PLC0415

    return (check_controllers(job, os.environ),)


ENGINES: Mapping[str, Callable[..., Engine]] = {
    "local": LocalEngine,
    "kubernetes": _kubernetes,
    "launched": _launched,
}
PLATFORM_CHECKS: Mapping[str, Callable[[Job], Sequence[Check]]] = {
    "kubernetes": _cluster_checks,
    "launched": _launched_checks,
}


def make_engine(
    job: Job, *, home: Path, epoch: int, secrets_env: Mapping[str, str], created_s: float
) -> Engine:
    """Make the engine of a job.

    Args:
        job: its engine section names the kind.
        home: Perdure's folder on this machine.
        epoch: the supervisor's; agents obey the highest that they have received.
        secrets_env: storage credentials for the agents' environment.
        created_s: when the run was created, seconds since the epoch; folders on nodes' disks have
            it in their names, so that no run finds those of a deleted run of the same name.

    Raises:
        InputError: there is no engine of that kind.
    """
    if job.engine.kind not in ENGINES:
        raise InputError("engine.kind", f"{job.engine.kind!r} has no engine in the registry")
    make = ENGINES[job.engine.kind]
    return make(job, home=home, epoch=epoch, secrets_env=secrets_env, created_s=created_s)


def platform_checks(job: Job) -> Sequence[Check]:
    """Check the platform for a job without starting a container.

    Raises:
        InputError: a value of the engine section is wrong.
    """
    return PLATFORM_CHECKS[job.engine.kind](job) if job.engine.kind in PLATFORM_CHECKS else ()


def make_fleet(
    job: Job, *, home: Path, epoch: int, secrets_env: Mapping[str, str], created_s: float
) -> Fleet:
    """Make the fleet of a job on its engine; the arguments are those of `make_engine`."""
    engine = make_engine(job, home=home, epoch=epoch, secrets_env=secrets_env, created_s=created_s)
    return Fleet(engine, job, epoch=epoch)
