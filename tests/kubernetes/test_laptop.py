"""From outside of the cluster a run is seen and steered with its store and a kubeconfig alone."""

from __future__ import annotations

import pytest
import yaml

from tests.kubernetes.runs import LIMIT_S, START_S, perdure
from tests.waiting import wait_for

STEPS = 400

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


def test_status_logs_and_a_pause_work_through_the_port_forward(runs, tmp_path):
    # The supervisor goes the same way: it, too, is outside of the cluster.
    job = runs.job("laptop", steps=STEPS, engine={"reach": "port_forward"})
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job.model_dump(mode="json")))
    supervisor = runs.supervise(job, tmp_path / "supervisor")
    try:
        wait_for(lambda: runs.kept(job) >= 10, timeout_s=START_S, period_s=0.5, what="10 steps")
        perdure(runs, file, "pause")
        wait_for(lambda: "paused" in perdure(runs, file, "status"), what="it is paused")
        # A paused run waits for all that is asked, however slow the machine.
        status = perdure(runs, file, "status")
        placed = runs.history(job).placement
        assert placed is not None
        assert all(member.node in status for member in placed.members), status
        perdure(runs, file, "logs", "--rank", "3")  # of a rank that prints nothing
        perdure(runs, file, "resume")
        assert supervisor.wait(timeout=LIMIT_S) == 0
    finally:
        supervisor.kill()
    played = runs.played(job)
    assert len(played.outcome.curve) == STEPS
    assert played.answers == []
    assert played.leftovers == []


@pytest.mark.long
def test_a_run_is_cancelled_with_the_store_alone_and_without_its_prefect_server(runs, tmp_path):
    job = runs.job("cancelled", steps=STEPS)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job.model_dump(mode="json")))
    supervisor = runs.supervise(job, tmp_path / "supervisor")
    try:
        wait_for(lambda: runs.kept(job) >= 10, timeout_s=START_S, period_s=0.5, what="10 steps")
        assert "its supervisor cancels it" in perdure(runs, file, "cancel")
        assert supervisor.wait(timeout=LIMIT_S) == 1
    finally:
        supervisor.kill()
    history = runs.history(job)
    assert history.ended is not None
    assert (history.ended.outcome, history.attempts[-1].fault) == ("cancelled", None)
    assert runs.leftovers(job) == []
    assert "has ended already: cancelled" in perdure(runs, file, "cancel")
