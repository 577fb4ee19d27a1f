"""How pods are ended: by force, and until their nodes have confirmed it. Times are seconds."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from perdure.training.engines.kubernetes import pods
from perdure.training.engines.kubernetes.api import PODS, Api
from perdure.training.engines.kubernetes.cluster_nodes import ClusterNodes
from perdure.training.engines.kubernetes.objects import Document
from perdure.training.engines.kubernetes.watching import Watched
from perdure.training.errors import EngineError

END_TIMEOUT_S = 60.0  # for kubelets to confirm the end of their pods
SILENT_END_S = 5.0  # of those whose agent cannot be reached: their node may be gone
CONNECT_S = 1.0
ANSWER_S = 3.0

_log = logging.getLogger("perdure.engine")


class PodEnd:
    """Ends pods.

    Args:
        api: of their cluster.
        watched: the run's pods.
        cluster_nodes: what the cluster says of its nodes.
        address: where the agent of a pod is reached.
    """

    def __init__(
        self,
        api: Api,
        watched: Watched,
        cluster_nodes: ClusterNodes,
        address: Callable[[Document], tuple[str, int]],
    ) -> None:
        self._api, self._pods = api, watched
        self._cluster_nodes = cluster_nodes
        self._address = address

    def end(self, ended: Sequence[Document], *, left: Collection[str] = ()) -> None:
        """Delete pods by force, and wait until their nodes have confirmed it.

        A node that cannot be reached confirms nothing: its pods are forgotten. Should it come back,
        its kubelet ends them, and until then they can commit nothing.

        Args:
            ended: the pods.
            left: nodes on which nothing is to be in their place: one that is silent is not awaited.

        Raises:
            EngineError: a container does not end.
        """
        silent = self._silent(ended)
        for pod in ended:
            # Nothing of one that never ran is left; its kubelet would confirm that in a minute.
            grace_s = 1 if pods.has_run(pod) else 0
            self._api.delete(PODS, pods.name_of(pod), grace_s=grace_s, uid=pod["metadata"]["uid"])
        rest = {pods.name_of(pod): pod for pod in ended}
        loud = [name for name in rest if name not in silent]
        self._pods.wait(lambda now: not _left(now, rest, loud), timeout_s=END_TIMEOUT_S)
        # Of a node that the cluster itself calls lost, nobody confirms anything soon.
        nodes = {name: pods.node_of(rest[name]) for name in silent}
        late = [n for n, at in nodes.items()
                if at not in left and not self._cluster_nodes.problem(at)]  # fmt: skip
        if late:
            self._pods.wait(lambda now: not _left(now, rest, late), timeout_s=SILENT_END_S)
        for name in _left(self._pods.objects, rest, list(rest)):
            pod = rest[name]
            if name in loud and not pods.is_over(self._pods.objects.get(name, pod)):
                raise EngineError(f"pod {name} on {pods.node_of(pod)} does not end")
            _log.warning(
                "pod %s is forgotten: %s does not confirm its end", name, pods.node_of(pod)
            )
            self._api.delete(PODS, name, grace_s=0, uid=pod["metadata"]["uid"])
        self._pods.refresh()

    def _silent(self, ended: Sequence[Document]) -> list[str]:
        """Names of the pods that run as far as is known, and whose agents cannot be reached."""
        running = {pods.name_of(pod): self._address(pod) for pod in ended if pods.is_up(pod)}
        with ThreadPoolExecutor(max_workers=32) as pool:
            answers = dict(zip(running, pool.map(_answers, running.values()), strict=True))
        return [name for name, is_there in answers.items() if not is_there]


def _left(
    now: Mapping[str, Document], ended: Mapping[str, Document], names: Sequence[str]
) -> list[str]:
    """Which of the pods are still there; another one may have taken a name."""
    return [
        name
        for name in names
        if name in now and now[name]["metadata"]["uid"] == ended[name]["metadata"]["uid"]
    ]


def _answers(address: tuple[str, int]) -> bool:
    """Whether an agent is there; who listens may be our own end of a port-forward."""
    try:
        with socket.create_connection(address, timeout=CONNECT_S) as connection:
            connection.settimeout(ANSWER_S)
            connection.sendall(b"{}\n")  # no request: it is refused, by an agent that lives
            return bool(connection.recv(1))
    except OSError:
        return False
