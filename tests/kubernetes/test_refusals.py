"""A refusal of the API server is no fault of a node, and a lost Secret costs its pod alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.training.config.job import Job
from tests.kubernetes.runs import (
    LIMIT_S,
    SLOW_S,
    START_S,
    STEPS,
    ClusterRuns,
    Deed,
    assert_as_undisturbed,
    file_of,
    perdure,
    play,
    waits_out,
)
from tests.kubernetes.webhook import DENIED, Webhook
from tests.waiting import wait_for

ALONE = {"node_replace": False, "pod_retries": 3}  # the lost pod is the answer
REFUSED = "waiting for the platform"

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(1500)]


def refused_rights(runs: ClusterRuns, bind: Callable[[bool], None]) -> Deed:
    """The supervisor has no rights for a while."""
    return waits_out(
        runs, REFUSED, "forbidden", begin=lambda _run: bind(False), end=lambda _run: bind(True)
    )


def refused_by_webhook(runs: ClusterRuns, webhook: Webhook) -> list[Deed]:
    """An admission webhook says no, or does not answer."""
    denied = waits_out(
        runs, REFUSED, DENIED,
        begin=lambda run: webhook.deny(run.job.run_id), end=lambda _run: webhook.end(),
    )  # fmt: skip
    absent = waits_out(
        runs, REFUSED, "failed calling webhook",
        begin=lambda run: webhook.fail(run.job.run_id), end=lambda _run: webhook.end(),
    )  # fmt: skip
    return [denied, absent]


def test_a_refusal_by_the_api_server_is_waited_for_and_is_no_fault_of_a_node(runs, bind, webhook):
    deeds = [refused_rights(runs, bind), *refused_by_webhook(runs, webhook)]
    played = play(runs, "refused", *deeds, steps=2 * STEPS, restart=ALONE, pace_s=SLOW_S)
    assert played.answers == [("container_lost", "pod_reschedule")] * 3
    assert played.history.isolated == ()
    assert [placed.placement for placed in played.history.placements] == [1, 2, 3, 4]
    assert not any(view.failed_rungs for view in played.history.attempts)


def test_a_run_that_may_take_nothing_down_has_its_end_on_record_and_is_taken_down_later(
    runs, bind, tmp_path
):
    job = runs.job("ended", steps=STEPS)
    supervisor = runs.supervise(job, tmp_path / "supervisor")
    wait_for(lambda: runs.kept(job) >= 10, timeout_s=START_S, period_s=0.5, what="10 steps")
    bind(False)
    supervisor.wait(timeout=LIMIT_S)
    ended = runs.history(job).ended
    assert ended is not None
    assert ended.outcome == "completed"
    assert "forbidden" in ended.leftovers
    assert len([name for name in runs.leftovers(job) if name.startswith("Pod ")]) == 2
    bind(True)
    assert "was left over is taken down" in perdure(runs, file_of(runs, job), "cancel")
    assert_as_undisturbed(runs.played(job), runs.undisturbed(job))


def lose_secret(runs: ClusterRuns, name: str, folder: Path) -> tuple[Job, str]:
    """Have a run train whose second member has lost its Secret, and which has no supervisor."""
    job = runs.job(name, steps=STEPS, restart=ALONE, pace_s=SLOW_S)
    first = runs.supervise(job, folder / "first")
    wait_for(lambda: runs.kept(job) >= 20, timeout_s=START_S, period_s=0.5, what="20 steps")
    secret = runs.pod(job, 1)
    runs.cluster.kubectl("delete", "secret", secret, "--namespace", runs.namespace)
    first.kill()
    first.wait()
    return job, secret


def test_a_member_whose_secret_is_lost_is_replaced_by_the_next_supervisor(runs, tmp_path):
    job, secret = lose_secret(runs, "secret", tmp_path)
    second = runs.supervise(job, tmp_path / "second")
    assert second.wait(timeout=LIMIT_S) == 0
    played = runs.played(job)
    assert_as_undisturbed(played, runs.undisturbed(job))
    assert played.answers == [("container_lost", "pod_reschedule")]
    assert f"Secret {secret}" in played.evidence[0]
    assert played.history.isolated == ()


def test_a_run_that_has_lost_a_secret_is_cancelled(runs, tmp_path):
    job, _ = lose_secret(runs, "no-order", tmp_path)
    perdure(runs, file_of(runs, job), "cancel")
    ended = runs.history(job).ended
    assert ended is not None
    assert (ended.outcome, ended.leftovers) == ("cancelled", "")
    assert runs.leftovers(job) == []
