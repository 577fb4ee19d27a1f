"""A stand-in for an API server: objects in memory, a scheduler, and agents that really listen.

It keeps the semantics of the API that the engine uses: refusals, affinity, owners. It shows nothing
of the times of kubelets or of networks.
"""

from __future__ import annotations

import base64
import itertools
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from perdure.training.agent.control import ControlServer
from perdure.training.config.job import Job
from perdure.training.engines.kubernetes import engine as engine_module
from perdure.training.engines.kubernetes.api import PODS, Api, ApiError, Resource
from perdure.training.engines.kubernetes.engine import KubernetesEngine
from perdure.training.engines.kubernetes.objects import AGENT, Document
from perdure.training.wire.agent import AgentConfig, AgentReply, Request, ShutdownOrder
from perdure.training.wire.agent_status import AgentState, AgentStatus
from perdure.training.wire.version import PERDURE_VERSION
from tests.jobs import small_job

IDLE_S = 0.2  # a watch without a change ends after that time
FORBIDDEN = 403
_PATH = re.compile(r"/(pods|secrets|configmaps|nodes|events)(?:/([^/]+))?$")


class ApiServer(Api):
    """A cluster in memory; a pod is up at once where a node takes it.

    Attributes:
        objects: by kind and name.
        refused: messages of refusals, by method and kind such as "POST pods"; "*": all methods.
        requests: every method and kind, in order.
        orders: that agents got, with their pods' names.
        agents: that listen, by the pods' names.
        without_image: nodes that cannot pull the image.

    Args:
        nodes: names of the nodes.
    """

    def __init__(self, *nodes: str) -> None:
        super().__init__(SimpleNamespace(configuration=None), "space", in_cluster=True)
        self.objects: dict[str, dict[str, Document]] = {
            kind: {} for kind in ("pods", "secrets", "configmaps", "nodes", "events")
        }
        self.refused: dict[str, str] = {}
        self.requests: list[str] = []
        self.orders: list[tuple[str, str]] = []
        self.agents: dict[str, ControlServer] = {}
        self.without_image: set[str] = set()
        self._handlers: dict[str, tuple[str, Callable[[Request], AgentReply]]] = {}
        self.patience_s = 0.0
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self._numbers = itertools.count(1)
        self._changes: list[tuple[int, str, str, Document]] = []
        self._changed = threading.Condition(threading.RLock())
        for name in nodes:
            self.add_node(name)

    def add_node(self, name: str, *, labels: Mapping[str, str] | None = None, **spec: Any) -> None:
        ready = {"conditions": [{"type": "Ready", "status": "True"}]}
        metadata = {"name": name, "labels": dict(labels or {})}
        self._put("nodes", {"metadata": metadata, "spec": spec, "status": ready})

    def engine(self, monkeypatch: Any, job: Job, *, epoch: int = 1) -> KubernetesEngine:
        """An engine that speaks to this server."""
        monkeypatch.setattr(engine_module, "connect", lambda **_where: self)
        return KubernetesEngine(job, home=Path("/nowhere"), epoch=epoch)

    def job(self, folder: Path | None = None, **sections: Any) -> Job:
        kind = {"kind": "kubernetes", "image": "perdure:1", "agent_port": self.port}
        engine = {"nodes": 2, "spares": 1, "warm_spares": 0, "mindcluster": False, "grace_s": 0.1}
        given = sections.pop("engine", {})
        return small_job(folder, engine=kind | engine | given, **sections)

    def close(self) -> None:
        for agent in self.agents.values():
            agent.close()

    def list(
        self,
        resource: Resource,
        *,
        labels: str = "",
        fields: str = "",
        namespace: str | None = None,
        patience_s: float | None = None,
    ) -> tuple[list[Document], str]:
        self._refuse("GET", resource.plural)
        with self._changed:
            items = [o for o in self.objects[resource.plural].values() if _fits(o, labels)]
            return items, str(len(self._changes))

    def watch(
        self, resource: Resource, *, version: str, labels: str = "", fields: str = ""
    ) -> Iterator[tuple[str, Document]]:
        self._refuse("GET", resource.plural)
        after = int(version or 0)
        with self._changed:
            if len(self._changes) <= after:
                self._changed.wait(IDLE_S)
            changes = self._changes[after:]
        self._refuse("GET", resource.plural)
        for number, kind, change, document in changes:
            if kind == resource.plural and _fits(document, labels):
                metadata = document["metadata"] | {"resourceVersion": str(number)}
                yield change, document | {"metadata": metadata}
        yield "BOOKMARK", {"metadata": {"resourceVersion": str(after + len(changes))}}

    def _request(self, method: str, path: str, *, body: Any = None, **_settings: Any) -> Document:
        match = _PATH.search(path)
        assert match is not None, path
        kind, name = match.groups()
        self._refuse(method, kind)
        with self._changed:
            if method == "POST":
                return self._create(kind, body)
            document = self.objects[kind].get(name or "")
            if document is None:
                raise ApiError(f"{method} {path}: not found", status=404, reason="NotFound")
            if method == "DELETE":
                self.remove(kind, name)
            elif method == "PATCH":
                for part, changes in body.items():
                    for name, value in changes.items():
                        former = document.setdefault(part, {}).get(name)
                        merged = former | value if isinstance(former, dict) else value
                        document[part][name] = merged
                self._put(kind, document)
            return document

    def set_condition(self, kind: str, name: str, condition: str, status: str) -> None:
        """Change a condition of an object."""
        document = self.objects[kind][name]
        others = [c for c in document["status"]["conditions"] if c["type"] != condition]
        conditions = [*others, {"type": condition, "status": status}]
        self._put(kind, document | {"status": document["status"] | {"conditions": conditions}})

    def remove(self, kind: str, name: str) -> None:
        """Delete an object; a pod's agent is gone with it."""
        with self._changed:
            document = self.objects[kind].pop(name, None)
            if document is None:
                return
            self._note(kind, "DELETED", document)
            agent = self.agents.pop(name, None) if kind == PODS.plural else None
        if agent is not None:
            agent.close()

    def _refuse(self, method: str, kind: str) -> None:
        self.requests.append(f"{method} {kind}")
        for key in (f"{method} {kind}", f"* {kind}", "* *"):
            if key in self.refused:
                text = f"{method} {kind}: {self.refused[key]}"
                raise ApiError(text, status=FORBIDDEN, reason="Forbidden")

    def _create(self, kind: str, document: Document) -> Document:
        name = document["metadata"]["name"]
        if name in self.objects[kind]:
            raise ApiError(f"{name} exists", status=409, reason="AlreadyExists")
        document["metadata"]["uid"] = f"uid-{next(self._numbers)}"
        document["metadata"]["creationTimestamp"] = f"{next(self._numbers):09d}"
        if kind == PODS.plural:
            self._schedule(document)
        self._put(kind, document)
        return document

    def _schedule(self, pod: Document) -> None:
        used = {other["spec"].get("nodeName") for other in self.objects["pods"].values()}
        affinity = pod["spec"]["affinity"].get("nodeAffinity", {})
        required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
        avoid = {
            field["values"][0]
            for term in required.get("nodeSelectorTerms", ())
            for field in term["matchFields"]
        }
        preferred = affinity.get("preferredDuringSchedulingIgnoredDuringExecution", ())
        last = {
            field["values"][0]
            for term in preferred
            for field in term["preference"]["matchFields"]
            if field["operator"] == "NotIn"
        }
        free = [
            name
            for name, node in sorted(self.objects["nodes"].items(), key=lambda o: (o[0] in last, o))
            if name not in used | avoid and not node["spec"].get("unschedulable")
        ]
        if not free:
            message = f"0/{len(self.objects['nodes'])} nodes are available"
            scheduled = {"type": "PodScheduled", "status": "False", "message": message}
            pod["status"] = {"phase": "Pending", "conditions": [scheduled]}
            return
        host = f"127.0.3.{next(self._numbers) % 250 + 1}"
        pod["spec"]["nodeName"] = free[0]
        if free[0] in self.without_image:
            waiting = {"reason": "ImagePullBackOff", "message": "Back-off pulling perdure:1"}
            state = {"name": AGENT, "started": False, "state": {"waiting": waiting}}
            pod["status"] = {"phase": "Pending", "containerStatuses": [state], "conditions": []}
            return
        self._start_agent(pod["metadata"]["name"], pod, host)
        state = {"name": AGENT, "started": True, "state": {"running": {}}}
        ready = {"type": "Ready", "status": "True"}
        pod["status"] = {
            "phase": "Running", "podIP": host, "containerStatuses": [state], "conditions": [ready],
        }  # fmt: skip

    def _start_agent(self, name: str, pod: Document, host: str) -> None:
        (content,) = self.objects["secrets"][name]["data"].values()
        config = AgentConfig.model_validate_json(base64.b64decode(content))

        def answer(request: Request) -> AgentReply:
            self.orders.append((name, request.order.op))
            if isinstance(request.order, ShutdownOrder):
                threading.Thread(target=self.end_pod, args=(name,), daemon=True).start()
            status = AgentStatus(
                node=pod["spec"]["nodeName"], member=config.member, state=AgentState.RUNNING,
                schedule_cnt=config.schedule_cnt, proc_start_cnt=1, placement=1, attempt=1,
                version=PERDURE_VERSION,
            )  # fmt: skip
            return AgentReply(status=status, at_s=1.0, port=1)

        self._handlers[name] = (config.token, answer)
        self._open(name, host)

    def _open(self, name: str, host: str) -> None:
        token, answer = self._handlers[name]
        self.agents[name] = ControlServer.open(host, token, answer, port=self.port)
        self.agents[name].start()

    def end_pod(self, name: str) -> None:
        """Have a pod's container end well by itself."""
        with self._changed:
            pod = self.objects["pods"].get(name)
            if pod is not None:
                state = {"name": AGENT, "state": {"terminated": {"exitCode": 0}}}
                pod["status"] |= {"phase": "Succeeded", "containerStatuses": [state]}
                self._put("pods", pod)

    def _put(self, kind: str, document: Document) -> None:
        with self._changed:
            self.objects[kind][document["metadata"]["name"]] = document
            self._note(kind, "MODIFIED", document)

    def _note(self, kind: str, change: str, document: Document) -> None:
        self._changes.append((len(self._changes) + 1, kind, change, document))
        self._changed.notify_all()

    def pods_of(self, member: int) -> Sequence[str]:
        return [name for name in self.objects["pods"] if f"-m{member}-" in name]

    def hide(self, *members: int) -> None:
        """Keep the supervisor from the agents of members, which go on at another address."""
        for member in members:
            for name in self.pods_of(member):
                self.agents[name].close()
                self._open(name, f"127.0.4.{next(self._numbers) % 250 + 1}")


class Forwards:
    """The way through the stand-in: to where an agent listens now.

    Attributes:
        is_refused: whether nobody may go it.
    """

    is_cut = False

    def __init__(self, server: ApiServer, *, is_refused: bool) -> None:
        self._server = server
        self.is_refused = is_refused

    def address(self, pod: str) -> tuple[str, int]:
        agent = self._server.agents.get(pod)
        if agent is None or self.is_refused:
            return "127.0.5.1", self._server.port  # nobody listens there
        host, port = agent.listeners[0].server_address[:2]
        return str(host), int(port)

    def keep(self, pods: object) -> None:
        """Nothing is open."""


def _fits(document: Document, labels: str) -> bool:
    own: Mapping[str, str] = document["metadata"].get("labels") or {}
    pairs = (pair.partition("=") for pair in labels.split(",") if pair)
    return all(own.get(name) == value for name, _, value in pairs)
