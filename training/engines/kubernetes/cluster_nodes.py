"""What the cluster says of its nodes, and cordons, where this process has the rights for them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from perdure.training.engines.kubernetes import pods
from perdure.training.engines.kubernetes.api import NODES, Api, ApiError
from perdure.training.engines.kubernetes.watching import Watched
from perdure.training.specs.engine import KubernetesEngineSpec

# Which run has cordoned a node: no other cordon is ever lifted.
CORDONED_BY = "perdure.io/cordoned-by"

_log = logging.getLogger("perdure.engine")


class ClusterNodes:
    """The nodes that the job's selector allows.

    Args:
        api: of the cluster.
        spec: the engine section of the job.
        run_id: of the run.
    """

    def __init__(self, api: Api, spec: KubernetesEngineSpec, run_id: str) -> None:
        self._api, self._spec, self._run_id = api, spec, run_id
        labels = ",".join(f"{name}={value}" for name, value in spec.node_selector.items())
        self._watched: Watched | None = Watched(api, NODES, labels=labels)
        self._is_listed = False

    def start(self) -> None:
        """Begin to watch them; without the right to do so, nothing is known of nodes."""
        try:
            if self._watched is not None:
                self._watched.start()
                self._is_listed = True
        except ApiError as error:
            if not error.is_forbidden:
                raise
            _log.info("what the cluster says of its nodes is not known: %s", error)
            self._watched = None

    @property
    def names(self) -> Sequence[str]:
        """Of those that are known."""
        return sorted(self._watched.objects) if self._watched is not None else ()

    def problem(self, node: str) -> str:
        """Why a node is not to be trusted, as the cluster sees it; "" where it is, or unknown."""
        if absence := self.absence(node):
            return absence
        found = self._watched.objects.get(node) if self._watched is not None else None
        return pods.node_problem(found) if found is not None else ""

    def absence(self, node: str) -> str:
        """What became of a node that is not among them; "" where it is, or unknown."""
        if self._watched is None or not self._is_listed or not node:
            return ""
        if node in self._watched.objects:
            return ""
        return pods.UNSELECTED if self._spec.node_selector else pods.NO_NODE

    @property
    def cordoned(self) -> set[str]:
        """Nodes that this run has cordoned, as far as they are known."""
        known = self._watched.objects if self._watched is not None else {}
        annotations = {n: one["metadata"].get("annotations") or {} for n, one in known.items()}
        return {n for n, found in annotations.items() if found.get(CORDONED_BY) == self._run_id}

    def isolate(self, avoided: Collection[str]) -> None:
        """Cordon nodes, and lift what this run cordoned before and does not avoid any more."""
        if not self._spec.cordon:
            return
        known = self._watched.objects if self._watched is not None else {}
        ours = self.cordoned
        for node in set(avoided) - ours:
            if not (known.get(node, {}).get("spec") or {}).get("unschedulable"):
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
