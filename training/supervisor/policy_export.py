"""The restart policy of a job in the words of another platform."""

from __future__ import annotations

from collections.abc import Iterator

from perdure.storage.frozen_model import FrozenModel
from perdure.training.config.job import Job
from perdure.training.platforms.forms import Platform
from perdure.training.platforms.printing import ExportedPolicy, print_platform
from perdure.training.platforms.settings import POLICY_FIELDS, Value


def export_policy(job: Job, platform: Platform) -> ExportedPolicy:
    """The entries of `platform` that come closest to a job's policy, and what they cannot hold."""
    spec = job.restart
    extras = dict(_departures(spec))
    # Always there, since the platform's default is not ours.
    if platform is Platform.MINDFORMERS and spec.numeric_retry:
        extras["snapshot_every_steps"] = spec.snapshot_every_steps
    policy = spec.policy(operator_retry=job.comm.op_retry.enabled)
    return print_platform(policy, platform, extras=extras)


def _departures(spec: FrozenModel, within: str = "") -> Iterator[tuple[str, Value]]:
    """Fields that are no part of the ladder's policy and are not our default, with their values."""
    default = type(spec)()
    for name in type(spec).model_fields:
        value = getattr(spec, name)
        if isinstance(value, FrozenModel):
            yield from _departures(value, f"{name}.")
        elif value != getattr(default, name) and name not in {*POLICY_FIELDS, "from_platform"}:
            yield within + name, value
