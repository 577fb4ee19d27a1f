"""The engine by itself, on a real cluster: what it finds again, and what it leaves alone."""

from __future__ import annotations

import threading

import pytest

from perdure.training.engines.base import ANY_NODE
from perdure.training.errors import EngineError, NoCapacity
from tests.kubernetes.bare import PLACE_S, placement
from tests.kubernetes.lab.places import NPU_RESOURCE, NPUS_PER_NODE, PAUSE_IMAGE
from tests.waiting import wait_for

pytestmark = pytest.mark.timeout(PLACE_S + 300)


def test_a_gang_that_is_found_again_without_one_of_its_pods_has_lost_that_one(
    engine, lab, namespace
):
    first = engine(run_id="shrunk")
    first.submit(placement(ANY_NODE, ANY_NODE))
    (gone,) = [n for n in first._current.values() if "-m1-" in n]
    lab.kubectl("delete", "pod", gone, "--namespace", namespace, "--grace-period=0", "--force")
    second = engine(run_id="shrunk")
    assert second.adopt(placement(ANY_NODE, "somewhere")) == {0}
    lost = second.contacts()[1]
    assert (lost.address, lost.node) == (None, "somewhere")
    assert lost.loss is not None
    assert second.texts(0.0) == []


def test_a_run_of_the_same_name_with_another_store_is_left_alone(engine):
    first = engine(run_id="twice", nodes=1)
    first.submit(placement(ANY_NODE))
    other = engine(run_id="twice", nodes=1, store="s3://bucket/of-others")
    for attack in (lambda: other.submit(placement(ANY_NODE)), other.inventory, other.end):
        with pytest.raises(EngineError, match=r"has a run twice whose store is s3://bucket/runs"):
            attack()
    assert first.inventory()[0].address is not None


def test_a_pod_that_is_taken_away_before_it_is_up_is_not_waited_for(engine, lab, namespace):
    made = engine(nodes=1, image="lab.local/absent:1", run_id="taken")

    def take() -> None:
        def found() -> list[str]:
            items = lab.get("pods", "--namespace", namespace)["items"]
            return [one["metadata"]["name"] for one in items]

        wait_for(found, what="a pod")
        lab.kubectl("delete", "pod", *found(), "--namespace", namespace, "--grace-period=0")

    threading.Thread(target=take, daemon=True).start()
    with pytest.raises(NoCapacity, match="was taken away"):
        made.submit(placement(ANY_NODE))
    assert made.inventory() == {}


def test_a_pod_that_a_more_important_one_takes_the_place_of_was_preempted(engine, lab, create):
    made = engine(nodes=1, run_id="yields", resources={NPU_RESOURCE: NPUS_PER_NODE})
    made.submit(placement(ANY_NODE))
    name = "perdure-test-important"
    lab.create(
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": name},
            "value": 1000,
        }
    )
    try:
        for number in range(len(lab.nodes)):
            limits = {NPU_RESOURCE: str(NPUS_PER_NODE)}
            container = {"name": "a", "image": PAUSE_IMAGE, "resources": {"limits": limits}}
            spec = {"priorityClassName": name, "containers": [container]}
            metadata = {"name": f"important-{number}"}
            create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})

        def loss() -> str:
            found = made.contacts()[0].loss
            return found.code if found is not None else ""

        wait_for(lambda: loss() == "POD_PREEMPTED", period_s=0.2, what=loss)
    finally:
        lab.kubectl("delete", "priorityclass", name)


def test_an_agent_whose_memory_does_not_suffice_was_ended_by_the_kernel(engine):
    made = engine(nodes=1, run_id="small", resources={"memory": "24Mi"})
    with pytest.raises(EngineError, match="OOMKilled"):
        made.submit(placement(ANY_NODE))
    assert made.inventory() == {}
