"""The engine of a Kubernetes cluster: each container is a pod, its agent the first process.

The cluster's scheduler chooses nodes; isolated ones are excluded by the affinity of new pods, for
which no right on nodes is needed. Whatever was made is found again by its labels. Times are
seconds.
"""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from perdure.training.agent.agent import CONFIG_FILE
from perdure.training.config.engine import KubernetesEngineSpec, Reach
from perdure.training.config.job import Job
from perdure.training.diagnosis.evidence import NodeLoss
from perdure.training.engines.base import AgentEndpoint, Placement
from perdure.training.engines.kubernetes import objects, pods
from perdure.training.engines.kubernetes.api import (
    CONFIG_MAPS,
    EVENTS,
    POD_GROUPS,
    PODS,
    SECRETS,
    ApiError,
    Resource,
    connect,
)
from perdure.training.engines.kubernetes.fault_feed import FaultFeed, taken_out, texts_of
from perdure.training.engines.kubernetes.forwarding import Forwarder
from perdure.training.engines.kubernetes.nodes import ClusterNodes
from perdure.training.engines.kubernetes.objects import Document
from perdure.training.engines.kubernetes.pod_lifecycle import PodCreation, PodEnd, await_up
from perdure.training.engines.kubernetes.watching import Watched
from perdure.training.errors import EngineError
from perdure.training.journal.records import Member
from perdure.training.recovery.faults import FaultClass
from perdure.training.recovery.rungs import Rung
from perdure.training.wire.agent import NO_MEMBER, AgentConfig, NodeLog

FORWARDED_POLL_S = 1.0  # each call is a request of its own to the API server
POLL_S = 0.2
NOTES_APART_S = 0.5  # between two questions for events about a pod that is being lost

_log = logging.getLogger("perdure.engine")


class KubernetesEngine:
    """Pods of one cluster; the arguments are those of `make_engine`."""

    def __init__(
        self,
        job: Job,
        *,
        home: Path,  # noqa: ARG002 every engine's; nothing of this one is on this machine
        epoch: int,
        secrets_env: Mapping[str, str] | None = None,
        created_s: float = 0.0,
    ) -> None:
        assert isinstance(job.engine, KubernetesEngineSpec)  # noqa: S101 the registry sees to it
        self._job, self._spec = job, job.engine
        self._api = connect(context=self._spec.context, namespace=self._spec.namespace)
        self._pods = Watched(self._api, PODS, labels=objects.selector(job, objects.AGENT))
        self._cluster_nodes = ClusterNodes(self._api, self._spec, job.run_id)
        self._creation = PodCreation(
            self._api, job, self._spec,
            epoch=epoch, secrets_env=secrets_env or {}, created_s=created_s,
        )  # fmt: skip
        self._ending = PodEnd(self._api, self._pods, self._cluster_nodes, self._address)
        self._forwarder = None if self._is_direct else Forwarder(self._api, self._spec.agent_port)
        self._members: dict[int, Member] = {}  # of the placement that is there
        self._current: dict[int, str] = {}  # name of each member's pod, of those that have one
        self._last: dict[str, AgentEndpoint] = {}  # by pod, as it was when it was last there
        self._tokens: dict[str, str] = {}
        self._is_ours = False
        self._events: dict[str, tuple[float, Sequence[Document]]] = {}  # by pod, and when asked
        self._feed = FaultFeed(self._api) if self._spec.mindcluster else None
        self._taken_out: dict[str, str] = {}  # nodes that MindCluster speaks against, with why

    @property
    def _is_direct(self) -> bool:
        if self._spec.reach is Reach.AUTO:
            return self._api.in_cluster
        return self._spec.reach is Reach.DIRECT

    @property
    def capabilities(self) -> frozenset[Rung]:
        """Every rung of the ladder."""
        return frozenset(Rung)

    @property
    def sees_agents(self) -> bool:
        """Whether they can be reached: through the API server only while it answers."""
        return self._forwarder is None or not (self._forwarder.is_cut or self._pods.is_away)

    def _begin(self) -> None:
        """Know the pods of the run, once it is sure that they are its own.

        Raises:
            EngineError: another run of this name is in the namespace.
        """
        self._pods.start()
        if self._is_ours:
            return
        try:
            owner = self._api.get(CONFIG_MAPS, objects.name_of(self._job))
        except ApiError as error:
            if not error.is_absent:
                raise
            return
        store = (owner.get("data") or {}).get("store")
        if store != self._job.storage.address:
            where = f"namespace {self._api.namespace}"
            raise EngineError(
                f"{where} has a run {self._job.run_id} whose store is {store}, and not "
                f"{self._job.storage.address}: give this one another run_id or engine.namespace"
            )
        self._is_ours = True

    @property
    def poll_s(self) -> float:
        """How often a look at all agents is worth what it takes."""
        return POLL_S if self._forwarder is None else FORWARDED_POLL_S

    def nodes(self) -> Sequence[str] | None:
        """None: the cluster's scheduler knows them."""
        return None

    def submit(self, placement: Placement, *, ready: Collection[str] = ()) -> None:
        """Start a pod for every member; the run's former pods are ended first."""
        if ready:  # what owns all stays, or those that are ready would go with it
            self._begin()
            self._pods.refresh()
            former = [pod for name, pod in self._pods.objects.items() if name not in ready]
            self._ending.end(former)
            for pod in former:
                self._api.delete(SECRETS, pods.name_of(pod))
        else:
            self.end()
        self._launch(placement, [member.index for member in placement.members], ready)

    def replace(
        self, placement: Placement, members: Collection[int], *, ready: Collection[str] = ()
    ) -> None:
        """Start new pods for these members; the others keep theirs."""
        self._begin()
        current_pods = self._pods.objects.values()
        former = [pod for pod in current_pods if pods.member_of(pod) in members]
        self._ending.end(former, left=placement.avoid)
        self._launch(placement, members, ready)

    def start_spare(self, placement: Placement, node: str) -> None:
        """Make a pod that is to be some member's later; returns at once."""
        with self._at_once():
            self._prepare(placement)
            nobody = Member(index=NO_MEMBER, node=node, schedule_cnt=0)
            plan = self._creation.plan(self._spared(placement), nobody)
            try:
                self._tokens |= self._creation.create([plan], wait_s=0.0)
            except EngineError:
                self._api.delete(SECRETS, plan.name)  # made before the pod
                raise

    @contextmanager
    def _at_once(self) -> Iterator[None]:
        """Ask the API server once: what follows is not worth keeping a watched run waiting.

        Raises:
            EngineError: it does not answer.
        """
        if self._pods.is_away:
            raise EngineError("the API server does not answer")
        patience_s, self._api.patience_s = self._api.patience_s, 0.0
        try:
            yield
        finally:
            self._api.patience_s = patience_s

    def warm_spares(self) -> Mapping[str, AgentEndpoint]:
        """The pods that no member has taken yet, by name."""
        by_name = self._pods.objects
        return {
            name: self._contact(name, by_name)
            for name, pod in by_name.items()
            if pods.is_spare(pod) and not pods.is_leaving(pod)
        }

    def end_spares(self, names: Collection[str]) -> None:
        """Delete some of them; nothing is waited for."""
        with self._at_once():
            for name in names:
                self._api.delete(PODS, name, grace_s=1)
                self._api.delete(SECRETS, name)
        self._keep_ways()

    def _keep_ways(self) -> None:
        """Have no way to agents that are gone."""
        if self._forwarder is not None:
            self._forwarder.keep({*self._current.values(), *self.warm_spares()})

    def adopt(self, placement: Placement) -> frozenset[int]:
        """Find the pods of a placement made earlier. Indices of the members that live."""
        self._begin()
        self._cluster_nodes.start()
        self._members = {member.index: member for member in placement.members}
        counts = {index: member.schedule_cnt for index, member in self._members.items()}
        self._current = {
            pods.member_of(pod): name
            for name, pod in self._newest().items()
            if counts.get(pods.member_of(pod)) == pods.schedule_cnt_of(pod)
        }
        self._learn_tokens([*self._current.values(), *self.warm_spares()])
        by_name = self._pods.objects
        return frozenset(
            index for index, name in self._current.items() if _lives(by_name.get(name))
        )

    def contacts(self) -> Mapping[int, AgentEndpoint]:
        """The pods of the placement that was submitted or adopted last."""
        by_name = self._pods.objects
        return {
            index: self._contact(self._current.get(index, ""), by_name, member)
            for index, member in self._members.items()
        }

    def inventory(self) -> Mapping[int, AgentEndpoint]:
        """The pods that the run has, whoever made them and for whichever placement."""
        self._begin()
        self._pods.refresh()
        newest = self._newest()
        self._learn_tokens(newest)
        return {pods.member_of(pod): self._contact(name, newest) for name, pod in newest.items()}

    def texts(self, since_s: float) -> Sequence[tuple[str, NodeLog]]:
        """What MindCluster reports since then of the nodes of the placement."""
        if self._feed is None:
            return []
        by_name = self._pods.objects
        current = {c.node: self._current.get(i, "") for i, c in self.contacts().items() if c.node}
        chips = {
            node: pods.chips_of(by_name[name]) if name in by_name else ()
            for node, name in current.items()
        }
        return [
            (node, text)
            for node, faults in self._feed.of_run(list(chips)).items()
            for text in texts_of(faults, since_s=since_s, chips=chips[node])
        ]

    def end(self) -> None:
        """End every pod of the run, and all that belongs to it."""
        self._begin()
        self._pods.refresh()
        self._ending.end(list(self._pods.objects.values()))
        self._api.delete(CONFIG_MAPS, objects.name_of(self._job))
        # The garbage collector does so, too, but not while the controller manager is away.
        for resource in self._owned:
            for name in self._names(resource):
                self._api.delete(resource, name)

    def leftovers(self) -> Sequence[str]:
        """Names of the run's objects, by their kind; a pod's processes end before it does."""
        return [
            f"{resource.plural}/{name}"
            for resource in (PODS, CONFIG_MAPS, *self._owned)
            for name in self._names(resource)
        ]

    @property
    def _owned(self) -> tuple[Resource, ...]:
        """What the run has beside its pods and the ConfigMap that owns all."""
        return (SECRETS, POD_GROUPS) if self._spec.volcano is not None else (SECRETS,)

    def _names(self, resource: Resource) -> list[str]:
        items, _ = self._api.list(resource, labels=objects.selector(self._job))
        return [str(item["metadata"]["name"]) for item in items]

    def _newest(self) -> dict[str, Document]:
        """Of each member the pod that was made last, by name; a dead node may keep older ones."""
        newest: dict[int, Document] = {}
        members = [pod for pod in self._pods.objects.values() if not pods.is_spare(pod)]
        for pod in sorted(members, key=_made_at):
            if not pods.is_leaving(pod) or pods.member_of(pod) not in newest:
                newest[pods.member_of(pod)] = pod
        return {pods.name_of(pod): pod for pod in newest.values()}

    def _contact(
        self, name: str, by_name: Mapping[str, Document], member: Member | None = None
    ) -> AgentEndpoint:
        """How a pod's agent is reached; asks nobody, for the API server may be away."""
        pod, token = by_name.get(name), self._tokens.get(name, "")
        if pod is None:
            last = self._last.get(name)
            node = last.node if last is not None else member.node if member is not None else ""
            host = last.host if last is not None else ""
            return AgentEndpoint(node, token, None, host, loss=self._with_node(pods.gone(node)))
        node, host = pods.node_of(pod), pods.host_of(pod)
        loss = pods.loss_of(pod)
        if loss is not None and loss.fault_class is FaultClass.CONTAINER_LOST:
            loss = pods.loss_of(pod, self._notes(name))
        loss = self._with_node(loss) if loss is not None else None
        address = self._address(pod) if pods.is_up(pod) else None
        problem = self._cluster_nodes.problem(node)
        contact = AgentEndpoint(
            node,
            token,
            address,
            host,
            loss,
            problem,
            was_spare=pods.was_spare(pod),
            schedule_cnt=pods.schedule_cnt_of(pod),
        )
        self._last[name] = contact
        return contact

    def _with_node(self, loss: NodeLoss) -> NodeLoss:
        absence = self._cluster_nodes.absence(loss.node)
        return pods.lost_with_node(loss, absence) if absence else loss

    def _address(self, pod: Document) -> tuple[str, int]:
        if self._forwarder is not None:
            return self._forwarder.address(pods.name_of(pod))
        return pods.host_of(pod), self._spec.agent_port

    def _learn_tokens(self, names: Iterable[str]) -> None:
        """Read the tokens of agents that another supervisor has started."""
        for name in names:
            if name in self._tokens:
                continue
            try:
                data = self._api.get(SECRETS, name)["data"]
            except ApiError as error:
                if not error.is_absent:
                    raise
                continue  # its run is being taken down
            config = base64.b64decode(data[CONFIG_FILE])
            self._tokens[name] = AgentConfig.model_validate_json(config).token

    def _notes(self, name: str) -> Sequence[Document]:
        """Events about a pod, oldest first, where they may be read.

        The one that says who took the pod away may be written a moment after the deletion.
        """
        asked_s, events = self._events.get(name, (0.0, ()))
        now_s = time.monotonic()
        if pods.says_who(events) or now_s < asked_s + NOTES_APART_S:
            return events
        fields = f"involvedObject.kind=Pod,involvedObject.name={name}"
        try:
            items, _ = self._api.list(EVENTS, fields=fields, patience_s=0.0)
        except ApiError as error:
            _log.info("why pod %s is lost is not known from events: %s", name, error)
        else:
            events = sorted(items, key=lambda event: str(event.get("lastTimestamp")))
        self._events[name] = (now_s, events)
        return events

    def _prepare(self, placement: Placement) -> None:
        self._begin()
        self._cluster_nodes.start()
        self._cluster_nodes.isolate(placement.avoid)

    def _launch(
        self, placement: Placement, members: Collection[int], ready: Collection[str]
    ) -> None:
        self._prepare(placement)
        placement = self._spared(placement)
        self._members = {member.index: member for member in placement.members}
        chosen = self._chosen(placement, members, ready)
        self._make_up(placement, set(members) - chosen.keys())
        # Not before there is room for the others: what was taken stands by no more.
        on_spares = self._take(placement, chosen)
        self._make_up(placement, chosen.keys() - on_spares)
        self._keep_ways()

    def _make_up(self, placement: Placement, members: Collection[int]) -> None:
        """Make pods for members and wait until their agents listen; else none is kept."""
        if not members:
            return
        plans = [
            self._creation.plan(placement, placement.members[index]) for index in sorted(members)
        ]
        self._current |= {plan.member.index: plan.name for plan in plans}
        names = [plan.name for plan in plans]
        try:
            self._tokens |= self._creation.create(plans, wait_s=self._spec.place_timeout_s)
            await_up(
                self._pods,
                names,
                limit_s=self._spec.place_timeout_s,
                wait_s=placement.wait_s,
                left_out=self._taken_out,
            )
        except EngineError:
            self._give_back(names)
            raise

    def _chosen(
        self, placement: Placement, members: Collection[int], ready: Collection[str]
    ) -> dict[int, str]:
        """Names of the pods that stand by and are to be taken, by member.

        Where they are not enough, the others that stand by are ended: they are where room is
        needed now.
        """
        standing = self.warm_spares()
        fits = [
            name
            for name in ready
            if name in standing
            and standing[name].loss is None
            and standing[name].node not in placement.avoid
        ]
        fits.sort(key=lambda name: standing[name].node in placement.last)
        chosen = dict(zip(sorted(members), fits, strict=False))
        if len(chosen) < len(members):
            self.end_spares(standing.keys() - chosen.values())
        return chosen

    def _take(self, placement: Placement, chosen: Mapping[int, str]) -> frozenset[int]:
        """Have members take pods, by changing their labels. Those that have one then."""
        on_spares: set[int] = set()
        for index, name in chosen.items():
            labels = objects.member_labels(placement.members[index], placement)
            try:
                self._api.patch(PODS, name, {"metadata": {"labels": labels}})
            except ApiError as error:
                _log.warning("pod %s stood by and cannot be taken: %s", name, error)
            else:
                on_spares.add(index)
                self._current[index] = name
        if on_spares:
            self._pods.refresh()
        return frozenset(on_spares)

    def _spared(self, placement: Placement) -> Placement:
        """The placement without nodes that MindCluster has taken out; they are not isolated."""
        if self._feed is None:
            return placement
        previous, self._taken_out = self._taken_out, taken_out(
            self._feed.of_cluster(self._cluster_nodes.names)
        )  # fmt: skip
        for node, why in self._taken_out.items():
            if previous.get(node) != why:
                _log.warning("%s gets no new pods, MindCluster reports %s", node, why)
        return replace(placement, avoid=tuple(dict.fromkeys((*placement.avoid, *self._taken_out))))

    def _give_back(self, names: Sequence[str]) -> None:
        """Delete pods that were made in vain, and what was made for them."""
        try:
            self._pods.refresh()
            by_name = self._pods.objects
            self._ending.end([by_name[name] for name in names if name in by_name])
            for name in names:
                self._api.delete(SECRETS, name)
        except EngineError as error:
            _log.warning("what was placed could not be given back: %s", error)


def _lives(pod: Document | None) -> bool:
    return pod is not None and pods.is_up(pod) and not pods.is_leaving(pod)


def _made_at(pod: Document) -> tuple[int, str]:
    return pods.schedule_cnt_of(pod), str(pod["metadata"]["creationTimestamp"])
