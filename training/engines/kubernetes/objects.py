"""The documents of a run's objects in a cluster: owner, Secrets, pods, Volcano's PodGroup. Pure.

A ConfigMap owns all of them, so that nothing is left once it is deleted. Names of pods end with
random letters: a pod that a dead node has not given up yet is no obstacle to the next.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.training.agent.__main__ import HOST_ENV, NODE_ENV
from perdure.training.agent.agent import CONFIG_FILE
from perdure.training.config import pod_rules
from perdure.training.config.engine import KubernetesEngineSpec
from perdure.training.config.job import Job
from perdure.training.config.pod_sections import VolcanoSpec, VolumeSpec
from perdure.training.engines.base import ANY_NODE, Placement
from perdure.training.journal.records import Member
from perdure.training.processes import MARKER
from perdure.training.wire.agent import NO_MEMBER

Document = dict[str, Any]

APP = "app.kubernetes.io/name"
PART = "app.kubernetes.io/component"
RUN = "perdure.io/run"
MEMBER = "perdure.io/member"
SCHEDULE_CNT = "perdure.io/schedule-cnt"
PLACEMENT = "perdure.io/placement"
WAS_SPARE = "perdure.io/stood-by"  # the pod was started before a member needed it
# A job may not replace these; `pod_rules` checks its section without an engine.
AGENT = pod_rules.AGENT
AGENT_CONFIG = pod_rules.AGENT_CONFIG
FOLDER = pod_rules.FOLDER
CONFIG_FOLDER = pod_rules.CONFIG_FOLDER
NODE_FOLDER = pod_rules.NODE_FOLDER
# Beyond grace_s: agents upload logs and close their checkpoint server after their workers.
GRACE_MARGIN_S = 10.0
# The first import of a cold image may take a minute; the probe begins at once and is cheap.
START_PROBE_PERIOD_S = 1
START_PROBES = 300
HOSTNAME = "kubernetes.io/hostname"
SP_BLOCK = "sp-block"  # MindCluster's, of the PodGroup; without a domain
# Kueue's words: https://kueue.sigs.k8s.io/docs/tasks/run/plain_pods/
_KUEUE = "kueue.x-k8s.io"
# A pod with it makes its group one that gets no other pods: the run is over.
LAST_OF_GROUP: Document = {"metadata": {"annotations": {f"{_KUEUE}/retriable-in-group": "false"}}}
# Volcano counts the pods of a group by these names of tasks.
_TASK = "volcano.sh/task-spec"
_MEMBERS, _SPARES = "member", "spare"
# The user of the image. PodSecurity's level `restricted` asks for all of the rest.
_RESTRICTED_POD: Mapping[str, Any] = {
    "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000, "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip
_RESTRICTED_CONTAINER: Mapping[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}


@dataclass(frozen=True, slots=True)
class Owner:
    """The ConfigMap that owns all objects of a run."""

    name: str
    uid: str

    @property
    def reference(self) -> Document:
        """The owner as an object refers to it."""
        return {"apiVersion": "v1", "kind": "ConfigMap", "name": self.name, "uid": self.uid}


def name_of(job: Job) -> str:
    """Name of the run's ConfigMap and PodGroup."""
    return f"perdure-{job.run_id}"


def pod_name(job: Job, member: Member, letters: str) -> str:
    """Compose the name of a pod: at most 63 characters, since it is the host's name, too."""
    role = "standby" if member.index == NO_MEMBER else f"m{member.index}-s{member.schedule_cnt}"
    end = f"-{role}-{letters}"
    return name_of(job)[: 63 - len(end)].rstrip("-") + end


def run_labels(job: Job) -> dict[str, str]:
    """Labels of all objects of a run."""
    return {APP: "perdure", RUN: job.run_id}


def selector(job: Job, part: str | None = None) -> str:
    """Compose the label selector of a run's objects, or of one kind of them."""
    labels = run_labels(job) | ({PART: part} if part is not None else {})
    return ",".join(f"{name}={value}" for name, value in labels.items())


def owner(job: Job) -> Document:
    """Compose the ConfigMap that owns the other objects and shows people what the run is."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name_of(job), "labels": run_labels(job) | {PART: "run"}},
        "data": {"run_id": job.run_id, "store": job.storage.address},
    }


def secret(
    job: Job, owned_by: Owner, name: str, values: Mapping[str, str], *, part: str
) -> Document:
    """Compose a Secret with text values."""
    encoded = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {
            "name": name,
            "labels": run_labels(job) | {PART: part},
            "ownerReferences": [owned_by.reference],
        },
        "data": encoded,
    }


def pod_group(
    job: Job, spec: KubernetesEngineSpec, volcano: VolcanoSpec, owned_by: Owner
) -> Document:
    """Compose Volcano's PodGroup: no pod is placed before all can be."""
    document: Document = {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": {
            "name": name_of(job),
            "labels": run_labels(job) | {PART: "pod-group"},
            "ownerReferences": [owned_by.reference],
        },
        "spec": {
            "minMember": spec.nodes,
            # Warm spares belong to the group, and must not stand for members.
            "minTaskMember": {_MEMBERS: spec.nodes},
            "queue": volcano.queue,
        },
    }
    if (topology := volcano.network_topology) is not None:
        limit = topology.highest_tier
        tiers = {"highestTierAllowed": limit} if limit is not None else {}
        document["spec"]["networkTopology"] = {"mode": topology.mode, **tiers}
    if volcano.sp_block is not None:
        document["metadata"]["annotations"] = {SP_BLOCK: str(volcano.sp_block)}
    if spec.resources:
        total = {name: _times(amount, spec.nodes) for name, amount in spec.resources.items()}
        document["spec"]["minResources"] = total
    if spec.priority_class is not None:
        document["spec"]["priorityClassName"] = spec.priority_class
    return document


def _times(amount: str | int, count: int) -> str:
    """Multiply a quantity: 700Gi times 2 is 1400Gi."""
    text = str(amount)
    digits = text.rstrip("EPTGMKiknmu")
    number, unit = float(digits) * count, text[len(digits) :]
    return f"{number:.10g}{unit}"


@dataclass(frozen=True, slots=True)
class PodPlan:
    """A pod before it is created.

    Attributes:
        member: the pod's member; a spare's has the index NO_MEMBER.
        name: the name of the pod, and of the Secret with its agent's configuration.
        placement: the members that the pod joins.
    """

    member: Member
    name: str
    placement: Placement

    @property
    def is_spare(self) -> bool:
        """Whether no member takes the pod at once."""
        return self.member.index == NO_MEMBER


def pod(
    job: Job,
    spec: KubernetesEngineSpec,
    owned_by: Owner,
    plan: PodPlan,
    *,
    store_secret: str | None,
) -> Document:
    """Compose a pod.

    Args:
        job: the run's job.
        spec: its engine section.
        owned_by: the run's ConfigMap.
        plan: the pod's member and name.
        store_secret: name of the Secret with the keys of the store; None: the pod has no keys.
    """
    labels = run_labels(job) | {PART: AGENT} | member_labels(plan.member, plan.placement)
    if plan.is_spare:
        labels[WAS_SPARE] = "true"
    document: Document = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": plan.name,
            "labels": {**spec.labels, **labels, **_queue_labels(job, spec)},
            "annotations": _annotations(job, spec, plan),
            "ownerReferences": [owned_by.reference],
        },
        "spec": _pod_spec(job, spec, plan, store_secret),
    }
    merged: Document = overlaid(document, spec.pod)
    return merged


def sample_pod(job: Job, spec: KubernetesEngineSpec) -> Document:
    """Compose a pod as the engine would create it, with the overlay, of no particular member."""
    member = Member(index=0, node=ANY_NODE, schedule_cnt=1)
    plan = PodPlan(member, pod_name(job, member, "xxxxx"), Placement(1, (member,)))
    return pod(job, spec, Owner("", ""), plan, store_secret=None)


def member_labels(member: Member, placement: Placement) -> dict[str, str]:
    """Labels that name a pod's member; none for a spare."""
    if member.index == NO_MEMBER:
        return {}
    return {
        MEMBER: str(member.index),
        SCHEDULE_CNT: str(member.schedule_cnt),
        PLACEMENT: str(placement.number),
    }


def taken(member: Member, placement: Placement, spec: KubernetesEngineSpec) -> Document:
    """Compose the changes of a spare pod that a member takes."""
    changes: Document = {"labels": member_labels(member, placement)}
    if spec.volcano is not None:
        changes["annotations"] = {_TASK: _MEMBERS}
    return {"metadata": changes}


def _queue_labels(job: Job, spec: KubernetesEngineSpec) -> dict[str, str]:
    """Labels by which Kueue admits the members together."""
    if spec.kueue is None:
        return {}
    labels = {f"{_KUEUE}/queue-name": spec.kueue.queue, f"{_KUEUE}/pod-group-name": job.run_id}
    if spec.kueue.priority_class is not None:
        labels[f"{_KUEUE}/priority-class"] = spec.kueue.priority_class
    return labels


def _annotations(job: Job, spec: KubernetesEngineSpec, plan: PodPlan) -> dict[str, str]:
    annotations = dict(spec.annotations)
    if spec.kueue is not None:
        annotations[f"{_KUEUE}/pod-group-total-count"] = str(spec.nodes)
    if spec.volcano is not None:
        annotations["scheduling.k8s.io/group-name"] = name_of(job)
        annotations[_TASK] = _SPARES if plan.is_spare else _MEMBERS
        if spec.volcano.sp_block is not None:
            annotations[SP_BLOCK] = str(spec.volcano.sp_block)
    return annotations


def _pod_spec(
    job: Job, spec: KubernetesEngineSpec, plan: PodPlan, store_secret: str | None
) -> Document:
    document: Document = {
        "restartPolicy": "Never",  # a container that restarts by itself would know nothing
        "terminationGracePeriodSeconds": int(spec.grace_s + GRACE_MARGIN_S),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "affinity": _affinity(job, spec, plan),
        "tolerations": [*_STAYS, *spec.tolerations],
        "containers": [_container(spec, store_secret)],
        "volumes": _volumes(spec, plan.name),
    }
    settings = {
        "nodeSelector": spec.node_selector,
        "serviceAccountName": spec.service_account,
        "priorityClassName": spec.priority_class,
        "schedulerName": spec.volcano.scheduler if spec.volcano is not None else None,
        "imagePullSecrets": [{"name": name} for name in spec.image_pull_secrets],
        "securityContext": dict(_RESTRICTED_POD) if spec.pod_security else None,
    }
    document |= {name: value for name, value in settings.items() if value}
    if spec.host_network:
        document |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return document


# The fleet decides by an agent's silence whether its node is lost. Without these tolerations, the
# cluster would delete the pods of a node after 300 s although its kubelet alone is gone.
_STAYS: Sequence[Document] = tuple(
    {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute"}
    for taint in ("not-ready", "unreachable")
)


def _affinity(job: Job, spec: KubernetesEngineSpec, plan: PodPlan) -> Document:
    """Keep the pod off avoided nodes and other pods' nodes; prefer the member's former node.

    It prefers what is near in the network, a spare another failure domain: the loss of a rack
    does not take both.
    """
    avoid = [_field("NotIn", node) for node in plan.placement.avoid]
    preferred = [
        {"weight": 50, "preference": {"matchFields": [_field("NotIn", node)]}}
        for node in plan.placement.last
    ]
    if plan.member.node != ANY_NODE:
        former_node = {"matchFields": [_field("In", plan.member.node)]}
        preferred.append({"weight": 100, "preference": former_node})
    of_node: Document = {}
    if avoid:
        of_node["requiredDuringSchedulingIgnoredDuringExecution"] = {
            "nodeSelectorTerms": [{"matchFields": avoid}]
        }
    if preferred:
        of_node["preferredDuringSchedulingIgnoredDuringExecution"] = preferred
    peers = {
        "labelSelector": {"matchLabels": run_labels(job) | {PART: AGENT}},
        "topologyKey": HOSTNAME,
    }
    apart: Document = {"requiredDuringSchedulingIgnoredDuringExecution": [peers]}
    near = spec.topology[1:] if plan.is_spare else spec.topology
    if plan.is_spare and spec.topology:
        apart |= _preferred(peers, spec.topology[:1])
    affinity: Document = {"podAntiAffinity": apart}
    if near:
        affinity["podAffinity"] = _preferred(peers, near)
    return affinity | ({"nodeAffinity": of_node} if of_node else {})


def _preferred(peers: Document, labels: Sequence[str]) -> Document:
    """Prefer to share the values of labels with other pods; the widest one counts the most."""
    return {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": min(100, 25 * 2**index), "podAffinityTerm": peers | {"topologyKey": label}}
            for index, label in enumerate(labels)
        ]
    }


def _field(operator: str, node: str) -> Document:
    # The node's name may differ from its label of the host's name. The API server takes one value
    # for each field.
    return {"key": "metadata.name", "operator": operator, "values": [node]}


def _container(spec: KubernetesEngineSpec, store_secret: str | None) -> Document:
    mounts = [
        {"name": "scratch", "mountPath": FOLDER},
        {"name": AGENT_CONFIG, "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": pod_rules.MEMORY_FOLDER},
        *(_mount(volume) for volume in spec.volumes),
    ]
    if spec.node_path is not None:
        mounts.append({"name": "node-disk", "mountPath": NODE_FOLDER})
    secrets = [*spec.env_secrets, *([store_secret] if store_secret is not None else [])]
    amounts = {name: str(amount) for name, amount in spec.resources.items()}
    port: Document = {"name": "agent", "containerPort": spec.agent_port}
    if spec.host_network:
        port["hostPort"] = spec.agent_port  # the scheduler keeps other runs off this node
    document: Document = {
        "name": AGENT,
        "image": spec.image,
        "imagePullPolicy": spec.image_pull_policy,
        "command": [
            spec.python, "-m", "perdure.training.agent", FOLDER, f"{CONFIG_FOLDER}/{CONFIG_FILE}",
        ],
        "env": [
            {"name": MARKER, "value": FOLDER},
            {"name": NODE_ENV, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": HOST_ENV, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        "ports": [port],
        "startupProbe": {
            "tcpSocket": {"port": spec.agent_port},
            "periodSeconds": START_PROBE_PERIOD_S,
            "failureThreshold": START_PROBES,
        },
        "volumeMounts": mounts,
    }  # fmt: skip
    if secrets:
        document["envFrom"] = [{"secretRef": {"name": name}} for name in secrets]
    if spec.pod_security:
        document["securityContext"] = dict(_RESTRICTED_CONTAINER)
    if amounts:
        document["resources"] = {"requests": amounts, "limits": amounts}
    return document


def _mount(volume: VolumeSpec) -> Document:
    mount: Document = {"name": volume.name, "mountPath": volume.mount_path}
    if volume.read_only:
        mount["readOnly"] = True
    if volume.sub_path is not None:
        mount["subPath"] = volume.sub_path
    return mount


def _volumes(spec: KubernetesEngineSpec, config_secret: str) -> list[Document]:
    memory: Document = {"medium": "Memory"}
    if spec.shm_size is not None:
        memory["sizeLimit"] = spec.shm_size
    config = {"secretName": config_secret, "defaultMode": 0o400}
    sources: dict[str, Document] = {
        "scratch": {"emptyDir": {}},
        AGENT_CONFIG: {"secret": config},
        "shm": {"emptyDir": memory},
    }
    if spec.node_path is not None:
        sources["node-disk"] = {"hostPath": {"path": spec.node_path, "type": "DirectoryOrCreate"}}
    # One volume may be mounted in several places.
    sources |= {volume.name: volume.source for volume in spec.volumes}
    return [{"name": name, **source} for name, source in sources.items()]


def overlaid(document: Any, overlay: Any) -> Any:
    """Merge an overlay into a document.

    Maps are merged deeply, lists whose items have names by name. Any other value of the overlay
    replaces that of the document, and None removes it.
    """
    if isinstance(document, dict) and isinstance(overlay, dict):
        merged = {name: overlaid(document.get(name), value) for name, value in overlay.items()}
        return {n: v for n, v in {**document, **merged}.items() if v is not None}
    if _are_named(document) and _are_named(overlay):
        base_items = {item["name"]: item for item in document}
        overlay_items = {
            item["name"]: overlaid(base_items.get(item["name"], {}), item) for item in overlay
        }
        return list({**base_items, **overlay_items}.values())
    return overlay


def _are_named(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) and "name" in item for item in value)
    )
