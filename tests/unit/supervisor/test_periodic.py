"""Restarts that a job asks for every so often: when they are due, and who may ask."""

from __future__ import annotations

import pytest

from perdure.training.errors import InputError
from perdure.training.supervisor.health_watch import PeriodicRestart
from perdure.training.supervisor.watch import EndKind, Progress, WatchResult
from tests.jobs import small_job


def test_a_restart_is_due_at_the_first_commit_after_so_long():
    periodic = PeriodicRestart(100.0, started_s=1000.0)
    assert periodic.check(Progress(checkpoints=[10], at_s=1099.9)) is None
    assert periodic.check(Progress(checkpoints=[], at_s=1150.0)) is None
    restart = periodic.check(Progress(checkpoints=[20], at_s=1160.0))
    assert restart == WatchResult(EndKind.RESTARTED)


def test_a_job_that_does_not_ask_is_never_restarted_so():
    periodic = PeriodicRestart(None, started_s=0.0)
    assert periodic.check(Progress(checkpoints=[10], at_s=1e9)) is None


def test_a_command_is_refused_where_its_commits_are_not_known():
    with pytest.raises(InputError, match=r"restart.every_s=60 needs worker.checkpoints"):
        small_job(worker={"command": ["train"]}, restart={"every_s": 60})
    saves = {"kind": "nanogpt", "path": "/out"}
    job = small_job(worker={"command": ["train"], "checkpoints": saves}, restart={"every_s": 60})
    assert job.restart.every_s == 60
