"""A run whose containers find no room, or no image, waits for them and says so.

Healthy members keep their pods meanwhile, one record tells the wait, and no restart is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from perdure.training.recovery.faults import FaultClass
from perdure.training.reporting.summary import faults_by_class
from perdure.training.supervisor.run_supervisor import RunSupervisor
from tests.kubernetes.conftest import Create
from tests.kubernetes.lab.cluster import Lab
from tests.kubernetes.runs import (
    SLOW_S,
    STEPS,
    WAITS_S,
    ClusterRuns,
    Deed,
    Played,
    assert_shown,
    await_wait,
    node_of,
    play,
    waits_out,
)

NO_ROOM = "waiting for a free node since"
BOTH_OFF_S = 20.0
ALONE = {"node_replace": False, "pod_retries": 1}  # the lost pod is the answer

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(1500)]


def used_up_quota(runs: ClusterRuns, create: Create) -> Deed:
    """A quota has no room for a while."""
    spec = {"hard": {"pods": "0"}}
    kind = {"apiVersion": "v1", "kind": "ResourceQuota", "spec": spec}
    delete = ("delete", "resourcequota", "full", "--namespace", runs.namespace)
    return waits_out(
        runs, NO_ROOM, "exceeded quota: full",
        begin=lambda _run: create({**kind, "metadata": {"name": "full"}}),
        end=lambda _run: runs.cluster.kubectl(*delete),
    )  # fmt: skip


def cordoned_nodes(runs: ClusterRuns, lab: Lab) -> Deed:
    """No node takes a pod for a while; the pods that are there have the only Secrets."""

    def look(_run: RunSupervisor) -> None:
        pods = names_of(runs, "pods")
        assert len(pods) == 2
        assert names_of(runs, "secrets") == pods

    return waits_out(
        runs, NO_ROOM, "nodes are available", look=look,
        begin=lambda _run: lab.kubectl("cordon", *lab.nodes),
        end=lambda _run: lab.kubectl("uncordon", *lab.nodes),
    )  # fmt: skip


def names_of(runs: ClusterRuns, kind: str) -> list[str]:
    """Names of the objects of one kind that belong to members."""
    items = runs.cluster.get(kind, "--namespace", runs.namespace)["items"]
    names = [str(item["metadata"]["name"]) for item in items]
    return sorted(name for name in names if name.startswith("perdure-") and "-m" in name)


def image_gone(runs: ClusterRuns, lab: Lab, without_image: Callable[[str], None]) -> Deed:
    """The node that a pod comes to has no image, and cannot pull it; another has it."""
    free: list[str] = []

    def take(run: RunSupervisor) -> None:
        free[:] = sorted(set(lab.nodes) - {node_of(run, 0)})
        without_image(free[0])
        lab.kubectl("cordon", free[1])  # so that the pod comes to the other

    return waits_out(
        runs, "ImagePull", begin=take, end=lambda _run: lab.kubectl("uncordon", free[1])
    )


def assert_waited_once(played: Played) -> None:
    """The run has waited, on one record, and no rung has failed."""
    history = played.history
    assert [placed.placement for placed in history.placements] == [1, 2]
    assert history.placements[-1].waited_s > WAITS_S / 2
    assert not any(view.failed_rungs for view in history.attempts)
    assert history.isolated == ()


@pytest.mark.parametrize(
    ("pod_retries", "rung"),
    [(1, "pod_reschedule"), (0, "job_reschedule")],
)
def test_a_used_up_quota_is_waited_for_and_the_healthy_member_keeps_its_pod(
    runs, create, pod_retries, rung
):
    played = play(
        runs,
        "quota",
        used_up_quota(runs, create),
        steps=STEPS // 2,
        restart={**ALONE, "pod_retries": pod_retries},
        pace_s=SLOW_S,
    )
    assert played.answers == [("container_lost", rung)]
    assert_waited_once(played)


def test_a_pod_that_no_node_takes_waits_in_the_queue_and_its_secret_is_the_only_new_one(runs, lab):
    played = play(
        runs,
        "pending",
        cordoned_nodes(runs, lab),
        engine={"warm_spares": 0},
        restart=ALONE,
        pace_s=SLOW_S,
    )
    assert played.answers == [("container_lost", "pod_reschedule")]
    assert_waited_once(played)


def test_two_nodes_lost_at_once_are_two_faults_and_the_run_waits_for_one_of_them(runs, lab):
    def lose(run: RunSupervisor) -> None:
        for node in [node_of(run, 0), node_of(run, 1)]:
            lab.power_off(node)
        try:
            await_wait(run, "nodes are available")
            time.sleep(BOTH_OFF_S)
            assert_shown(runs, run, NO_ROOM)
        finally:
            lab.restore()

    played = play(runs, "both", Deed(lose), pace_s=SLOW_S)
    assert faults_by_class(played.history)[FaultClass.NODE_LOST] == 2
    recoveries = [one for view in played.history.attempts for one in view.recoveries]
    assert all(one.ended is not None for one in recoveries)


def test_a_pod_whose_node_cannot_pull_the_image_gets_another_node(runs, lab, without_image):
    played = play(runs, "image", image_gone(runs, lab, without_image), restart=ALONE, pace_s=SLOW_S)
    assert played.answers == [("container_lost", "pod_reschedule")]
    assert not any(view.failed_rungs for view in played.history.attempts)
    assert played.history.isolated == ()
