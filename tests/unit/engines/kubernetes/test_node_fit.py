"""What a node lacks for a pod, by what both documents say."""

from __future__ import annotations

import pytest

from perdure.training.engines.kubernetes.nodes import image_nodes, lacks

NPU = "huawei.com/Ascend910"


def node(*, ready="True", labels=None, taints=(), cordoned=False, images=(), **allocatable):
    return {
        "metadata": {"name": "n1", "labels": labels or {}},
        "spec": {"taints": list(taints), "unschedulable": cordoned},
        "status": {
            "conditions": [{"type": "Ready", "status": ready}],
            "allocatable": allocatable,
            "images": [{"names": [name]} for name in images],
        },
    }


def pod(*, requests=None, selector=None, tolerations=()):
    return {
        "containers": [{"name": "agent", "resources": {"requests": requests or {}}}],
        "nodeSelector": selector or {},
        "tolerations": list(tolerations),
    }


BROKEN = {"key": "broken", "value": "fan", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("node", "pod", "lacking"),
    [
        (node(), pod(), []),
        (node(ready="Unknown"), pod(), ["not ready"]),
        (node(cordoned=True), pod(), ["cordoned"]),
        (node(cordoned=True), pod(tolerations=[{"operator": "Exists"}]), []),
        (node(labels={"a": "1"}), pod(selector={"a": "1"}), []),
        (node(labels={"a": "2"}), pod(selector={"a": "1"}), ["no label a=1 (a=2)"]),
        (node(), pod(selector={"a": "1"}), ["no label a=1 (none)"]),
        (node(taints=[BROKEN]), pod(), ["taint broken=fan:NoSchedule"]),
        (node(taints=[{**BROKEN, "effect": "PreferNoSchedule"}]), pod(), []),
        (node(taints=[BROKEN]), pod(tolerations=[{"key": "broken", "operator": "Exists"}]), []),
        (node(taints=[BROKEN]), pod(tolerations=[{"key": "broken", "value": "fan"}]), []),
        (
            node(taints=[BROKEN]),
            pod(tolerations=[{"key": "broken", "value": "psu"}]),
            ["taint broken=fan:NoSchedule"],
        ),
        (
            node(taints=[BROKEN]),
            pod(tolerations=[{"key": "broken", "operator": "Exists", "effect": "NoExecute"}]),
            ["taint broken=fan:NoSchedule"],
        ),
        (node(**{NPU: "8"}), pod(requests={NPU: "8"}), []),
        (node(**{NPU: "7"}), pod(requests={NPU: "8"}), [f"{NPU} 7 of 8"]),
        (node(), pod(requests={NPU: "8"}), [f"{NPU} not offered of 8"]),
        (node(memory="2Gi"), pod(requests={"memory": "2147483648"}), []),
        (node(memory="2G"), pod(requests={"memory": "2Gi"}), ["memory 2G of 2147483648"]),
        (node(cpu="2"), pod(requests={"cpu": "2500m"}), ["cpu 2 of 2.5"]),
    ],
)
def test_a_node_lacks_what_the_scheduler_would_miss(node, pod, lacking):
    assert lacks(node, pod) == lacking


@pytest.mark.parametrize(
    ("image", "listed", "is_there"),
    [
        ("lab.local/perdure:1", "lab.local/perdure:1", True),
        ("lab.local/perdure:1", "lab.local/perdure:2", False),
        ("perdure", "docker.io/library/perdure:latest", True),
        ("someone/perdure:1", "docker.io/someone/perdure:1", True),
        ("localhost:5000/perdure", "localhost:5000/perdure:latest", True),
        ("lab.local/p@sha256:00", "lab.local/p@sha256:00", True),
    ],
)
def test_an_image_is_on_a_node_by_its_full_name(image, listed, is_there):
    assert image_nodes(image, [node(images=[listed])]) == (["n1"] if is_there else [])
