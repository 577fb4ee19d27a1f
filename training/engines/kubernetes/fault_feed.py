"""MindCluster's reports in a cluster: what it holds against nodes, where it is there to say so.

ConfigMaps are read by their names, for which the right to get them is enough. Without that right,
or without MindCluster, one line in the log says so and nothing is known. Nothing here fails a run:
these reports only add to what else is known of nodes. Times are seconds since the epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from perdure.training.engines.kubernetes import mindcluster
from perdure.training.engines.kubernetes.api import CONFIG_MAPS, Api, ApiError
from perdure.training.engines.kubernetes.mindcluster import ReportedFault, merged
from perdure.training.wire.agent import NodeLog

DEVICE_NAMESPACE = "kube-system"  # of the device plugin's documents
CLUSTER_NAMESPACE = "mindx-dl"  # of those of noded and ClusterD
MAX_PARTS = 100  # of a document of ClusterD; each has up to 1,000 nodes
_PARALLEL = 16

Parser = Callable[[str, str], dict[str, list[ReportedFault]]]

_log = logging.getLogger("perdure.engine")


class FaultFeed:
    """What MindCluster reports of the nodes of one cluster.

    Args:
        api: of the cluster.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._logged_statuses: set[int] = set()

    def of_cluster(self, nodes: Collection[str]) -> dict[str, list[ReportedFault]]:
        """Faults by node, of all nodes that ClusterD collects.

        Args:
            nodes: that are known otherwise; asked for one by one where there is no ClusterD.
        """
        try:
            return self._of_cluster() or self._of_nodes(nodes)
        except ApiError as error:
            _log.warning("MindCluster's reports are not known: %s", error)
            return {}

    def of_run(self, nodes: Collection[str]) -> dict[str, list[ReportedFault]]:
        """Faults of a few nodes, from all there is: only ClusterD has what others tell it."""
        try:
            # First, for it is one request that fails where all would.
            cluster = self._of_cluster()
            by_node = self._of_nodes(nodes)
        except ApiError as error:
            _log.warning("MindCluster's reports are not known: %s", error)
            return {}
        return {node: merged((by_node[node], cluster.get(node, ()))) for node in nodes}

    def _of_cluster(self) -> dict[str, list[ReportedFault]]:
        """Empty where there is no ClusterD."""
        parts = [*self._numbered("cluster-info-device-", mindcluster.cluster_devices)]
        if not parts:
            return {}
        parts += self._document("cluster-info-node-cm", mindcluster.cluster_nodes)
        parts += self._numbered("cluster-info-switch-", mindcluster.cluster_switches)
        names = sorted({name for part in parts for name in part})
        return {name: merged(part.get(name, ()) for part in parts) for name in names}

    def _of_nodes(self, nodes: Collection[str]) -> dict[str, list[ReportedFault]]:
        """From what is written for each of them alone."""
        with ThreadPoolExecutor(max_workers=_PARALLEL) as pool:
            return dict(zip(nodes, pool.map(self._of_node, nodes), strict=True))

    def _of_node(self, node: str) -> list[ReportedFault]:
        devices = f"{mindcluster.DEVICE_PREFIX}{node}"
        parts = f"{mindcluster.NODE_PREFIX}{node}"
        faults: list[ReportedFault] = []
        if (data := self._data(devices, DEVICE_NAMESPACE)) is not None:
            faults += mindcluster.device_info(data, devices)
        if (data := self._data(parts, CLUSTER_NAMESPACE)) is not None:
            faults += mindcluster.node_info(data, parts)
        return faults

    def _numbered(self, prefix: str, parser: Parser) -> Iterator[dict[str, list[ReportedFault]]]:
        for number in range(MAX_PARTS):
            part = [*self._document(f"{prefix}{number}", parser)]
            if not part:
                return
            yield from part

    def _document(self, name: str, parser: Parser) -> Iterator[dict[str, list[ReportedFault]]]:
        data = self._data(name, CLUSTER_NAMESPACE)
        if data is not None:
            yield parser(data.get(name) or "{}", name)

    def _data(self, name: str, namespace: str) -> Mapping[str, str] | None:
        """What a ConfigMap holds, None where it is not there or must not be read."""
        try:
            config_map = self._api.get(CONFIG_MAPS, name, namespace=namespace, patience_s=0.0)
        except ApiError as error:
            if not (error.is_absent or error.is_forbidden):
                raise
            if error.status not in self._logged_statuses:
                self._logged_statuses.add(error.status or 0)
                _log.info("not all of MindCluster's reports are there: %s", error)
            return None
        data: Mapping[str, str] = config_map.get("data") or {}
        return data


def taken_out(reports: Mapping[str, Collection[ReportedFault]]) -> dict[str, str]:
    """Nodes that nothing new is to be put on, with why."""
    reasons = {
        node: "; ".join(fault.text for fault in faults if fault.takes_out)
        for node, faults in reports.items()
    }
    return {node: why for node, why in reasons.items() if why}


def texts_of(
    faults: Collection[ReportedFault], *, since_s: float, chips: Sequence[int]
) -> Iterator[NodeLog]:
    """What a diagnosis is given of a node: the faults since a moment that may be behind a failure.

    Args:
        faults: of the node.
        since_s: earlier ones were survived, or had the node left out.
        chips: physical numbers of those that the container has; empty: not known, maybe all.
    """
    for fault in faults:
        # Some faults have whole seconds.
        if fault.since_s is None or fault.since_s < since_s - 1 or not fault.is_serious:
            continue
        if fault.chip is None:
            yield NodeLog(name=f"MindCluster: {fault.part or 'node'}", text=fault.line)
        elif not chips or fault.chip in chips:
            # Devices of a container count from 0, in the order of its chips.
            device = sorted(chips).index(fault.chip) if chips else fault.chip
            yield NodeLog(name=f"MindCluster: {fault.part}", device=device, text=fault.line)
