"""How the pods of a run are created, with the objects that they need. Times are seconds.

Waiting for pods until their agents listen, or until it is sure that they never will.

Times are seconds.

How pods are ended: by force, and until their nodes have confirmed it. Times are seconds.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from perdure.training.agent.agent import CONFIG_FILE
from perdure.training.config.engine import KubernetesEngineSpec
from perdure.training.config.job import Job
from perdure.training.engines.base import Placement, agent_config
from perdure.training.engines.kubernetes import objects, pods
from perdure.training.engines.kubernetes.api import (
    CONFIG_MAPS,
    POD_GROUPS,
    PODS,
    SECRETS,
    Api,
    ApiError,
    Resource,
)
from perdure.training.engines.kubernetes.nodes import ClusterNodes
from perdure.training.engines.kubernetes.objects import Document, Owner, PodPlan
from perdure.training.engines.kubernetes.pods import Refusal
from perdure.training.engines.kubernetes.watching import Watched
from perdure.training.errors import EngineError, NoCapacity
from perdure.training.journal.records import Member

# What the webhook of Volcano answers (pkg/webhooks/admission/pods of volcano-sh/volcano).
POD_GROUP_WAITS = "podgroup phase is Pending"
_STORE = "store-keys"
_CONFIG = "agent-config"
_LETTERS = "bcdfghjklmnpqrstvwxz2456789"


class PodCreation:
    """Creates the pods of one run.

    Args:
        api: of their cluster.
        job: of the run.
        spec: its engine.
        epoch: the supervisor's.
        secrets_env: the keys of the store, by the names of their variables.
        created_s: when the run was created.
    """

    def __init__(
        self,
        api: Api,
        job: Job,
        spec: KubernetesEngineSpec,
        *,
        epoch: int,
        secrets_env: Mapping[str, str],
        created_s: float,
    ) -> None:
        self._api, self._job, self._spec = api, job, spec
        self._epoch = epoch
        self._secrets_env = dict(secrets_env)
        self._created_s = created_s

    def plan(self, placement: Placement, member: Member) -> PodPlan:
        """A pod for a member, under a name that none has had."""
        letters = "".join(secrets.choice(_LETTERS) for _ in range(5))
        return PodPlan(member, objects.pod_name(self._job, member, letters), placement)

    def create(self, plans: Sequence[PodPlan], *, wait_s: float) -> dict[str, str]:
        """Create pods and what they need.

        Args:
            plans: of the pods.
            wait_s: for room in Volcano's queue, which lets no pod through before.

        Returns:
            The token of each pod's agent, by the pod's name.

        Raises:
            NoCapacity: a quota is used up.
            EngineError: the API server refuses them.
        """
        job, spec = self._job, self._spec
        tokens = {plan.name: secrets.token_hex(16) for plan in plans}
        try:
            owner = self._owner()
            store = self._store_secret(owner)
            if spec.volcano is not None:
                self._ensure(POD_GROUPS, objects.pod_group(job, spec, owner))
            for plan in plans:
                config = {CONFIG_FILE: self._config_of(plan, tokens[plan.name])}
                self._ensure(SECRETS, objects.secret(job, owner, plan.name, config, part=_CONFIG))
                document = objects.pod(job, spec, owner, plan, store_secret=store)
                self._create_pod(document, wait_s=wait_s)
        except ApiError as error:
            if error.is_quota:
                raise NoCapacity(str(error)) from error
            raise
        return tokens

    def _create_pod(self, document: Document, *, wait_s: float) -> None:
        """Create a pod; Volcano's own check lets none through before its queue has room.

        Raises:
            NoCapacity: it had none in time.
        """
        deadline_s = time.monotonic() + wait_s
        while True:
            try:
                self._ensure(PODS, document)
            except ApiError as error:
                if POD_GROUP_WAITS not in str(error):
                    raise
                if time.monotonic() > deadline_s:
                    raise NoCapacity(str(error)) from error
                time.sleep(1.0)
            else:
                return

    def _owner(self) -> Owner:
        name = objects.name_of(self._job)
        config_map = self._ensure(CONFIG_MAPS, objects.owner(self._job))
        return Owner(name, config_map["metadata"]["uid"])

    def _store_secret(self, owner: Owner) -> str | None:
        """Name of the Secret with the keys of the store; None: pods have their own way to it."""
        if self._spec.storage_secret is not None or not self._secrets_env:
            return self._spec.storage_secret
        name = f"{objects.name_of(self._job)}-{_STORE}"
        document = objects.secret(self._job, owner, name, self._secrets_env, part=_STORE)
        secret = self._ensure(SECRETS, document)
        if secret["data"] != document["data"]:  # the keys were renewed
            self._api.patch(SECRETS, name, {"data": document["data"]})
        return name

    def _ensure(self, resource: Resource, document: Document) -> Document:
        """Create an object, or find the one that is there."""
        try:
            return self._api.create(resource, document)
        except ApiError as error:
            if not error.is_conflict:
                raise
        return self._api.get(resource, document["metadata"]["name"])

    def _config_of(self, plan: PodPlan, token: str) -> str:
        disk = objects.disk_folder_of(self._job, self._spec, self._created_s)
        config = agent_config(
            self._job, plan.member, token=token, epoch=self._epoch, node_folder=disk
        )
        # The pod's address is known in the pod alone.
        return config.model_copy(
            update={"host": "", "port": self._spec.agent_port, "on_loopback": True}
        ).model_dump_json()


_log = logging.getLogger("perdure.engine")


def await_up(
    watched: Watched,
    names: Sequence[str],
    *,
    limit_s: float,
    wait_s: float | None,
    left_out: Mapping[str, str],
) -> None:
    """Wait until all agents listen.

    Args:
        watched: the pods of the run.
        names: of those that are awaited.
        limit_s: for all of it.
        wait_s: for room, where it is less than for all else.
        left_out: nodes that they may not be on, and why; told where there is no room.

    Raises:
        NoCapacity: there was no room for all of them in time.
        EngineError: they cannot start, or did not in time.
    """
    began_s = time.monotonic()
    deadline_s = began_s + limit_s
    logged: frozenset[str] = frozenset()
    while waiting := _not_up(_listed(watched, names), names):
        is_late = time.monotonic() > deadline_s
        if wait_s is not None and time.monotonic() > began_s + wait_s:
            is_late = is_late or any(why.is_room for why in waiting)
        if any(why.is_final for why in waiting) or is_late:
            waited_s = time.monotonic() - began_s
            raise _not_placed(waiting, len(names), waited_s, left_out)
        texts = frozenset(why.text for why in waiting)
        for text in sorted(texts - logged) if logged else ():  # at first nothing has a node yet
            _log.info("waiting: %s", text)
        logged |= texts
        watched.wait(partial(_any_is_settled, names), timeout_s=1.0)


def _listed(watched: Watched, names: Sequence[str]) -> Mapping[str, Document]:
    """The pods of the run, asked for now where one of these is missing.

    They have been created: one that is missing then is gone, although nobody has seen it.
    """
    if any(name not in watched.objects for name in names):
        watched.refresh()
    return watched.objects


def _not_up(by_name: Mapping[str, Document], names: Sequence[str]) -> list[Refusal]:
    pods_of = [(name, by_name.get(name)) for name in names]
    return [
        Refusal(f"{name} was taken away", is_room=True, is_final=True)
        if pod is None or pods.is_leaving(pod)
        else pods.why_not_up(pod)
        for name, pod in pods_of
        if pod is None or pods.is_leaving(pod) or not pods.is_up(pod)
    ]


def _any_is_settled(names: Sequence[str], now: Mapping[str, Document]) -> bool:
    """Whether there is something new to say of pods that are awaited."""
    documents = [now[name] for name in names if name in now]
    is_all_up = len(documents) == len(names) and all(pods.is_up(pod) for pod in documents)
    return is_all_up or any(pods.is_over(pod) for pod in documents)


def _not_placed(
    waiting: Sequence[Refusal], wanted: int, limit_s: float, left_out: Mapping[str, str]
) -> EngineError:
    final = [why for why in waiting if why.is_final]
    reason = "; ".join(dict.fromkeys(why.text for why in final or waiting))
    text = f"{wanted - len(waiting)} of {wanted} pods were up"
    text += f": {reason}" if final else f" within {limit_s:g} s: {reason}"
    is_room = any(why.is_room for why in (final or waiting))
    if is_room and left_out:
        left = "; ".join(f"{node}: {why}" for node, why in left_out.items())
        text += f"; left out for what MindCluster reports (engine.mindcluster): {left}"
    return NoCapacity(text) if is_room else EngineError(text)


END_TIMEOUT_S = 60.0  # for kubelets to confirm the end of their pods
SILENT_END_S = 5.0  # of those whose agent cannot be reached: their node may be gone
CONNECT_S = 1.0
ANSWER_S = 3.0


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
        by_name = {pods.name_of(pod): pod for pod in ended}
        loud = [name for name in by_name if name not in silent]
        self._pods.wait(lambda now: not _left(now, by_name, loud), timeout_s=END_TIMEOUT_S)
        # Of a node that the cluster itself calls lost, nobody confirms anything soon.
        nodes = {name: pods.node_of(by_name[name]) for name in silent}
        late = [n for n, at in nodes.items()
                if at not in left and not self._cluster_nodes.problem(at)]  # fmt: skip
        if late:
            self._pods.wait(lambda now: not _left(now, by_name, late), timeout_s=SILENT_END_S)
        for name in _left(self._pods.objects, by_name, list(by_name)):
            pod = by_name[name]
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
