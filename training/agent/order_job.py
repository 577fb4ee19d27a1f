"""The job of an attempt on a node."""

from __future__ import annotations

from functools import lru_cache

from perdure.training.job import Job
from perdure.training.wire.agent import StartOrder


def job_of(order: StartOrder) -> Job:
    """The job of an order to start; parsed once, for every part of the agent that asks.

    Raises:
        ValueError: it is no job of this version.
    """
    return _parsed(order.job)


@lru_cache(maxsize=1)
def _parsed(text: str) -> Job:
    return Job.model_validate_json(text)
