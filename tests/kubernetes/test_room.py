"""A run whose containers find no room, or no image, waits for them and says so.

Healthy members keep their pods meanwhile, one record tells the wait, and no restart is used.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from perdure.training.recovery.faults import FaultClass
from perdure.training.reporting.summary import faults_by_class
from perdure.training.supervisor.run_supervisor import RunSupervisor
from tests.kubernetes.runs import (
    WAITS_S,
    ClusterRuns,
    Deed,
    Played,
    await_wait,
    file_of,
    node_of,
    perdure,
    play,
    waits_out,
)

NO_ROOM = "waiting for a free node since"
BOTH_OFF_S = 20.0
ALONE = {"node_replace": False, "pod_retries": 1}  # the lost pod is the answer
FEW = 60

pytestmark = [pytest.mark.process, pytest.mark.timeout(1500)]


def quota() -> dict[str, Any]:
    """A quota that is used up whatever there is."""
    spec = {"hard": {"pods": "0"}}
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "full"}, "spec": spec}


def assert_waited_once(played: Played) -> None:
    """The run has waited, on one record, and no rung has failed."""
    history = played.history
    assert [placed.placement for placed in history.placements] == [1, 2]
    assert history.placements[-1].waited_s > WAITS_S / 2
    assert not any(view.failed_rungs for view in history.attempts)
    assert history.isolated == ()


@pytest.mark.parametrize(
    ("pod_retries", "rung"),
    [(1, "pod_reschedule"), pytest.param(0, "job_reschedule", marks=pytest.mark.long)],
)
def test_a_used_up_quota_is_waited_for_and_the_healthy_member_keeps_its_pod(
    runs, create, pod_retries, rung
):
    delete = ("delete", "resourcequota", "full", "--namespace", runs.namespace)
    full = waits_out(
        runs, NO_ROOM, "exceeded quota: full",
        begin=lambda _run: create(quota()), end=lambda _run: runs.cluster.kubectl(*delete),
    )  # fmt: skip
    played = play(runs, "quota", full, steps=FEW, restart={**ALONE, "pod_retries": pod_retries})
    assert played.answers == [("container_lost", rung)]
    assert_waited_once(played)


def names_of(runs: ClusterRuns, kind: str) -> list[str]:
    """Names of the objects of one kind that belong to members."""
    items = runs.cluster.get(kind, "--namespace", runs.namespace)["items"]
    names = [str(item["metadata"]["name"]) for item in items]
    return sorted(name for name in names if name.startswith("perdure-") and "-m" in name)


@pytest.mark.long
def test_a_pod_that_no_node_takes_waits_in_the_queue_and_its_secret_is_the_only_new_one(runs, lab):
    def look(_run: RunSupervisor) -> None:
        pods = names_of(runs, "pods")
        assert len(pods) == 2
        assert names_of(runs, "secrets") == pods

    pending = waits_out(
        runs, NO_ROOM, "nodes are available", look=look,
        begin=lambda _run: lab.kubectl("cordon", *lab.nodes),
        end=lambda _run: lab.kubectl("uncordon", *lab.nodes),
    )  # fmt: skip
    played = play(runs, "pending", pending, steps=FEW, engine={"warm_spares": 0}, restart=ALONE)
    assert played.answers == [("container_lost", "pod_reschedule")]
    assert_waited_once(played)


@pytest.mark.long
def test_two_nodes_lost_at_once_are_two_faults_and_the_run_waits_for_one_of_them(runs, lab):
    def lose(run: RunSupervisor) -> None:
        for node in [node_of(run, 0), node_of(run, 1)]:
            lab.power_off(node)
        await_wait(run, "nodes are available")
        time.sleep(BOTH_OFF_S)
        assert NO_ROOM in perdure(runs, file_of(runs, run.job), "status")
        lab.restore()

    played = play(runs, "both", Deed(lose), steps=FEW)
    assert faults_by_class(played.history)[FaultClass.NODE_LOST] == 2
    recoveries = [one for view in played.history.attempts for one in view.recoveries]
    assert all(one.ended is not None for one in recoveries)


@pytest.mark.long
def test_a_pod_whose_node_cannot_pull_the_image_gets_another_node(runs, lab, without_image):
    nodes: list[str] = []

    def take(run: RunSupervisor) -> None:
        nodes.extend(sorted(set(lab.nodes) - {node_of(run, 0)}))
        without_image(nodes[0])
        lab.kubectl("cordon", nodes[1])  # so that the pod comes to the other

    image = waits_out(
        runs, "ImagePull", begin=take, end=lambda _run: lab.kubectl("uncordon", nodes[1])
    )
    played = play(runs, "image", image, steps=FEW, restart=ALONE)
    assert played.answers == [("container_lost", "pod_reschedule")]
    assert played.history.placements[-1].members[1].node == nodes[1]
    assert not any(view.failed_rungs for view in played.history.attempts)
    assert played.history.isolated == ()
