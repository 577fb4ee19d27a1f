"""The engine of a Kubernetes cluster: each container is a pod, its agent the first process.

The cluster's scheduler chooses nodes; the affinity of new pods excludes isolated ones, for which
the engine needs no right on nodes. It finds all objects of a run by their labels. Times are
seconds.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from perdure.training.agent.agent import CONFIG_FILE
from perdure.training.config.engine import KubernetesEngineSpec, Reach
from perdure.training.config.job import Job
from perdure.training.diagnosis.evidence import NodeLoss
from perdure.training.engines.base import AgentEndpoint, Placement
from perdure.training.engines.kubernetes import objects
from perdure.training.engines.kubernetes.api import (
    CONFIG_MAPS,
    POD_GROUPS,
    PODS,
    SECRETS,
    ApiError,
    Resource,
    connect,
)
from perdure.training.engines.kubernetes.fault_feed import (
    FaultFeed,
    chip_reports,
    exclusions,
    fault_logs,
)
from perdure.training.engines.kubernetes.forwarding import Forwarder
from perdure.training.engines.kubernetes.nodes import ClusterNodes
from perdure.training.engines.kubernetes.own_pod import label_supervisor
from perdure.training.engines.kubernetes.pod_events import PodEvents
from perdure.training.engines.kubernetes.pod_launch import PodLaunch
from perdure.training.engines.kubernetes.pod_lifecycle import PodCreation, PodEnd, answering
from perdure.training.engines.kubernetes.pods import (
    Pod,
    lost_with_node,
    not_replaced,
    read_pods,
    vanished,
    without_token,
)
from perdure.training.engines.kubernetes.watching import Informer
from perdure.training.errors import EngineError
from perdure.training.journal.records import Member
from perdure.training.recovery.chip_events import ChipReport
from perdure.training.recovery.faults import FaultClass
from perdure.training.recovery.rungs import Rung
from perdure.training.wire.agent import NO_MEMBER, AgentConfig, NodeLog

FORWARDED_POLL_S = 1.0  # each call is a separate request to the API server
POLL_S = 0.2

_log = logging.getLogger("perdure.engine")


class KubernetesEngine:
    """Containers as pods of a cluster; the arguments are those of `make_engine`."""

    def __init__(
        self,
        job: Job,
        *,
        home: Path,  # noqa: ARG002 every engine has it; this one keeps no files here
        epoch: int,
        secrets_env: Mapping[str, str] | None = None,
        created_s: float = 0.0,
    ) -> None:
        assert isinstance(job.engine, KubernetesEngineSpec)  # noqa: S101 the registry sees to it
        self._job, self._spec = job, job.engine
        self._api = connect(context=self._spec.context, namespace=self._spec.namespace)
        self._informer = Informer(self._api, PODS, labels=objects.selector(job, objects.AGENT))
        self._cluster_nodes = ClusterNodes(self._api, self._spec, job.run_id)
        self._creation = PodCreation(
            self._api, self._informer, job, self._spec,
            epoch=epoch, secrets_env=secrets_env or {}, created_s=created_s,
        )  # fmt: skip
        self._ending = PodEnd(
            self._api, self._informer, self._cluster_nodes, self._address,
            unmount_after_s=job.restart.unmount_after_s,
        )  # fmt: skip
        self._forwarder = None if self._is_direct else Forwarder(self._api, self._spec.agent_port)
        self._members: dict[int, Member] = {}  # the current placement's
        self._current: dict[int, str] = {}  # names of the members' pods, where they have one
        self._last: dict[str, AgentEndpoint] = {}  # by pod, as of its last document
        self._tokens: dict[str, str] = {}
        self._taken_down: set[str] = set()  # pods to which nothing has happened but this engine
        self._is_ours = False
        self._events = PodEvents(self._api)
        self._feed = FaultFeed(self._api) if self._spec.mindcluster else None
        self._excluded: dict[str, str] = {}  # nodes that MindCluster takes out, with reasons

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
        """Whether agents can be reached: through the API server only while it answers."""
        return self._forwarder is None or not (self._forwarder.is_cut or self._informer.is_away)

    def _begin(self) -> None:
        """Follow the run's pods, and make sure that they are not another run's.

        Raises:
            EngineError: another run of this name is in the namespace.
        """
        self._informer.start()
        if self._is_ours:
            return
        if self._api.in_cluster:
            label_supervisor(self._api, self._job)
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
        """How often polling all agents is worth its cost."""
        return POLL_S if self._forwarder is None else FORWARDED_POLL_S

    def nodes(self) -> Sequence[str] | None:
        """Return None: the cluster's scheduler chooses nodes."""
        return None

    def find_way(self) -> bool:
        """Look for agents that are all silent through the API server.

        Once it leads to one of them, all are reached that way. Without the right to it, pods that
        are ready on sound nodes run. While the server is away, too, nobody could have heard them.
        """
        if self._forwarder is not None:
            return False
        if self._informer.is_away:
            return True
        pods = [pod for name, pod in self._pods.items() if name in self._current.values()]
        forwarder = Forwarder(self._api, self._spec.agent_port)
        if answering({pod.name: forwarder.address(pod.name) for pod in pods if pod.is_up}):
            _log.warning("no agent answers at its address: all are reached through the API server")
            self._forwarder = forwarder
            return True
        forwarder.keep(())
        if not forwarder.is_refused:
            return forwarder.is_cut
        problem = self._cluster_nodes.problem
        runs = bool(pods) and all(pod.is_ready and not problem(pod.node) for pod in pods)
        if runs:
            _log.warning("no agent answers, but all pods are ready; no right to pods/portforward")
        return runs

    def usable_nodes(self) -> Collection[str] | None:
        """Names of the nodes that fit a pod, taken or not; None without the right to list nodes."""
        nodes = self._cluster_nodes.fitting(objects.sample_pod(self._job, self._spec)["spec"])
        return nodes - self._excluded.keys() if nodes is not None else None

    def failure_domains(self) -> Mapping[str, str]:
        """Failure domains by node."""
        return self._cluster_nodes.failure_domains

    def submit(self, placement: Placement, *, ready: Collection[str] = ()) -> None:
        """End the run's pods, and start one for every member."""
        if ready:  # the ConfigMap that owns all stays, or the spares would go with it
            self._begin()
            self._informer.refresh()
            former = [pod for name, pod in self._pods.items() if name not in ready]
            self._ending.end(former)
            for pod in former:
                self._api.delete(SECRETS, pod.name)
        else:
            self._end()
        self._launch(placement, [member.index for member in placement.members], ready)

    def replace(
        self, placement: Placement, members: Collection[int], *, ready: Collection[str] = ()
    ) -> None:
        """Start new pods for these members; the others keep theirs."""
        self._begin()
        former = [pod for pod in self._pods.values() if pod.member in members]
        self._taken_down |= {pod.name for pod in former}
        self._ending.end(former, left=placement.avoid)
        names = {pod.name for pod in former}
        for name in names | {self._current[index] for index in members if index in self._current}:
            self._api.delete(SECRETS, name)
        self._launch(placement, members, ready)

    def start_spare(self, placement: Placement, node: str) -> None:
        """Create a spare pod; returns at once."""
        with self._api.without_patience(is_away=self._informer.is_away):
            self._prepare(placement)
            nobody = Member(index=NO_MEMBER, node=node, schedule_cnt=0)
            plan = self._creation.plan(self._without_excluded(placement), nobody)
            try:
                self._tokens |= self._creation.create([plan], on_pending=None)
            except EngineError:
                self._api.delete(SECRETS, plan.name)  # it is created before the pod
                raise

    def warm_spares(self) -> Mapping[str, AgentEndpoint]:
        """The spare pods that no member has taken yet, by name."""
        by_name = self._pods
        return {
            name: self._contact(name, by_name)
            for name, pod in by_name.items()
            if pod.is_spare and not pod.is_leaving
        }

    def end_spares(self, names: Collection[str]) -> None:
        """Delete spare pods without waiting for their end."""
        with self._api.without_patience(is_away=self._informer.is_away):
            for name in names:
                self._api.delete(PODS, name, grace_s=1)
                self._api.delete(SECRETS, name)
        self._keep_ways()

    def _keep_ways(self) -> None:
        """Close the ways to agents that are gone."""
        if self._forwarder is not None:
            self._forwarder.keep({*self._current.values(), *self.warm_spares()})

    def adopt(self, placement: Placement) -> frozenset[int]:
        """Find the pods of an earlier placement. Returns the indices of living members."""
        self._begin()
        self._cluster_nodes.start()
        self._members = {member.index: member for member in placement.members}
        counts = {index: member.schedule_cnt for index, member in self._members.items()}
        self._current = {
            pod.member: name
            for name, pod in self._newest().items()
            if counts.get(pod.member) == pod.schedule_cnt
        }
        self._learn_tokens([*self._current.values(), *self.warm_spares()])
        living = {
            name
            for name, pod in self._pods.items()
            if pod.is_up and not pod.is_leaving and name in self._tokens
        }
        return frozenset(index for index, name in self._current.items() if name in living)

    def contacts(self) -> Mapping[int, AgentEndpoint]:
        """The pods of the placement that was submitted or adopted last."""
        by_name = self._pods
        return {
            index: self._contact(self._current.get(index, ""), by_name, member)
            for index, member in self._members.items()
        }

    def inventory(self) -> Mapping[int, AgentEndpoint]:
        """All pods of the run's members, also those of other supervisors and placements."""
        self._begin()
        self._informer.refresh()
        newest = self._newest()
        self._learn_tokens(newest)
        return {pod.member: self._contact(name, newest) for name, pod in newest.items()}

    def texts(self, since_s: float) -> Sequence[tuple[str, NodeLog]]:
        """Read MindCluster's reports of the placement's nodes since a moment."""
        if self._feed is None:
            return []
        by_name = self._pods
        current = {c.node: self._current.get(i, "") for i, c in self.contacts().items() if c.node}
        chips = {
            node: by_name[name].chips if name in by_name else () for node, name in current.items()
        }
        return [
            (node, text)
            for node, faults in self._feed.of_run(list(chips)).items()
            for text in fault_logs(faults, since_s=since_s, chips=chips[node])
        ]

    def chip_reports(self, since_s: float) -> Sequence[ChipReport]:
        """Read MindCluster's reports of the chips of the placement's pods; any thread may ask."""
        if self._feed is None:
            return []
        by_name, names = self._pods, tuple(self._current.values())
        chips = {by_name[name].node: by_name[name].chips for name in names if name in by_name}
        return [
            report
            for node, faults in self._feed.of_run([node for node in chips if node]).items()
            for report in chip_reports(node, faults, since_s=since_s, chips=chips[node])
        ]

    def end(self) -> None:
        """End every pod of the run, and delete all its objects."""
        self._end(is_last=True)

    def _end(self, *, is_last: bool = False) -> None:
        self._begin()
        self._informer.refresh()
        if is_last and self._spec.kueue is not None:
            self._ending.end_group(self._pods)
        self._ending.end(list(self._pods.values()))
        self._api.delete(CONFIG_MAPS, objects.name_of(self._job))
        # The garbage collector does so, too, but not while the controller manager is away.
        for resource in self._owned:
            for name in self._names(resource):
                self._api.delete(resource, name)

    def leftovers(self) -> Sequence[str]:
        """List the run's objects by kind and name; a pod's processes end before it does."""
        return [
            f"{resource.plural}/{name}"
            for resource in (PODS, CONFIG_MAPS, *self._owned)
            for name in self._names(resource)
        ]

    @property
    def _owned(self) -> tuple[Resource, ...]:
        """The kinds of the run's objects beside its pods and the ConfigMap that owns them."""
        return (SECRETS, POD_GROUPS) if self._spec.volcano is not None else (SECRETS,)

    def _names(self, resource: Resource) -> list[str]:
        part = objects.AGENT if resource is PODS else None  # the supervisor's has the label, too
        items, _ = self._api.list(resource, labels=objects.selector(self._job, part))
        return [str(item["metadata"]["name"]) for item in items]

    @property
    def _pods(self) -> dict[str, Pod]:
        return read_pods(self._informer.objects)

    def _newest(self) -> dict[str, Pod]:
        """The newest pod of each member, by name; a dead node may keep older ones."""
        newest: dict[int, Pod] = {}
        pods = [pod for pod in self._pods.values() if not pod.is_spare]
        for pod in sorted(pods, key=_creation_order):
            if not pod.is_leaving or pod.member not in newest:
                newest[pod.member] = pod
        return {pod.name: pod for pod in newest.values()}

    def _contact(
        self, name: str, by_name: Mapping[str, Pod], member: Member | None = None
    ) -> AgentEndpoint:
        """Describe a pod to the fleet without a request: the API server may be away."""
        pod, token = by_name.get(name), self._tokens.get(name, "")
        last = self._last.get(name)
        if name in self._taken_down and last is not None:
            # As it was before: another pod has not come up in its place.
            loss = not_replaced(last.loss)
            problem = self._cluster_nodes.problem(last.node)
            return replace(last, address=None, loss=loss, node_problem=problem)
        if pod is None:
            node = last.node if last is not None else member.node if member is not None else ""
            host = last.host if last is not None else ""
            return AgentEndpoint(node, token, None, host, loss=self._with_node(vanished(node)))
        loss = pod.loss()
        if loss is not None and loss.fault_class is FaultClass.CONTAINER_LOST:
            loss = pod.loss(self._events.about(name))
        if loss is None and not token:
            loss = without_token(pod)
        contact = AgentEndpoint(
            pod.node,
            token,
            self._address(pod) if pod.is_up and token else None,
            pod.host,
            self._with_node(loss) if loss is not None else None,
            self._cluster_nodes.problem(pod.node),
            unknown=self._informer.refusal,
            was_spare=pod.was_spare,
            schedule_cnt=pod.schedule_cnt,
        )
        self._last[name] = contact
        return contact

    def _with_node(self, loss: NodeLoss) -> NodeLoss:
        absence = self._cluster_nodes.absence(loss.node)
        return lost_with_node(loss, absence) if absence else loss

    def _address(self, pod: Pod) -> tuple[str, int]:
        if self._forwarder is not None:
            return self._forwarder.address(pod.name)
        return pod.host, self._spec.agent_port

    def _learn_tokens(self, names: Iterable[str]) -> None:
        """Read the tokens of agents that an earlier supervisor has started.

        A Secret that is gone, or has no configuration, costs its pod alone.
        """
        for name in names:
            if name in self._tokens:
                continue
            try:
                data = self._api.get(SECRETS, name).get("data") or {}
                config = base64.b64decode(data[CONFIG_FILE])
                self._tokens[name] = AgentConfig.model_validate_json(config).token
            except ApiError as error:
                if not error.is_absent:
                    raise
            except (KeyError, ValueError) as error:
                _log.warning("Secret %s has no configuration of an agent: %r", name, error)

    def _prepare(self, placement: Placement) -> None:
        self._begin()
        self._cluster_nodes.start()
        self._cluster_nodes.isolate(placement.avoid)

    def _launch(
        self, placement: Placement, members: Collection[int], ready: Collection[str]
    ) -> None:
        self._prepare(placement)
        placement = self._without_excluded(placement)
        self._members = {member.index: member for member in placement.members}
        chosen = self._choose_spares(placement, members, ready)
        self._bring_up(placement, set(members) - chosen.keys())
        # Not before there is room for the others: members take spares for good.
        on_spares = self._take_spares(placement, chosen)
        self._bring_up(placement, chosen.keys() - on_spares)
        self._keep_ways()

    def _bring_up(self, placement: Placement, members: Collection[int]) -> None:
        if not members:
            return
        launch = PodLaunch(self._api, self._informer, self._creation, self._ending)
        launch.bring_up(placement, members, left_out=self._excluded)
        self._current |= launch.names
        self._tokens |= launch.tokens

    def _choose_spares(
        self, placement: Placement, members: Collection[int], ready: Collection[str]
    ) -> dict[int, str]:
        """Choose spare pods for members. Returns their names by member.

        Where spares are too few, the engine ends those that no member takes: they have the room
        that new pods need.
        """
        spares = self.warm_spares()
        fits = [
            name
            for name in ready
            if name in spares
            and spares[name].loss is None
            and spares[name].node not in placement.avoid
        ]
        fits.sort(key=lambda name: spares[name].node in placement.last)
        chosen = dict(zip(sorted(members), fits, strict=False))
        if len(chosen) < len(members):
            self.end_spares(spares.keys() - chosen.values())
        return chosen

    def _take_spares(self, placement: Placement, chosen: Mapping[int, str]) -> frozenset[int]:
        """Have members take spare pods, by their labels. Returns the members that got one."""
        on_spares: set[int] = set()
        for index, name in chosen.items():
            changes = objects.taken(placement.members[index], placement, self._spec)
            try:
                self._api.patch(PODS, name, changes)
            except ApiError as error:
                _log.warning("no member can take the spare pod %s: %s", name, error)
            else:
                on_spares.add(index)
                self._current[index] = name
        if on_spares:
            self._informer.refresh()
        return frozenset(on_spares)

    def _without_excluded(self, placement: Placement) -> Placement:
        """Have a placement avoid the nodes that MindCluster takes out, without isolating them."""
        if self._feed is None:
            return placement
        excluded = exclusions(self._feed.of_cluster(self._cluster_nodes.names))
        for node, why in excluded.items():
            if self._excluded.get(node) != why:
                _log.warning("%s gets no new pods, MindCluster reports %s", node, why)
        self._excluded = excluded
        return replace(placement, avoid=tuple(dict.fromkeys((*placement.avoid, *excluded))))


def _creation_order(pod: Pod) -> tuple[int, str]:
    return pod.schedule_cnt, str(pod.document["metadata"]["creationTimestamp"])
