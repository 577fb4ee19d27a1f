"""The checks of a job's cluster, without a pod: rights, objects, the image, room on nodes.

Each right or object that the run needs and lacks is a failed check. A check skips objects that this
process may not read, since a run may do without that right. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from perdure.training.config.engine import KubernetesEngineSpec, Reach
from perdure.training.config.job import Job
from perdure.training.config.pod_rules import AGENT_CONFIG
from perdure.training.engines.kubernetes import objects
from perdure.training.engines.kubernetes.api import (
    CLAIMS,
    CONFIG_MAPS,
    EVENTS,
    NAMESPACES,
    NODES,
    POD_GROUPS,
    PODS,
    PRIORITY_CLASSES,
    SECRETS,
    SERVICE_ACCOUNTS,
    Api,
    ApiError,
    Resource,
    connect,
)
from perdure.training.engines.kubernetes.fault_feed import (
    CLUSTER_NAMESPACE,
    DEVICE_NAMESPACE,
    FaultFeed,
    exclusions,
)
from perdure.training.engines.kubernetes.image_checks import PullSecrets, check_image
from perdure.training.engines.kubernetes.image_registry import ImageName, credentials_of
from perdure.training.engines.kubernetes.mindcluster import DEVICE_PREFIX
from perdure.training.engines.kubernetes.nodes import lacks
from perdure.training.engines.kubernetes.objects import Document
from perdure.training.wire.node import Check, CheckOutcome


@dataclass(frozen=True, slots=True)
class Right:
    """A right of the supervisor in the run's namespace.

    Attributes:
        verb: such as "create".
        resource: the kind of object.
        purpose: why the run uses the right.
        part: subresource, such as "portforward"; "" for the object.
        is_needed: whether no run is possible without the right.
    """

    verb: str
    resource: Resource
    purpose: str
    part: str = ""
    is_needed: bool = True

    @property
    def name(self) -> str:
        """The right as `kubectl auth can-i` writes it."""
        part = f"/{self.part}" if self.part else ""
        group = f".{self.resource.group}" if self.resource.group else ""
        return f"{self.verb} {self.resource.plural}{part}{group}"


_ALWAYS: Mapping[Resource, tuple[Sequence[str], str]] = {
    PODS: (("create", "get", "list", "watch", "delete"), "the gang is made of pods"),
    SECRETS: (
        ("create", "get", "list", "delete", "patch"),
        "agents get their tokens, and the keys of the store, from Secrets",
    ),
    CONFIG_MAPS: (("create", "get", "list", "delete"), "a ConfigMap owns all that a run has"),
}


def rights_of(spec: KubernetesEngineSpec, *, in_cluster: bool) -> Iterator[Right]:
    """Yield the rights that a job uses, first those that it cannot do without.

    Args:
        spec: the engine section of the job.
        in_cluster: whether the supervisor is in a pod of the cluster.
    """
    for resource, (verbs, purpose) in _ALWAYS.items():
        for verb in verbs:
            yield Right(verb, resource, purpose)
    yield from _optional_rights(spec)
    if spec.reach is Reach.PORT_FORWARD or (spec.reach is Reach.AUTO and not in_cluster):
        yield from _port_forward_rights()
    if spec.cordon:
        yield Right("patch", NODES, "engine.cordon has isolated nodes cordoned")
        for verb in ("list", "watch"):
            yield Right(verb, NODES, "engine.cordon has to know its cordons")
    else:
        for verb in ("list", "watch"):
            purpose = "without it, a run does not know which nodes the cluster distrusts"
            yield Right(verb, NODES, purpose, is_needed=False)
    purpose = "without it, a run does not know why a pod was deleted"
    yield Right("list", EVENTS, purpose, is_needed=False)
    if any("persistentVolumeClaim" in volume.source for volume in spec.volumes):
        purpose = "without it, preflight does not check claims"
        yield Right("get", CLAIMS, purpose, is_needed=False)


def _optional_rights(spec: KubernetesEngineSpec) -> Iterator[Right]:
    if spec.num_warm_spares:
        purpose = "members take spare pods (engine.warm_spares)"
        yield Right("patch", PODS, purpose, is_needed=False)
    if spec.volcano is not None:
        for verb in ("create", "get", "list", "delete"):
            yield Right(verb, POD_GROUPS, "engine.volcano has a PodGroup made")


def _port_forward_rights() -> Iterator[Right]:
    # A stream begins with GET, which is the verb "get"; from 1.35 on "create" is needed, too
    # (https://kubernetes.io/docs/reference/command-line-tools-reference/feature-gates/,
    # AuthorizePodWebsocketUpgradeCreatePermission).
    purpose = "agents are reached through the API server (engine.reach)"
    yield Right("get", PODS, purpose, part="portforward")
    yield Right("create", PODS, f"{purpose}, from 1.35 on", part="portforward", is_needed=False)


QUEUES = Resource("scheduling.volcano.sh", "v1beta1", "queues", is_namespaced=False)
STORAGE_CLASSES = Resource("storage.k8s.io", "v1", "storageclasses", is_namespaced=False)
STORE_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
SHOWN_NODES = 8  # unfit nodes that a line has at most


def check_cluster(job: Job) -> list[Check]:
    """Check a job's cluster; a cluster that does not answer is a single failed check.

    Raises:
        InputError: the job's context is unknown.
    """
    assert isinstance(job.engine, KubernetesEngineSpec)  # noqa: S101 the registry sees to it
    api = connect(context=job.engine.context, namespace=job.engine.namespace)
    api.patience_s = 0.0  # a person waits for the answer
    try:
        return list(ClusterChecks(job, job.engine, api).all())
    except ApiError as error:
        return [_check("cluster", CheckOutcome.FAILED, str(error))]


@dataclass(frozen=True, slots=True)
class _Lookup:
    """The result of a request for an object.

    Attributes:
        document: the object; None where it does not exist or may not be read.
        is_known: whether this process may read it.
    """

    document: Document | None
    is_known: bool = True


class ClusterChecks:
    """The checks of a job.

    Args:
        job: the job to check.
        spec: its engine section.
        api: the job's cluster.
    """

    def __init__(self, job: Job, spec: KubernetesEngineSpec, api: Api) -> None:
        self._job, self._spec, self._api = job, spec, api
        self._pod = objects.sample_pod(job, spec)["spec"]  # its references have to exist

    def all(self) -> Iterator[Check]:
        """Run all checks, in the order in which people would fix their findings.

        Raises:
            ApiError: the API server does not answer.
        """
        namespace = self._look_up(NAMESPACES, self._api.namespace)
        yield self._object("namespace", namespace, self._api.namespace)
        if namespace.is_known and namespace.document is None:
            return  # nothing else can be there
        yield from self._rights()
        yield from self._references()
        yield from self._secrets()
        yield from self._volumes()
        yield from self._volcano()
        yield from self._nodes()
        yield self._mindcluster()

    def _rights(self) -> Iterator[Check]:
        num_held, missing = 0, []
        for right in rights_of(self._spec, in_cluster=self._api.in_cluster):
            if self._api.allows(right.verb, right.resource, part=right.part):
                num_held += 1
            else:
                missing.append(right)
        for right in missing:
            outcome = CheckOutcome.FAILED if right.is_needed else CheckOutcome.SKIPPED
            place = f" in {self._api.namespace}" if right.resource.is_namespaced else ""
            yield _check("rights", outcome, f"may not {right.name}{place}: {right.purpose}")
        if not any(right.is_needed for right in missing):
            yield _check(
                "rights", CheckOutcome.OK, f"{num_held} of {num_held + len(missing)} are there"
            )

    def _look_up(self, resource: Resource, name: str) -> _Lookup:
        try:
            return _Lookup(self._api.get(resource, name))
        except ApiError as error:
            if error.is_absent:
                return _Lookup(None)
            if error.is_forbidden:
                return _Lookup(None, is_known=False)
            raise

    def _object(self, kind: str, lookup: _Lookup, name: str) -> Check:
        if not lookup.is_known:
            return _check(kind, CheckOutcome.SKIPPED, f"{name}: this process may not read it")
        if lookup.document is None:
            return _check(kind, CheckOutcome.FAILED, f"{name} does not exist")
        return _check(kind, CheckOutcome.OK, name)

    def _references(self) -> Iterator[Check]:
        account = self._pod.get("serviceAccountName")
        if account:
            yield self._object("service_account", self._look_up(SERVICE_ACCOUNTS, account), account)
        priority = self._pod.get("priorityClassName")
        if priority:
            yield self._object(
                "priority_class", self._look_up(PRIORITY_CLASSES, priority), priority
            )

    def _secrets(self) -> Iterator[Check]:
        for pull in self._pod.get("imagePullSecrets") or ():
            yield self._pull_secret(pull["name"])
        for name in self._spec.env_secrets:
            yield self._secret("env_secret", name, ())
        if self._spec.storage_secret is not None:
            yield self._secret("storage_secret", self._spec.storage_secret, STORE_KEYS)

    def _pull_secret(self, name: str) -> Check:
        kind, lookup = "image_pull_secret", self._look_up(SECRETS, name)
        if lookup.document is not None:
            try:
                credentials_of(lookup.document)
            except ValueError as error:
                return _check(kind, CheckOutcome.WARNING, f"{name}: {error}")
        return self._object(kind, lookup, name)

    def _secret(self, kind: str, name: str, keys: Sequence[str]) -> Check:
        lookup = self._look_up(SECRETS, name)
        lacking = [key for key in keys if key not in ((lookup.document or {}).get("data") or {})]
        if lookup.document is not None and lacking:
            text = f"{name} has no {' and no '.join(lacking)}"
            return _check(kind, CheckOutcome.FAILED, text, " and ".join(keys))
        return self._object(kind, lookup, name)

    def _volumes(self) -> Iterator[Check]:
        for volume in self._pod["volumes"]:
            claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
            if claim is not None:
                yield self._claim(claim)
            for kind, resource in (("configMap", CONFIG_MAPS), ("secret", SECRETS)):
                source = volume.get(kind) or {}
                name = source.get("name") or source.get("secretName")
                # The engine creates the agent's configuration with the pod.
                if name and not source.get("optional") and volume["name"] != AGENT_CONFIG:
                    yield self._object("volume", self._look_up(resource, name), f"{kind} {name}")

    def _claim(self, name: str) -> Check:
        lookup = self._look_up(CLAIMS, name)
        if lookup.document is None:
            return self._object("volume_claim", lookup, name)
        phase = (lookup.document.get("status") or {}).get("phase")
        if phase == "Bound":
            return _check("volume_claim", CheckOutcome.OK, f"{name} is bound")
        kind = lookup.document["spec"].get("storageClassName")
        text = f"{name} is {phase or 'not bound'}"
        text += f", its storage class is {kind}" if kind else ", it has no storage class"
        if phase == "Pending" and kind:
            storage = self._look_up(STORAGE_CLASSES, kind)
            if not storage.is_known:
                text += ", which this process may not read"
                return _check("volume_claim", CheckOutcome.WARNING, text, "bound")
            if (storage.document or {}).get("volumeBindingMode") == "WaitForFirstConsumer":
                text = f"{name} is bound once a pod uses it"
                return _check("volume_claim", CheckOutcome.OK, text)
        return _check("volume_claim", CheckOutcome.FAILED, text, "bound")

    def _volcano(self) -> Iterator[Check]:
        volcano = self._spec.volcano
        if volcano is None:
            return
        if not self._api.has(POD_GROUPS):
            text = "the cluster has no PodGroup of scheduling.volcano.sh/v1beta1: no Volcano"
            yield _check("volcano", CheckOutcome.FAILED, text)
            return
        lookup = self._look_up(QUEUES, volcano.queue)
        yield self._object("volcano", lookup, f"queue {volcano.queue}")

    def _nodes(self) -> Iterator[Check]:
        try:
            nodes, _ = self._api.list(NODES)
        except ApiError as error:
            if not error.is_forbidden:
                raise
            text = "this process may not read them: how many have room is unknown"
            yield _check("nodes", CheckOutcome.SKIPPED, text)
            yield self._image(None)
            return
        names = {node["metadata"]["name"]: node for node in nodes}
        left_out = self._left_out(list(names))
        why = {
            name: [*lacks(node, self._pod), *left_out.get(name, ())] for name, node in names.items()
        }
        yield self._room(why)
        yield self._image(nodes)

    def _left_out(self, nodes: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
        if not self._spec.mindcluster:
            return {}
        excluded = exclusions(FaultFeed(self._api).of_cluster(nodes))
        return {node: (f"MindCluster reports {why}",) for node, why in excluded.items()}

    def _room(self, why: Mapping[str, Sequence[str]]) -> Check:
        spec = self._spec
        fit = [node for node, reasons in why.items() if not reasons]
        wanted = spec.nodes + spec.spares
        finding = f"{len(fit)} of {len(why)} fit, pods that are there not counted"
        unfit = [
            f"{node}: {', '.join(reasons)}" for node, reasons in sorted(why.items()) if reasons
        ]
        if len(fit) < wanted and unfit:
            more = f"; and {len(unfit) - SHOWN_NODES} more" if len(unfit) > SHOWN_NODES else ""
            finding += f"; {'; '.join(unfit[:SHOWN_NODES])}{more}"
        outcome = CheckOutcome.OK if len(fit) >= wanted else CheckOutcome.WARNING
        outcome = outcome if len(fit) >= spec.nodes else CheckOutcome.FAILED
        return _check("nodes", outcome, finding, f"{spec.nodes} and {spec.spares} spare")

    def _image(self, nodes: Sequence[Document] | None) -> Check:
        (agent,) = (
            container for container in self._pod["containers"] if container["name"] == objects.AGENT
        )
        return check_image(
            agent["image"],
            policy=agent.get("imagePullPolicy", "IfNotPresent"),  # an overlay may remove it
            nodes=nodes,
            read_secrets=self._pull_secrets,
        )

    def _pull_secrets(self, image: ImageName) -> PullSecrets:
        """Read the Secrets that the pod pulls with: its own, or those of its account."""
        named = self._pod.get("imagePullSecrets")
        if not named:
            account = self._look_up(
                SERVICE_ACCOUNTS, self._pod.get("serviceAccountName", "default")
            )
            named = (account.document or {}).get("imagePullSecrets")
        secrets = PullSecrets([reference["name"] for reference in named or ()])
        for name in secrets.names:
            lookup = self._look_up(SECRETS, name)
            if lookup.document is not None:
                with suppress(ValueError):  # another check reports it, and nodes do without it
                    secrets.credentials += credentials_of(lookup.document).for_image(image)
            elif not lookup.is_known:
                secrets.unknown.append(name)
        return secrets

    def _mindcluster(self) -> Check:
        if not self._spec.mindcluster:
            return _check("mindcluster", CheckOutcome.SKIPPED, "engine.mindcluster=false")
        # ConfigMaps of nodes have the nodes' names; a Role may list the names of ClusterD's.
        places = ((DEVICE_NAMESPACE, ""), (CLUSTER_NAMESPACE, "cluster-info-device-0"))
        missing = [
            f"{name or DEVICE_PREFIX + '*'} in {place}"
            for place, name in places
            if not self._api.allows("get", CONFIG_MAPS, namespace=place, name=name)
        ]
        if missing:
            text = f"may not get ConfigMaps {' or '.join(missing)}: what they report is missed"
            return _check("mindcluster", CheckOutcome.SKIPPED, text)
        return _check("mindcluster", CheckOutcome.OK, "its reports are read where there are any")


def _check(name: str, outcome: CheckOutcome, finding: str, allowed: str = "") -> Check:
    return Check(name=name, outcome=outcome, seen=finding, allowed=allowed)
