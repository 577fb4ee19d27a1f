"""Rules for the pods of a job: names, labels, quantities, the overlay. Pure.

The API server would refuse most of what they refuse, but only once a run has begun. Syntax of
names: https://kubernetes.io/docs/concepts/overview/working-with-objects/names/, of labels:
.../labels/, of quantities such as 500m, 700Gi, 1e3:
https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

_FORM = re.compile(
    r"^(?P<number>\d+(?:\.\d*)?|\.\d+)(?P<unit>[KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?$"
)
_DECIMAL = "numkMGTPE"
_EXPONENTS = (-9, -6, -3, 3, 6, 9, 12, 15, 18)
_UNITS: Mapping[str, Decimal] = {
    "": Decimal(1),
    **{unit: Decimal(10) ** power for unit, power in zip(_DECIMAL, _EXPONENTS, strict=True)},
    **{f"{unit}i": Decimal(1024) ** (place + 1) for place, unit in enumerate("KMGTPE")},
}


def amount_of(text: str) -> Decimal:
    """Parse a quantity.

    Raises:
        ValueError: it is none.
    """
    match = _FORM.match(text)
    if match is None:
        raise ValueError(f"{text!r} is no quantity such as 8, 500m or 700Gi")
    unit = match["unit"] or ""
    scale = _UNITS[unit] if unit in _UNITS else Decimal(f"1{unit}")
    return Decimal(match["number"]) * scale


# The engine's own names in each pod.
AGENT = "agent"
AGENT_CONFIG = "agent-config"  # volume with the configuration of one pod's agent
OWN_VOLUMES = ("scratch", AGENT_CONFIG, "shm", "node-disk")
FOLDER = "/var/lib/perdure"
CONFIG_FOLDER = "/etc/perdure/agent"
NODE_FOLDER = "/var/lib/perdure-node"
MEMORY_FOLDER = "/dev/shm"  # noqa: S108 the kernel's name
OWN_FOLDERS = (FOLDER, CONFIG_FOLDER, NODE_FOLDER, MEMORY_FOLDER)
OWN_PREFIX = "perdure.io/"
OWN_LABELS = ("app.kubernetes.io/name", "app.kubernetes.io/component")

_LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_PLAIN = re.compile(r"[A-Za-z0-9](?:[-\w.]{0,61}[A-Za-z0-9])?", re.ASCII)
_NATIVE = frozenset({"cpu", "memory", "ephemeral-storage"})
_TOLERATION = frozenset({"key", "operator", "value", "effect", "tolerationSeconds"})
_EFFECTS = frozenset({"NoSchedule", "PreferNoSchedule", "NoExecute"})

_AVOIDS = "isolated nodes are excluded there, and members kept apart; use engine.node_selector"
_MANY = "the engine's own would be gone; use engine.{}"
# Paths of the overlay that would replace what the engine needs, with why.
_REFUSED: Mapping[tuple[str, ...], str] = {
    ("apiVersion",): "the engine makes pods",
    ("kind",): "the engine makes pods",
    ("metadata", "name"): "the engine finds its pods by it",
    ("metadata", "namespace"): "use engine.namespace",
    ("metadata", "labels"): "pods are found by their labels; use engine.labels",
    ("metadata", "ownerReferences"): "what a run leaves is deleted with its owner",
    ("spec", "restartPolicy"): "a container that came back by itself would know nothing",
    ("spec", "nodeName"): "the cluster's scheduler chooses nodes; use engine.node_selector",
    ("spec", "hostNetwork"): "use engine.host_network",
    ("spec", "schedulerName"): "use engine.volcano.scheduler",
    ("spec", "tolerations"): _MANY.format("tolerations"),
    ("spec", "imagePullSecrets"): "use engine.image_pull_secrets",
    ("spec", "terminationGracePeriodSeconds"): "use engine.grace_s",
    ("spec", "affinity", "podAntiAffinity"): _AVOIDS,
    ("spec", "affinity", "nodeAffinity"): _AVOIDS,
}
_REFUSED_OF_AGENT: Mapping[str, str] = {
    "image": "use engine.image",
    "command": "the agent is the first process of the container; use engine.python",
    "args": "the agent is the first process of the container",
    "startupProbe": "it tells when the agent listens",
    "ports": "use engine.agent_port",
    "envFrom": _MANY.format("env_secrets"),
    "resources": "use engine.resources, from which Volcano's PodGroup is made, too",
}


def check_name(name: str) -> str:
    """Check the name of an object.

    Raises:
        ValueError: it can be none.
    """
    if len(name) > 253 or not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name: lower-case letters, digits, '-' and '.'")
    return name


def check_namespace(name: str) -> str:
    """Check the name of a namespace."""
    if not re.fullmatch(_LABEL, name):
        raise ValueError(f"{name!r} is no namespace: up to 63 lower-case letters, digits and '-'")
    return name


def check_label_name(name: str) -> str:
    """Check the name of a label or annotation, such as topology.kubernetes.io/zone."""
    prefix, slash, plain = name.rpartition("/")
    is_prefix = not slash or (len(prefix) <= 253 and _NAME.fullmatch(prefix) is not None)
    if not is_prefix or not _PLAIN.fullmatch(plain):
        raise ValueError(f"{name!r} is no name of a label or annotation, such as example.com/kind")
    return name


def check_labels(labels: Mapping[str, str]) -> None:
    """Check labels; raises ValueError."""
    for name, value in labels.items():
        check_label_name(name)
        if value and not _PLAIN.fullmatch(value):
            text = "up to 63 letters, digits, '-', '_' and '.'"
            raise ValueError(f"{name}={value!r} is no value of a label: {text}")


def check_own_labels(labels: Mapping[str, str]) -> None:
    """Check further labels of pods; raises ValueError for the engine's own."""
    check_labels(labels)
    for name in labels:
        if name in OWN_LABELS or name.startswith(OWN_PREFIX):
            raise ValueError(f"{name!r} is the engine's own: pods are found by it")


def check_annotations(annotations: Mapping[str, str]) -> None:
    """Check annotations; raises ValueError."""
    for name in annotations:
        check_label_name(name)


def check_quantity(text: str) -> None:
    """Check that an amount is above 0; raises ValueError."""
    if amount_of(text) <= 0:
        raise ValueError(f"{text!r} must be more than 0")


def check_resources(resources: Mapping[str, str | int]) -> None:
    """Check amounts by the name of the resource; raises ValueError."""
    for name, amount in resources.items():
        check_label_name(name)
        is_native = name in _NATIVE or name.startswith("hugepages-")
        if not is_native and "/" not in name:
            raise ValueError(f"{name!r} is no resource such as cpu, memory or huawei.com/Ascend910")
        try:
            check_quantity(str(amount))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if not is_native and amount_of(str(amount)) != amount_of(str(amount)).to_integral_value():
            raise ValueError(f"{name}: {amount!r} must be a whole number")
        if amount_of(str(amount)) > Decimal(2**63 - 1):
            raise ValueError(f"{name}: {amount!r} is more than Kubernetes can count")


def check_tolerations(tolerations: Iterable[Mapping[str, Any]]) -> None:
    """Check tolerations as in a pod; raises ValueError."""
    for toleration in tolerations:
        unknown = sorted(toleration.keys() - _TOLERATION)
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no field of a toleration: {sorted(_TOLERATION)}")
        if toleration.get("operator", "Equal") not in ("Equal", "Exists"):
            raise ValueError(f"operator {toleration['operator']!r} must be Equal or Exists")
        if toleration.get("effect") not in (None, *_EFFECTS):
            raise ValueError(f"effect {toleration['effect']!r} must be one of {sorted(_EFFECTS)}")
        if toleration.get("operator") == "Exists" and toleration.get("value"):
            raise ValueError(f"value {toleration['value']!r} has no meaning with operator Exists")
        if not toleration.get("key") and toleration.get("operator") != "Exists":
            raise ValueError("without a key the operator must be Exists")


def check_overlay(overlay: Mapping[str, Any]) -> None:
    """Check the overlay of pods; raises ValueError where it replaces fields of the engine."""
    for path, why in _overlaid(overlay):
        raise ValueError(f"{path} cannot be replaced: {why}")


def _overlaid(overlay: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for path, why in _REFUSED.items():
        if _reaches(overlay, path):
            yield ".".join(path), why
    spec = overlay.get("spec") or {}
    if "containers" in spec:
        yield from _containers(spec["containers"])
    if "volumes" in spec:
        yield from _volumes(spec["volumes"])


def _reaches(overlay: Any, path: tuple[str, ...]) -> bool:
    """Whether an overlay has a path, or something that is no map in place of its beginning."""
    for name in path:
        if not isinstance(overlay, Mapping):
            return True
        if name not in overlay:
            return False
        overlay = overlay[name]
    return True


def _containers(containers: Any) -> Iterator[tuple[str, str]]:
    if not _are_named(containers):
        yield "spec.containers", "each needs a name, or they take the place of the agent's"
        return
    for container in containers:
        for field, why in _REFUSED_OF_AGENT.items():
            if container["name"] == AGENT and field in container:
                yield f"{field} of container {AGENT}", why
        if container["name"] == AGENT and "volumeMounts" in container:
            yield from _named(container["volumeMounts"], f"volumeMounts of container {AGENT}")
        if container["name"] == AGENT and "env" in container and not _are_named(container["env"]):
            yield f"env of container {AGENT}", "each variable needs a name"


def _volumes(volumes: Any) -> Iterator[tuple[str, str]]:
    yield from _named(volumes, "spec.volumes")


def _named(items: Any, where: str) -> Iterator[tuple[str, str]]:
    if not _are_named(items):
        yield where, "each needs a name, or they take the place of the engine's"
        return
    for item in items:
        if item["name"] in OWN_VOLUMES:
            yield f"{item['name']} in {where}", "the engine has a volume of that name"


def _are_named(items: Any) -> bool:
    return isinstance(items, list) and all(isinstance(o, Mapping) and "name" in o for o in items)


def literal_variables(overlay: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the variables that an overlay gives containers in clear text, with their values."""
    spec = overlay.get("spec")
    for part in ("initContainers", "containers"):
        for container in (spec.get(part) if isinstance(spec, Mapping) else None) or ():
            for variable in (
                container.get("env") if isinstance(container, Mapping) else None
            ) or ():
                if isinstance(variable, Mapping) and isinstance(variable.get("value"), str):
                    yield str(variable.get("name")), str(variable["value"])
