"""The nodes of a cluster: their problems, their cordons, and whether a node could take a pod.

Without the rights to list and watch nodes, all of them count as sound. A node fits a pod by the
scheduler's filters of 1.20 and later (NodeUnschedulable, TaintToleration, NodeAffinity by
nodeSelector, NodeResourcesFit against the node's whole room):
https://kubernetes.io/docs/reference/scheduling/config/#scheduling-plugins. The room that other pods
take is not in a node's document.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from perdure.training.config.engine import KubernetesEngineSpec
from perdure.training.config.pod_rules import amount_of
from perdure.training.engines.kubernetes.api import NODES, Api, ApiError
from perdure.training.engines.kubernetes.image_registry import image_name
from perdure.training.engines.kubernetes.objects import Document
from perdure.training.engines.kubernetes.pods import condition_of
from perdure.training.engines.kubernetes.watching import Informer

# Names the run that cordoned a node: it lifts no other cordon.
CORDONED_BY = "perdure.io/cordoned-by"
NO_NODE = "the node was deleted from the cluster"
UNSELECTED = f"{NO_NODE}, or has lost a label of engine.node_selector"
UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
CORDONED = "cordoned"  # what such a node lacks
_KEEPING_OUT = ("NoSchedule", "NoExecute")

_log = logging.getLogger("perdure.engine")


class ClusterNodes:
    """The nodes that the job's selector allows.

    Args:
        api: their cluster.
        spec: the engine section of the job.
        run_id: marks the cordons of this run.
    """

    def __init__(self, api: Api, spec: KubernetesEngineSpec, run_id: str) -> None:
        self._api, self._spec, self._run_id = api, spec, run_id
        labels = ",".join(f"{name}={value}" for name, value in spec.node_selector.items())
        self._informer: Informer | None = Informer(api, NODES, labels=labels)
        self._is_listed = False

    def start(self) -> None:
        """Begin to watch the nodes; without the right to do so, nothing is known of them."""
        try:
            if self._informer is not None:
                self._informer.start()
                self._is_listed = True
        except ApiError as error:
            if not error.is_forbidden:
                raise
            _log.info("what the cluster says of its nodes is not known: %s", error)
            self._informer = None

    @property
    def names(self) -> Sequence[str]:
        """Names of the known nodes."""
        return sorted(self._by_name)

    def problem(self, node: str) -> str:
        """Explain why the cluster does not trust a node; "" where it does, or does not know it."""
        if absence := self.absence(node):
            return absence
        document = self._by_name.get(node)
        return node_problem(document) if document is not None else ""

    def absence(self, node: str) -> str:
        """Explain the absence of a node; "" where it is there, or nothing is known of nodes."""
        if self._informer is None or not self._is_listed or not node:
            return ""
        if node in self._informer.objects:
            return ""
        return UNSELECTED if self._spec.node_selector else NO_NODE

    def fitting(self, pod: Mapping[str, Any]) -> frozenset[str] | None:
        """Names of the nodes whose whole room fits a pod; None: nothing is known of nodes.

        A cordon of this run shows an isolation that the ledger has, or had.

        Args:
            pod: the `spec` of the pod.
        """
        if self._informer is None or not self._is_listed:
            return None
        ours = self.cordoned
        return frozenset(
            name
            for name, node in self._by_name.items()
            if {*lacks(node, pod)} <= ({CORDONED} if name in ours else frozenset())
        )

    @property
    def failure_domains(self) -> Mapping[str, str]:
        """Failure domains by node, as the first label of `engine.topology` has them."""
        label = next(iter(self._spec.topology), None)
        labels = {n: node["metadata"].get("labels") or {} for n, node in self._by_name.items()}
        return {n: values[label] for n, values in labels.items() if label in values}

    @property
    def _by_name(self) -> Mapping[str, Document]:
        return self._informer.objects if self._informer is not None else {}

    @property
    def cordoned(self) -> set[str]:
        """Names of the known nodes that this run has cordoned."""
        return {
            name
            for name, node in self._by_name.items()
            if (node["metadata"].get("annotations") or {}).get(CORDONED_BY) == self._run_id
        }

    def isolate(self, avoided: Collection[str]) -> None:
        """Cordon avoided nodes, and lift the cordons of this run from all others."""
        if not self._spec.cordon:
            return
        by_name, ours = self._by_name, self.cordoned
        for node in set(avoided) - ours:
            if not (by_name.get(node, {}).get("spec") or {}).get("unschedulable"):
                self._set(node, unschedulable=True, by=self._run_id)
        for node in ours - set(avoided):
            self._set(node, unschedulable=None, by=None)

    def _set(self, node: str, *, unschedulable: bool | None, by: str | None) -> None:
        changes = {
            "metadata": {"annotations": {CORDONED_BY: by}},
            "spec": {"unschedulable": unschedulable},
        }
        verb = "cordoned" if unschedulable else "uncordoned"
        try:
            self._api.patch(NODES, node, changes)
        except ApiError as error:
            _log.warning("node %s could not be %s: %s", node, verb, error)
            return
        _log.warning("node %s is %s", node, verb)


def lacks(node: Document, pod: Mapping[str, Any]) -> list[str]:
    """List what a node lacks for a pod; empty: it fits.

    Args:
        node: the node's document.
        pod: the `spec` of the pod.
    """
    return [*_readiness(node, pod), *_labels(node, pod), *_taints(node, pod), *_room(node, pod)]


def _readiness(node: Document, pod: Mapping[str, Any]) -> Iterator[str]:
    if condition_of(node, "Ready").get("status") != "True":
        yield "not ready"
    is_cordoned = (node.get("spec") or {}).get("unschedulable")
    taint = {"key": UNSCHEDULABLE, "effect": "NoSchedule"}
    if is_cordoned and not _tolerated(taint, pod):
        yield CORDONED


def _labels(node: Document, pod: Mapping[str, Any]) -> Iterator[str]:
    labels = node["metadata"].get("labels") or {}
    for name, value in (pod.get("nodeSelector") or {}).items():
        if labels.get(name) != value:
            has = f"{name}={labels[name]}" if name in labels else "none"
            yield f"no label {name}={value} ({has})"


def _taints(node: Document, pod: Mapping[str, Any]) -> Iterator[str]:
    for taint in (node.get("spec") or {}).get("taints") or ():
        if taint["key"] == UNSCHEDULABLE:  # reported as cordoned
            continue
        if taint.get("effect") in _KEEPING_OUT and not _tolerated(taint, pod):
            value = f"={taint['value']}" if taint.get("value") else ""
            yield f"taint {taint['key']}{value}:{taint['effect']}"


def _tolerated(taint: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
    return any(_tolerates(toleration, taint) for toleration in pod.get("tolerations") or ())


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
    """Add up the amounts that the containers of a pod request."""
    total: dict[str, Decimal] = {}
    for container in pod["containers"]:
        for name, amount in ((container.get("resources") or {}).get("requests") or {}).items():
            total[name] = total.get(name, Decimal(0)) + amount_of(str(amount))
    return total


def _plain(amount: Decimal) -> str:
    return f"{amount.normalize():f}"


def image_nodes(image: str, nodes: Sequence[Document]) -> list[str]:
    """List the nodes whose list of images has an image."""
    wanted = _complete(image)
    return [
        node["metadata"]["name"]
        for node in nodes
        if any(
            _complete(name) == wanted
            for entry in (node.get("status") or {}).get("images") or ()
            for name in entry.get("names") or ()
        )
    ]


def _complete(image: str) -> str:
    try:
        return str(image_name(image))
    except ValueError:  # nodes list images without a name, as <none>@<none>
        return image


def node_problem(node: Document) -> str:
    """Explain why a node cannot be trusted; "" when it reports as it should."""
    ready = condition_of(node, "Ready")
    if ready.get("status") == "True":
        return ""
    since = f" since {ready['lastTransitionTime']}" if ready.get("lastTransitionTime") else ""
    return f"node is not ready{since}: {ready.get('message') or 'it never reported'}"
