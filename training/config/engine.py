"""Where a run is placed and what its worker processes are. Times are seconds."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from perdure.storage.frozen_model import FrozenModel
from perdure.training.config import pod_rules
from perdure.training.config.command import ProgramCheckpointsSpec, ProgressSpec, ResumeSpec

DEFAULT_RECIPE = "perdure.training.trainer.pretrain:main"
SCRIPT_RECIPE = "perdure.training.runtime.script:main"  # runs worker.script
_LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"  # RFC 1123, as Kubernetes wants names


Name = Annotated[str, AfterValidator(pod_rules.check_name)]


class EngineSpec(FrozenModel):
    """What a job asks of every engine; the section of an engine names its kind and adds its own."""

    # Whether its containers are processes of the supervisor's machine, with its folders.
    on_this_machine: ClassVar[bool] = False

    kind: str = Field(description="engine")
    nodes: int = Field(2, ge=1, le=1024, description="nodes the job needs")
    spares: int = Field(1, ge=0, le=64, description="further nodes to reschedule onto")
    warm_spares: int | None = Field(
        None,
        ge=0,
        le=64,
        description="of the spares, those on which a container stands by, started and checked, its "
        "devices unused; default: 1 where there is a spare",
    )
    slots_per_node: int = Field(2, ge=1, le=64, description="ranks (devices) of a node")
    grace_s: float = Field(
        20.0, ge=0.1, le=900, description="seconds from SIGTERM to SIGKILL when stopping workers"
    )
    orphan_timeout_s: float = Field(
        86_400.0, ge=10, description="agents stop by themselves after this long without supervisor"
    )

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, kind: str) -> str:
        if kind not in _sections():
            raise ValueError(f"{kind!r} is no engine, choose {' or '.join(_sections())}")
        return kind

    @model_validator(mode="after")
    def _check_warm_spares(self) -> Self:
        if self.warm_spares is not None and self.warm_spares > self.spares:
            raise ValueError(
                f"warm_spares={self.warm_spares} is more than spares={self.spares} nodes"
            )
        return self

    @property
    def num_warm_spares(self) -> int:
        """Containers that stand by."""
        return min(1, self.spares) if self.warm_spares is None else self.warm_spares

    def has_folder(self, folder: str) -> bool:  # noqa: ARG002 of some engines' sections
        """Whether all nodes have a folder of the supervisor's machine, and may write there."""
        return self.on_this_machine

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.nodes * self.slots_per_node


class LocalEngineSpec(EngineSpec):
    """Nodes as agent processes on this machine."""

    on_this_machine: ClassVar[bool] = True

    kind: Literal["local"] = Field("local", description="engine")


class Reach(StrEnum):
    """How a supervisor reaches the agents in the pods."""

    AUTO = "auto"
    DIRECT = "direct"
    PORT_FORWARD = "port_forward"


class VolumeSpec(FrozenModel):
    """A volume of the pods, and where the agent's container has it."""

    name: str = Field(description="of the volume", pattern=_LABEL)
    mount_path: str = Field(description="absolute path in the container", pattern="^/")
    source: dict[str, Any] = Field(
        description="as in a pod, such as {hostPath: {path: /usr/local/Ascend/driver}} or "
        "{persistentVolumeClaim: {claimName: corpus}}"
    )
    read_only: bool = Field(False, description="whether the container may not write into it")
    sub_path: str | None = Field(None, description="folder of the volume that is mounted")

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name in pod_rules.OWN_VOLUMES:
            raise ValueError(f"{name!r} is a volume of the engine's own")
        return name

    @field_validator("mount_path")
    @classmethod
    def _check_path(cls, path: str) -> str:
        if ":" in path or posixpath.normpath(path) in pod_rules.OWN_FOLDERS:
            raise ValueError(f"{path!r} is the engine's own, or has a colon")
        return path

    @field_validator("source")
    @classmethod
    def _check_source(cls, source: dict[str, Any]) -> dict[str, Any]:
        if len(source) != 1 or not all(isinstance(one, dict) for one in source.values()):
            raise ValueError("must be one kind of volume with its fields, {hostPath: {path: ...}}")
        return source

    def holds(self, folder: str) -> bool:
        """Whether a folder is in it that all pods share, and may write to."""
        if self.read_only or "emptyDir" in self.source:
            return False
        path = posixpath.normpath(self.mount_path)
        return posixpath.commonpath((path, posixpath.normpath(folder))) == path


class VolcanoSpec(FrozenModel):
    """Placement of the gang by Volcano: a PodGroup, and its scheduler for the pods."""

    queue: Name = Field("default", description="queue that the PodGroup is in")
    scheduler: Name = Field("volcano", description="schedulerName of the pods")


class KubernetesEngineSpec(EngineSpec):
    """Nodes as pods of a Kubernetes cluster, one for each node of the job."""

    kind: Literal["kubernetes"] = Field("kubernetes", description="engine")
    image: str = Field(min_length=1, description="of the pods; Perdure is installed in it")
    python: str = Field("python3", description="the image's Python that has Perdure")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        "IfNotPresent", description="when the image is fetched"
    )
    image_pull_secrets: tuple[Name, ...] = Field((), description="Secrets of the registry")
    context: str | None = Field(
        None, description="of the kubeconfig; default: its current one, or the pod's own cluster"
    )
    namespace: Annotated[str, AfterValidator(pod_rules.check_namespace)] | None = Field(
        None, description="of the pods; default: the context's, or that of the supervisor's pod"
    )
    reach: Reach = Field(
        Reach.AUTO,
        description="how the supervisor reaches agents: direct (the pods' addresses), "
        "port_forward (through the API server), or auto: direct inside of the cluster",
    )
    agent_port: int = Field(
        8470, ge=1024, le=65535, description="that agents listen on; on the host's network too"
    )
    place_timeout_s: float = Field(
        600.0, ge=1, description="for all pods to run, images fetched; else none is kept"
    )
    resources: dict[str, str | int] = Field(
        {},
        description="of each pod, requests and limits in one, such as "
        "{huawei.com/Ascend910: 8, cpu: 96, memory: 700Gi}",
    )
    shm_size: str | None = Field(
        None, description="limit of /dev/shm, which is memory, such as 64Gi; default: none"
    )
    node_selector: dict[str, str] = Field({}, description="labels that the nodes must have")
    tolerations: tuple[dict[str, Any], ...] = Field((), description="as in a pod")
    labels: dict[str, str] = Field({}, description="further labels of the pods")
    annotations: dict[str, str] = Field({}, description="annotations of the pods")
    host_network: bool = Field(False, description="whether pods are on their nodes' network")
    volumes: tuple[VolumeSpec, ...] = Field((), description="further volumes of the pods")
    env_secrets: tuple[Name, ...] = Field(
        (), description="Secrets whose keys become variables of the container"
    )
    storage_secret: Name | None = Field(
        None,
        description="Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of the store; "
        "default: one is made from the supervisor's keys",
    )
    service_account: Name | None = Field(None, description="of the pods; they get no token of it")
    priority_class: Name | None = Field(None, description="of the pods")
    node_path: str | None = Field(
        None, pattern="^/", description="folder of the node's disk for copies that outlive pods"
    )
    volcano: VolcanoSpec | None = Field(None, description="placement by Volcano; default: none")
    cordon: bool = Field(
        False, description="whether isolated nodes are cordoned, too; needs the right to patch them"
    )
    mindcluster: bool = Field(
        True, description="whether faults that MindCluster's device plugin reports are read"
    )
    pod: dict[str, Any] = Field(
        {},
        description="merged into each pod's document: maps deeply, lists of named things by name",
    )

    @field_validator("shm_size")
    @classmethod
    def _check_shm_size(cls, size: str | None) -> str | None:
        if size is not None:
            pod_rules.check_quantity(size)
        return size

    @field_validator("resources", "node_selector", "tolerations", "labels", "annotations", "pod")
    @classmethod
    def _check_pod(cls, value: Any, info: ValidationInfo) -> Any:
        _POD_CHECKS[str(info.field_name)](value)
        return value

    @field_validator("volumes")
    @classmethod
    def _check_volumes(cls, volumes: tuple[VolumeSpec, ...]) -> tuple[VolumeSpec, ...]:
        sources: dict[str, dict[str, Any]] = {}
        paths: set[str] = set()
        for volume in volumes:
            if sources.setdefault(volume.name, volume.source) != volume.source:
                raise ValueError(f"volume {volume.name!r} has two sources")
            path = posixpath.normpath(volume.mount_path)
            if path in paths:
                raise ValueError(f"{path!r} has two volumes")
            paths.add(path)
        return volumes

    def has_folder(self, folder: str) -> bool:
        """Whether a volume holds it."""
        return any(volume.holds(folder) for volume in self.volumes)


_POD_CHECKS: Mapping[str, Callable[[Any], None]] = {
    "resources": pod_rules.check_resources,
    "node_selector": pod_rules.check_labels,
    "tolerations": pod_rules.check_tolerations,
    "labels": pod_rules.check_own_labels,
    "annotations": pod_rules.check_annotations,
    "pod": pod_rules.check_overlay,
}


def _sections() -> dict[str, type[EngineSpec]]:
    return {spec.model_fields["kind"].default: spec for spec in EngineSpec.__subclasses__()}


def _of_its_kind(section: Any) -> EngineSpec:
    # Not a discriminator: its schema (oneOf) is no part of Prefect's form (3.8.8), and its errors
    # have the kind in the path of the field.
    kind = section.get("kind", "local") if isinstance(section, dict) else None
    return _sections().get(str(kind), EngineSpec).model_validate(section)


# Every engine's section, as a union; one without a kind is local.
AnyEngineSpec = Annotated[LocalEngineSpec | KubernetesEngineSpec, BeforeValidator(_of_its_kind)]


class WorkerSpec(FrozenModel):
    """How deep the training program takes part: a recipe, a script with a callback, a command."""

    recipe: str | None = Field(
        None, description="session depth: module:function called in each rank with the job"
    )
    command: tuple[str, ...] | None = Field(
        None, min_length=1,
        description="command depth: started as `per` says; ${MA_NUM_HOSTS}, ${VC_TASK_INDEX}, "
        "${MASTER_ADDR}, ${MASTER_PORT} and the like, ${NNODES}, ${NODE_RANK}, ${WORLD_SIZE} are "
        "filled in; $$ is a plain $",
    )  # fmt: skip
    script: tuple[str, ...] | None = Field(
        None, min_length=1,
        description="callback depth: a Python file and its arguments, run in each rank as python "
        "does; a callback of perdure.integrations takes its loop over, or training_steps gives the "
        "loop its steps",
    )  # fmt: skip
    preload: tuple[str, ...] = Field(
        (),
        description="of a script or recipe: modules that each node imports once, before ranks are "
        "started, and does not import again for a rank's new process",
    )
    per: Literal["node", "device"] = Field(
        "node",
        description="of a command: started once per node, and starts its ranks itself (torchrun), "
        "or once per device, each with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
    )
    cwd: str | None = Field(None, description="folder the workers start in; default: this one")
    progress: ProgressSpec | None = Field(
        None, description="of a command: how its steps and losses are read from what it prints"
    )
    checkpoints: ProgramCheckpointsSpec | None = Field(
        None, description="of a command: where it saves checkpoints of its own"
    )
    resume: ResumeSpec | None = Field(
        None, description="of a command: what is added when it is started again and has a "
        "checkpoint of this run; ${PERDURE_CHECKPOINT} is its path"
    )  # fmt: skip

    @field_validator("recipe")
    @classmethod
    def _check_recipe(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[\w.]+:\w+", value):
            raise ValueError(f"{value!r} is not of the form module:function")
        return value

    @field_validator("preload")
    @classmethod
    def _check_preload(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not re.fullmatch(r"\w+(\.\w+)*", name):
                raise ValueError(f"{name!r} is not the name of a module")
        return value

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if self.preload and self.command is not None:
            raise ValueError("preload is for a script or recipe: a command imports by itself")
        given = [
            name for name in ("recipe", "script", "command") if getattr(self, name) is not None
        ]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other, give one")
        if self.per == "device" and self.command is None:
            kind = "script" if self.script is not None else "recipe"
            raise ValueError(f"per=device is for worker.command: a {kind} is started so anyway")
        for name in ("progress", "checkpoints", "resume"):
            if getattr(self, name) is not None and self.command is None:
                raise ValueError(f"{name} is for worker.command: a recipe's session does it")
        if self.resume is not None and self.checkpoints is None:
            raise ValueError("resume needs checkpoints, which says where the program saves")
        return self

    @property
    def is_command(self) -> bool:
        """Whether the program is an unchanged command (command depth)."""
        return self.command is not None

    @property
    def is_launcher(self) -> bool:
        """Whether the program is started once per node, and starts its ranks itself."""
        return self.is_command and self.per == "node"
