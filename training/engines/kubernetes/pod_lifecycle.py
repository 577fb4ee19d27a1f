"""The beginning and the end of pods: created until agents listen, deleted until they are gone.

A node that cannot be reached confirms no end: its pods are forgotten. Times are seconds.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from perdure.training.agent.agent import CONFIG_FILE
from perdure.training.agent.preparation import node_folder
from perdure.training.config.engine import KubernetesEngineSpec
from perdure.training.config.job import Job
from perdure.training.engines.base import OnPending, Placement, agent_config
from perdure.training.engines.kubernetes import objects
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
from perdure.training.engines.kubernetes.pods import Pod, Refusal, read_pods
from perdure.training.engines.kubernetes.watching import Informer
from perdure.training.errors import EngineError, ImageUnavailable, NoCapacity
from perdure.training.journal.records import Member

# Answer of Volcano's webhook (pkg/webhooks/admission/pods of volcano-sh/volcano).
POD_GROUP_WAITS = "podgroup phase is Pending"
_STORE = "store-keys"
_CONFIG = "agent-config"
_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
END_TIMEOUT_S = 60.0  # for kubelets to confirm the end of their pods
PENDING_AFTER_S = 5.0  # a busy scheduler, and the end of a former pod, take so long
SILENT_END_S = 5.0  # for those whose agent cannot be reached: their node may be gone
CONNECT_S = 1.0
ANSWER_S = 3.0

_log = logging.getLogger("perdure.engine")


class PodCreation:
    """Creates the pods of a run and waits until they are up.

    Args:
        api: their cluster.
        informer: follows the run's pods.
        job: the run's job.
        spec: its engine section.
        epoch: the supervisor's.
        secrets_env: the keys of the store, by the names of their variables.
        created_s: when the run was created, seconds since the epoch.
    """

    def __init__(
        self,
        api: Api,
        informer: Informer,
        job: Job,
        spec: KubernetesEngineSpec,
        *,
        epoch: int,
        secrets_env: Mapping[str, str],
        created_s: float,
    ) -> None:
        self._api, self._informer = api, informer
        self._job, self._spec = job, spec
        self._epoch = epoch
        self._secrets_env = dict(secrets_env)
        self._created_s = created_s

    def plan(self, placement: Placement, member: Member) -> PodPlan:
        """Plan a pod for a member, under a new name."""
        letters = "".join(secrets.choice(_LETTERS) for _ in range(5))
        return PodPlan(member, objects.pod_name(self._job, member, letters), placement)

    def create(self, plans: Sequence[PodPlan], *, on_pending: OnPending | None) -> dict[str, str]:
        """Create pods and the objects that they need.

        Args:
            plans: describe the pods.
            on_pending: called while Volcano's queue, which lets no pod through before, has no room;
                None: that is not waited for.

        Returns:
            The token of each pod's agent, by the pod's name.

        Raises:
            NoCapacity: a quota or Volcano's queue has no room.
            EngineError: the API server refuses them otherwise.
        """
        try:
            return self._create(plans, on_pending)
        except ApiError as error:
            if error.is_quota:
                raise NoCapacity(str(error)) from error
            raise

    def _create(self, plans: Sequence[PodPlan], on_pending: OnPending | None) -> dict[str, str]:
        job, spec = self._job, self._spec
        tokens = {plan.name: secrets.token_hex(16) for plan in plans}
        owner = self._owner()
        store = self._store_secret(owner)
        if spec.volcano is not None:
            self._ensure(POD_GROUPS, objects.pod_group(job, spec, spec.volcano, owner))
        for plan in plans:
            config = {CONFIG_FILE: self._config_of(plan, tokens[plan.name])}
            self._ensure(SECRETS, objects.secret(job, owner, plan.name, config, part=_CONFIG))
            document = objects.pod(job, spec, owner, plan, store_secret=store)
            self._create_pod(document, on_pending)
        return tokens

    def _create_pod(self, document: Document, on_pending: OnPending | None) -> None:
        """Create a pod; Volcano's webhook lets no pod through before its queue has room.

        Raises:
            NoCapacity: the queue had no room in time.
        """
        deadline_s = time.monotonic() + self._spec.place_timeout_s
        while True:
            try:
                self._ensure(PODS, document)
            except ApiError as error:
                if POD_GROUP_WAITS not in str(error):
                    raise
                if on_pending is None or time.monotonic() > deadline_s:
                    raise NoCapacity(str(error)) from error
                on_pending(str(error), is_room=True)
                time.sleep(1.0)
            else:
                return

    def _owner(self) -> Owner:
        name = objects.name_of(self._job)
        config_map = self._ensure(CONFIG_MAPS, objects.owner(self._job))
        return Owner(name, config_map["metadata"]["uid"])

    def _store_secret(self, owner: Owner) -> str | None:
        """Make the Secret with the keys of the store. Returns its name; None: pods need no keys."""
        if self._spec.storage_secret is not None or not self._secrets_env:
            return self._spec.storage_secret
        name = f"{objects.name_of(self._job)}-{_STORE}"
        document = objects.secret(self._job, owner, name, self._secrets_env, part=_STORE)
        secret = self._ensure(SECRETS, document)
        if secret["data"] != document["data"]:  # the keys were renewed
            self._api.patch(SECRETS, name, {"data": document["data"]})
        return name

    def _ensure(self, resource: Resource, document: Document) -> Document:
        """Create an object, or find it where it exists."""
        try:
            return self._api.create(resource, document)
        except ApiError as error:
            if not error.is_conflict:
                raise
        return self._api.get(resource, document["metadata"]["name"])

    def _config_of(self, plan: PodPlan, token: str) -> str:
        disk = None
        if self._spec.node_path is not None:
            base = Path(objects.NODE_FOLDER) / self._job.run_id
            disk = str(node_folder(base, self._created_s))
        config = agent_config(
            self._job, plan.member, token=token, epoch=self._epoch, node_folder=disk
        )
        # Only the pod itself knows its address.
        return config.model_copy(
            update={"host": "", "port": self._spec.agent_port, "on_loopback": True}
        ).model_dump_json()

    def await_up(
        self,
        names: Sequence[str],
        *,
        since_s: float,
        pulls_s: float,
        on_pending: OnPending,
        left_out: Mapping[str, str],
    ) -> None:
        """Wait until the agents of pods listen.

        Args:
            names: names of the pods.
            since_s: when the wait began, of CLOCK_MONOTONIC.
            pulls_s: how long images that cannot be pulled are waited for.
            on_pending: called while they do not; it may end the wait before the engine's limit.
            left_out: nodes that get no pods, with the reasons; the error for want of room has them.

        Raises:
            NoCapacity: there was no room for all pods in time.
            ImageUnavailable: the image of a pod cannot be pulled at the moment.
            EngineError: a pod cannot start, or did not start in time.
        """
        logged: frozenset[str] = frozenset()
        pulls_until_s = float("inf")
        while refusals := self._refusals(names):
            now_s = time.monotonic()
            waited_s = now_s - since_s
            pulls = [refusal.pod for refusal in refusals if refusal.is_pull]
            pulls_until_s = min(pulls_until_s, now_s + pulls_s) if pulls else float("inf")
            is_late = waited_s > self._spec.place_timeout_s
            if any(refusal.is_final for refusal in refusals) or is_late:
                raise _placement_error(refusals, len(names), waited_s, left_out)
            if now_s > pulls_until_s:
                raise ImageUnavailable("; ".join(refusal.text for refusal in refusals), pulls)
            if waited_s > PENDING_AFTER_S:
                error = _placement_error(refusals, len(names), waited_s, left_out)
                on_pending(str(error), is_room=isinstance(error, NoCapacity))
            texts = frozenset(refusal.text for refusal in refusals)
            for text in sorted(texts - logged) if logged else ():  # at first no pod has a node
                _log.info("waiting: %s", text)
            logged |= texts
            self._informer.wait(partial(_is_any_settled, names), timeout_s=1.0)

    def _refusals(self, names: Sequence[str]) -> list[Refusal]:
        """Why pods are not up. A pod that the informer does not have is looked for once more."""
        if any(name not in self._informer.objects for name in names):
            self._informer.refresh()
        by_name = read_pods(self._informer.objects)
        refusals = []
        for name in names:
            pod = by_name.get(name)
            if pod is None or pod.is_leaving:
                refusals.append(Refusal(f"{name} was taken away", is_room=True, is_final=True))
            elif not pod.is_up:
                refusals.append(pod.refusal())
        return refusals


def _is_any_settled(names: Sequence[str], now: Mapping[str, Document]) -> bool:
    """Whether all awaited pods are up, or the container of a pod has ended."""
    pods = [Pod(now[name]) for name in names if name in now]
    is_all_up = len(pods) == len(names) and all(pod.is_up for pod in pods)
    return is_all_up or any(pod.is_over for pod in pods)


def _placement_error(
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
    if not final and any(why.is_pull for why in waiting):
        return ImageUnavailable(text)
    return NoCapacity(text) if is_room else EngineError(text)


class PodEnd:
    """Deletes pods and waits until they are gone.

    Args:
        api: their cluster.
        informer: follows the run's pods.
        cluster_nodes: tells which nodes the cluster itself calls lost.
        address: returns the address of a pod's agent.
        unmount_after_s: how long the volumes of a pod that has ended are waited for; -1: as long
            as its end.
    """

    def __init__(
        self,
        api: Api,
        informer: Informer,
        cluster_nodes: ClusterNodes,
        address: Callable[[Pod], tuple[str, int]],
        *,
        unmount_after_s: int = -1,
    ) -> None:
        self._api, self._informer = api, informer
        self._cluster_nodes = cluster_nodes
        self._address = address
        self._unmount_after_s = unmount_after_s

    def end_group(self, names: Collection[str]) -> None:
        """Have Kueue end the group of these pods with them."""
        for name in names:
            try:
                self._api.patch(PODS, name, objects.LAST_OF_GROUP)
            except ApiError as error:
                if not error.is_absent:
                    raise

    def end(self, pods: Sequence[Pod], *, left: Collection[str] = ()) -> None:
        """Delete pods by force, and wait until their nodes have confirmed it.

        A node that cannot be reached confirms nothing: its pods are forgotten. Should it come back,
        its kubelet ends them, and until then they can commit nothing.

        Args:
            pods: the pods to delete.
            left: nodes that get no pods in their place: a silent node among them is not awaited.

        Raises:
            EngineError: a container does not end.
        """
        silent = self._silent(pods)
        by_name = {pod.name: pod for pod in pods}
        for pod in pods:
            # A pod that never ran has left nothing; its kubelet would confirm that in a minute.
            self._api.delete(PODS, pod.name, grace_s=1 if pod.has_run else 0, uid=pod.uid)
        loud = [name for name in by_name if name not in silent]
        # A kubelet confirms the end of a pod once its volumes are unmounted.
        after_s = self._unmount_after_s if self._unmount_after_s >= 0 else END_TIMEOUT_S
        is_unmounted = self._informer.wait(
            lambda now: not _left(now, by_name, loud), timeout_s=min(after_s, END_TIMEOUT_S)
        )
        if not is_unmounted:
            self._informer.wait(
                lambda now: all(Pod(now[name]).is_over for name in _left(now, by_name, loud)),
                timeout_s=max(0.0, END_TIMEOUT_S - after_s),
            )
        # Nobody confirms anything soon for a node that the cluster itself calls lost.
        nodes = {name: by_name[name].node for name in silent}
        late = [name for name, node in nodes.items()
                if node not in left and not self._cluster_nodes.problem(node)]  # fmt: skip
        if late:
            self._informer.wait(lambda now: not _left(now, by_name, late), timeout_s=SILENT_END_S)
        for name in _left(self._informer.objects, by_name, list(by_name)):
            pod = by_name[name]
            now = read_pods(self._informer.objects).get(name, pod)
            if name in loud and not now.is_over:
                raise EngineError(f"pod {name} on {pod.node} does not end")
            _log.warning("pod %s is forgotten: %s does not confirm its end", name, pod.node)
            self._api.delete(PODS, name, grace_s=0, uid=pod.uid)
        self._informer.refresh()

    def _silent(self, pods: Sequence[Pod]) -> list[str]:
        """Names of the pods that seem to run and whose agents cannot be reached."""
        running = {pod.name: self._address(pod) for pod in pods if pod.is_up}
        return [*running.keys() - answering(running)]


def _left(
    now: Mapping[str, Document], deleted: Mapping[str, Pod], names: Sequence[str]
) -> list[str]:
    """List the pods that are still there; a new pod may have taken a name."""
    return [name for name in names if name in now and Pod(now[name]).uid == deleted[name].uid]


def answering(addresses: Mapping[str, tuple[str, int]]) -> frozenset[str]:
    """Names of the pods whose agents answer at their addresses, all asked at once."""
    with ThreadPoolExecutor(max_workers=32) as pool:
        answers = pool.map(_answers, addresses.values())
        return frozenset(
            name for name, is_there in zip(addresses, answers, strict=True) if is_there
        )


def _answers(address: tuple[str, int]) -> bool:
    """Whether an agent answers; this end of a port-forward would accept a connection, too."""
    try:
        with socket.create_connection(address, timeout=CONNECT_S) as connection:
            connection.settimeout(ANSWER_S)
            connection.sendall(b"{}\n")  # no valid request: an agent that lives refuses it
            return bool(connection.recv(1))
    except OSError:
        return False
