"""Pods of a higher PriorityClass take the nodes of a run: it gives all back and waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from perdure.training.config.pod_rules import amount_of
from perdure.training.drill.evaluation import differences
from perdure.training.supervisor.run_supervisor import RunSupervisor
from tests.kubernetes.lab.cluster import Lab
from tests.kubernetes.pods import pod
from tests.kubernetes.runs import ClusterRuns, Deed
from tests.waiting import wait_for

STEPS = 150
PRIORITIES = {"perdure-test-low": 1, "perdure-test-high": 1000}
GIVEN_BACK_S = 240.0

pytestmark = [pytest.mark.long, pytest.mark.process, pytest.mark.timeout(1500)]


@pytest.fixture
def classes(lab: Lab) -> Iterator[None]:
    """Two PriorityClasses."""
    api = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass"}
    lab.create(*({**api, "metadata": {"name": n}, "value": v} for n, v in PRIORITIES.items()))
    yield
    lab.kubectl("delete", "priorityclass", *PRIORITIES)


def _greedy(runs: ClusterRuns, lab: Lab, node: str) -> dict[str, Any]:
    """A pod that leaves no room on a node for another one of a run."""
    allocatable = lab.get("node", node)["status"]["allocatable"]["memory"]
    wanted = int(amount_of(allocatable) * 3 / 4)
    document = pod(lab, f"urgent-{node}", ["sleep", "infinity"], node=node)
    document["metadata"]["namespace"] = runs.namespace
    document["spec"]["priorityClassName"] = "perdure-test-high"
    document["spec"]["containers"][0]["resources"] = {"requests": {"memory": str(wanted)}}
    return document


def test_a_preempted_run_gives_all_back_and_goes_on_when_there_is_room_again(runs, lab, classes):
    smallest = min(
        amount_of(lab.get("node", node)["status"]["allocatable"]["memory"]) for node in lab.nodes
    )
    held: list[int] = []

    def preempt(run: RunSupervisor) -> None:
        lab.create(*(_greedy(runs, lab, node) for node in lab.nodes))

        def none_runs() -> bool:
            phases = [one["status"].get("phase") for one in _agents(lab, runs)]
            return bool(phases) and "Running" not in phases

        wait_for(none_runs, timeout_s=GIVEN_BACK_S, period_s=0.5, what="the nodes are given back")
        held.append(len(run.history.attempts))
        names = [f"urgent-{node}" for node in lab.nodes]
        lab.kubectl("delete", "pod", *names, "--namespace", runs.namespace, "--grace-period=1")

    section = {
        "priority_class": "perdure-test-low", "warm_spares": 0,
        "resources": {"memory": str(int(smallest / 2))},
    }  # fmt: skip
    job = runs.job("preempted", steps=STEPS, engine=section, restart={"max_restarts": 1})
    played = runs.run(job, Deed(preempt))
    assert held == [1], "no attempt was begun without room"
    assert played.answers == [("preempted", "job_reschedule")]
    assert "preempted" in played.evidence[0].lower()
    undisturbed = runs.undisturbed(job)
    assert differences(played.outcome.curve, undisturbed.curve) == []
    assert played.history.isolated == ()
    assert played.leftovers == []


def _agents(lab: Lab, runs: ClusterRuns) -> list[dict[str, Any]]:
    selector = ("--selector", "app.kubernetes.io/component=agent")
    items: list[dict[str, Any]] = lab.get("pods", "--namespace", runs.namespace, *selector)["items"]
    return items
