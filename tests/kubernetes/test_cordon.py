"""Nodes that a run has isolated are cordoned where its job asks for it, and no others."""

from __future__ import annotations

import pytest

from perdure.training.config.engine import KubernetesEngineSpec
from perdure.training.engines.kubernetes.api import connect
from perdure.training.engines.kubernetes.nodes import ClusterNodes
from tests.kubernetes.runs import engine_section
from tests.waiting import wait_for


@pytest.fixture
def isolate(lab, namespace):
    """Isolates nodes as the engine of a run does, and nothing but these."""
    section = engine_section(lab, namespace, cordon=True)
    api = connect(context=None, namespace=namespace)
    nodes = ClusterNodes(api, KubernetesEngineSpec.model_validate(section), "a-run")
    nodes.start()

    def now(*names: str) -> None:
        nodes.isolate(names)
        wait_for(lambda: nodes.cordoned == set(names), timeout_s=10, what=f"{names} are seen")

    return now


def closed(lab) -> set[str]:
    """Names of the nodes that take no new pods."""
    items = lab.get("nodes")["items"]
    return {one["metadata"]["name"] for one in items if one["spec"].get("unschedulable")}


def test_an_isolated_node_is_cordoned_until_it_is_released(lab, isolate):
    isolate("n1", "n3")
    assert closed(lab) == {"n1", "n3"}
    isolate("n3")
    assert closed(lab) == {"n3"}
    isolate()
    assert closed(lab) == set()


def test_a_node_that_a_person_has_cordoned_stays_so(lab, isolate):
    lab.kubectl("cordon", "n2")
    try:
        isolate("n1")
        isolate()
        assert closed(lab) == {"n2"}
    finally:
        lab.kubectl("uncordon", "n2")
