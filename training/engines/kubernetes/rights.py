"""The rights that a supervisor needs for a job's settings, as the engine uses them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from perdure.training.engines.kubernetes.api import (
    CLAIMS,
    CONFIG_MAPS,
    EVENTS,
    NODES,
    POD_GROUPS,
    PODS,
    SECRETS,
    Resource,
)
from perdure.training.specs.engine import KubernetesEngineSpec, Reach


@dataclass(frozen=True, slots=True)
class Right:
    """One right.

    Attributes:
        verb: such as "create".
        resource: on which kind of object.
        part: of it, such as "portforward"; "" for the object.
        purpose: what it is for.
        is_needed: whether no run is possible without it.
    """

    verb: str
    resource: Resource
    purpose: str
    part: str = ""
    is_needed: bool = True

    @property
    def name(self) -> str:
        """As kubectl has it in `auth can-i`."""
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
    """The rights for a job, those that it cannot do without first.

    Args:
        spec: the engine section of the job.
        in_cluster: whether the supervisor is in a pod of the cluster.
    """
    for resource, (verbs, purpose) in _ALWAYS.items():
        for verb in verbs:
            yield Right(verb, resource, purpose)
    yield from _of_sections(spec)
    if spec.reach is Reach.PORT_FORWARD or (spec.reach is Reach.AUTO and not in_cluster):
        yield from _port_forward()
    if spec.cordon:
        yield Right("patch", NODES, "engine.cordon has isolated nodes cordoned")
        for verb in ("list", "watch"):
            yield Right(verb, NODES, "engine.cordon has to know what it cordoned")
    else:
        for verb in ("list", "watch"):
            purpose = "what the cluster says of nodes is not known to a run without it"
            yield Right(verb, NODES, purpose, is_needed=False)
    purpose = "who took a pod away is not known to a run without it"
    yield Right("list", EVENTS, purpose, is_needed=False)
    if any("persistentVolumeClaim" in volume.source for volume in spec.volumes):
        purpose = "claims are not looked at without it"
        yield Right("get", CLAIMS, purpose, is_needed=False)


def _of_sections(spec: KubernetesEngineSpec) -> Iterator[Right]:
    if spec.num_warm_spares:
        purpose = "members take pods that stand by (engine.warm_spares)"
        yield Right("patch", PODS, purpose, is_needed=False)
    if spec.volcano is not None:
        for verb in ("create", "get", "list", "delete"):
            yield Right(verb, POD_GROUPS, "engine.volcano has a PodGroup made")


def _port_forward() -> Iterator[Right]:
    # A stream begins with GET, which is the verb "get"; from 1.35 on "create" is asked for, too
    # (https://kubernetes.io/docs/reference/command-line-tools-reference/feature-gates/,
    # AuthorizePodWebsocketUpgradeCreatePermission).
    purpose = "agents are reached through the API server (engine.reach)"
    yield Right("get", PODS, purpose, part="portforward")
    yield Right("create", PODS, f"{purpose}, from 1.35 on", part="portforward", is_needed=False)
