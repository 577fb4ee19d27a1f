"""Whether a node could take a pod, by what both documents say. Pure.

As the scheduler's filters of 1.20 and later have it (NodeUnschedulable, TaintToleration,
NodeAffinity by nodeSelector, NodeResourcesFit against the node's whole room):
https://kubernetes.io/docs/reference/scheduling/config/#scheduling-plugins. What other pods take
of a node is not in its document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from perdure.training.engines.kubernetes.image_name import image_name
from perdure.training.engines.kubernetes.objects import Document
from perdure.training.specs.quantity import amount_of

UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
_KEEPING_OUT = ("NoSchedule", "NoExecute")


def lacks(node: Document, pod: Mapping[str, Any]) -> list[str]:
    """What a node lacks for a pod; empty: it fits.

    Args:
        node: the node's document.
        pod: the `spec` of the pod.
    """
    return [*_readiness(node, pod), *_labels(node, pod), *_taints(node, pod), *_room(node, pod)]


def _readiness(node: Document, pod: Mapping[str, Any]) -> Iterator[str]:
    conditions = (node.get("status") or {}).get("conditions") or ()
    if not any(one["type"] == "Ready" and one["status"] == "True" for one in conditions):
        yield "not ready"
    is_cordoned = (node.get("spec") or {}).get("unschedulable")
    taint = {"key": UNSCHEDULABLE, "effect": "NoSchedule"}
    if is_cordoned and not _tolerated(taint, pod):
        yield "cordoned"


def _labels(node: Document, pod: Mapping[str, Any]) -> Iterator[str]:
    labels = node["metadata"].get("labels") or {}
    for name, value in (pod.get("nodeSelector") or {}).items():
        if labels.get(name) != value:
            has = f"{name}={labels[name]}" if name in labels else "none"
            yield f"no label {name}={value} ({has})"


def _taints(node: Document, pod: Mapping[str, Any]) -> Iterator[str]:
    for taint in (node.get("spec") or {}).get("taints") or ():
        is_told = taint["key"] == UNSCHEDULABLE  # as cordoned
        if taint.get("effect") in _KEEPING_OUT and not is_told and not _tolerated(taint, pod):
            value = f"={taint['value']}" if taint.get("value") else ""
            yield f"taint {taint['key']}{value}:{taint['effect']}"


def _tolerated(taint: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
    return any(_tolerates(one, taint) for one in pod.get("tolerations") or ())


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    exists = toleration.get("operator") == "Exists"
    if not toleration.get("key"):
        return exists
    same_value = (toleration.get("value") or "") == (taint.get("value") or "")
    return toleration["key"] == taint["key"] and (exists or same_value)


def _room(node: Document, pod: Mapping[str, Any]) -> Iterator[str]:
    offered = (node.get("status") or {}).get("allocatable") or {}
    for name, wanted in wanted_of(pod).items():
        has = amount_of(str(offered.get(name, "0")))
        if has < wanted:
            yield f"{name} {offered.get(name, 'not offered')} of {_plain(wanted)}"


def wanted_of(pod: Mapping[str, Any]) -> dict[str, Decimal]:
    """Amounts that the containers of a pod ask for together."""
    total: dict[str, Decimal] = {}
    for container in pod["containers"]:
        for name, amount in ((container.get("resources") or {}).get("requests") or {}).items():
            total[name] = total.get(name, Decimal(0)) + amount_of(str(amount))
    return total


def _plain(amount: Decimal) -> str:
    return f"{amount.normalize():f}"


def image_nodes(image: str, nodes: Sequence[Document]) -> list[str]:
    """Names of the nodes whose list of images has one."""
    wanted = _complete(image)
    return [
        node["metadata"]["name"]
        for node in nodes
        if any(
            _complete(name) == wanted
            for one in (node.get("status") or {}).get("images") or ()
            for name in one.get("names") or ()
        )
    ]


def _complete(image: str) -> str:
    try:
        return str(image_name(image))
    except ValueError:  # nodes list images without a name, as <none>@<none>
        return image
