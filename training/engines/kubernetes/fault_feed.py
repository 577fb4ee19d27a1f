"""MindCluster's reports of faulty nodes, read from its ConfigMaps.

The feed reads ConfigMaps by name, for which the right to get them is enough. Without that right, or
without MindCluster, a line in the log says so and there are no reports. None of this fails a run:
the reports only add to the other evidence. Times are seconds since the epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from perdure.training.engines.kubernetes import mindcluster
from perdure.training.engines.kubernetes.api import CONFIG_MAPS, Api, ApiError
from perdure.training.engines.kubernetes.mindcluster import ReportedFault
from perdure.training.recovery.chip_events import ChipReport
from perdure.training.wire.agent import NodeLog

DEVICE_NAMESPACE = "kube-system"  # the device plugin's documents
CLUSTER_NAMESPACE = "mindx-dl"  # the documents of noded and ClusterD
MAX_PARTS = 100  # ClusterD splits a document into parts of up to 1,000 nodes
_PARALLEL = 16

Parser = Callable[[str, str], dict[str, list[ReportedFault]]]

_log = logging.getLogger("perdure.engine")


class FaultFeed:
    """MindCluster's reports of the nodes of a cluster.

    Args:
        api: the cluster.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._logged_statuses: set[int] = set()

    def of_cluster(self, nodes: Collection[str]) -> dict[str, list[ReportedFault]]:
        """Read the faults of all nodes that ClusterD collects, by node.

        Args:
            nodes: names of nodes whose own reports are read where there is no ClusterD.
        """
        try:
            return self._of_cluster() or self._of_nodes(nodes)
        except ApiError as error:
            _log.warning("MindCluster's reports are not known: %s", error)
            return {}

    def of_run(self, nodes: Collection[str]) -> dict[str, list[ReportedFault]]:
        """Read the faults of a few nodes from all documents: each has some that others lack."""
        try:
            # ClusterD comes first: where the API server is away, a single request fails.
            cluster = self._of_cluster()
            by_node = self._of_nodes(nodes)
        except ApiError as error:
            _log.warning("MindCluster's reports are not known: %s", error)
            return {}
        return {node: _merge((by_node[node], cluster.get(node, ()))) for node in nodes}

    def _of_cluster(self) -> dict[str, list[ReportedFault]]:
        """Read ClusterD's documents; empty where there is no ClusterD."""
        parts = [*self._numbered("cluster-info-device-", mindcluster.cluster_devices)]
        if not parts:
            return {}
        parts += self._document("cluster-info-node-cm", mindcluster.cluster_nodes)
        parts += self._numbered("cluster-info-switch-", mindcluster.cluster_switches)
        names = sorted({name for part in parts for name in part})
        return {name: _merge(part.get(name, ()) for part in parts) for name in names}

    def _of_nodes(self, nodes: Collection[str]) -> dict[str, list[ReportedFault]]:
        """Read the documents that each node writes about itself."""
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
        """Read a ConfigMap; None where it does not exist or may not be read."""
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


def exclusions(reports: Mapping[str, Collection[ReportedFault]]) -> dict[str, str]:
    """Select the nodes that must get no new pods, with the reasons."""
    reasons = {
        node: "; ".join(fault.text for fault in faults if fault.takes_out)
        for node, faults in reports.items()
    }
    return {node: why for node, why in reasons.items() if why}


def _merge(reports: Iterable[Iterable[ReportedFault]]) -> list[ReportedFault]:
    """Merge several documents' faults of a node, each fault once: the first document counts."""
    by_part: dict[tuple[str, str], ReportedFault] = {}
    for report in reports:
        for fault in report:
            by_part.setdefault((fault.part, fault.code), fault)
    return list(by_part.values())


def fault_logs(
    faults: Collection[ReportedFault], *, since_s: float, chips: Sequence[int]
) -> Iterator[NodeLog]:
    """Write a node's faults as logs for a diagnosis: those that may be behind a recent failure.

    Args:
        faults: the faults of the node.
        since_s: earlier faults are left out: training survived them, or the node was not used.
        chips: physical numbers of the container's chips; empty: unknown, maybe all.
    """
    for fault, device in _recent(faults, since_s=since_s, chips=chips):
        name = f"MindCluster: {fault.part or 'node'}"
        yield NodeLog(name=name, device=device, text=fault.line)


def chip_reports(
    node: str, faults: Collection[ReportedFault], *, since_s: float, chips: Sequence[int]
) -> Iterator[ChipReport]:
    """Select a node's faults that are codes of its chips; arguments as for `fault_logs`."""
    for fault, device in _recent(faults, since_s=since_s, chips=chips):
        if device is not None and fault.code:
            level = mindcluster.LEVELS.get(fault.level)
            yield ChipReport(node, device, fault.code, level, reporter="MindCluster")


def _recent(
    faults: Collection[ReportedFault], *, since_s: float, chips: Sequence[int]
) -> Iterator[tuple[ReportedFault, int | None]]:
    """Select serious faults that began recently, each with its device in the container."""
    for fault in faults:
        # The times of some faults are whole seconds.
        if fault.since_s is None or fault.since_s < since_s - 1 or not fault.is_serious:
            continue
        if fault.chip is None:
            yield fault, None
        elif not chips or fault.chip in chips:
            # Devices of a container count from 0, in the order of its chips.
            yield fault, sorted(chips).index(fault.chip) if chips else fault.chip
