"""What tests of supervising start from."""

from __future__ import annotations

import pytest

from perdure.training.config.job import Job
from perdure.training.supervisor import attempt_watch
from tests.jobs import small_job


@pytest.fixture
def job(tmp_path) -> Job:
    return small_job(
        tmp_path,
        run_id="walk",
        worker={"command": ["true"]},
        engine={"nodes": 2, "slots_per_node": 1, "spares": 1, "grace_s": 0.1},
        restart={"pod_retries": 1, "spare_wait_s": 0},
    )


@pytest.fixture
def without_waits(monkeypatch):
    """A watcher that neither waits for others to report nor between two looks."""
    monkeypatch.setattr(attempt_watch, "SETTLE_S", 0.0)
