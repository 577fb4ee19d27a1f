"""Placement of a run, and its worker processes. Times are seconds."""

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

from perdure.storage.frozen_model import SettingsModel
from perdure.training.config import pod_rules
from perdure.training.config.command import ProgramCheckpointsSpec, ProgressSpec, ResumeSpec
from perdure.training.config.pod_sections import KueueSpec, Name, VolcanoSpec, VolumeSpec

DEFAULT_RECIPE = "perdure.training.trainer.pretrain:main"
SCRIPT_RECIPE = "perdure.training.runtime.script:main"  # runs worker.script
MAX_EXIT_CODE = 255


class EngineSpec(SettingsModel):
    """Settings that every engine has; the section of an engine adds its own."""

    # Whether its containers are processes of the supervisor's machine, with its folders.
    on_this_machine: ClassVar[bool] = False
    # A supervisor on another host counts as lost after this long without renewal of its lease.
    lease_s: ClassVar[float] = 30.0
    # For the supervisor to say that a node is lost whose agent is gone, too: one that is cut off
    # counts as silent after 15 s. A supervisor that was on the lost node is replaced first.
    node_notice_s: ClassVar[float] = 25.0

    kind: str = Field(description="name of the engine")
    nodes: int = Field(2, ge=1, le=1024, description="nodes that the job trains on")
    spares: int = Field(1, ge=0, le=64, description="additional nodes to move to after a fault")
    warm_spares: int | None = Field(
        None,
        ge=0,
        le=64,
        description="spares with a warm container: started and checked, with its devices unused; "
        "default: 1 if the job has spares",
    )
    slots_per_node: int = Field(2, ge=1, le=64, description="ranks (devices) per node")
    grace_s: float = Field(
        20.0,
        ge=0.1,
        le=900,
        description="seconds between SIGTERM and SIGKILL when workers are stopped on request",
    )
    orphan_timeout_s: float = Field(
        86_400.0,
        ge=10,
        description="seconds without a supervisor after which agents stop their processes and "
        "end; an agent whose processes have ended waits for a supervisor for an hour at most",
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
    def sp_block(self) -> int | None:
        """Chips of a block of ranks that the scheduler places in one super pod; None: no blocks."""
        return None

    @property
    def num_warm_spares(self) -> int:
        """Containers that are kept warm on spare nodes."""
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

    kind: Literal["local"] = Field("local", description="name of the engine")


class LaunchedEngineSpec(EngineSpec):
    """Nodes that a platform has given, each with one `perdure launch`."""

    lease_s: ClassVar[float] = 10.0
    node_notice_s: ClassVar[float] = 75.0

    kind: Literal["launched"] = Field("launched", description="name of the engine")
    orphan_timeout_s: float = Field(
        1800.0,
        ge=10,
        description="seconds without a supervisor after which agents stop their processes and end",
    )
    gather_timeout_s: float = Field(
        600.0,
        ge=1,
        description="seconds for `nodes` nodes to come; `perdure launch` ends if fewer have come",
    )

    def has_folder(self, folder: str) -> bool:  # noqa: ARG002 of some engines' sections
        """Return True: only the nodes themselves can tell, when they do not find each other."""
        return True


class Reach(StrEnum):
    """Paths from the supervisor to the agents in the pods."""

    AUTO = "auto"
    DIRECT = "direct"
    PORT_FORWARD = "port_forward"


class KubernetesEngineSpec(EngineSpec):
    """Nodes as pods of a Kubernetes cluster, one pod per node."""

    kind: Literal["kubernetes"] = Field("kubernetes", description="name of the engine")
    image: str = Field(min_length=1, description="image of the pods, with Perdure installed")
    python: str = Field("python3", description="Python interpreter of the image that has Perdure")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        "IfNotPresent", description="when nodes pull the image"
    )
    image_pull_secrets: tuple[Name, ...] = Field(
        (), description="Secrets with the registry's credentials"
    )
    context: str | None = Field(
        None,
        description="context of the kubeconfig; default: the current context, or the "
        "cluster that the supervisor runs in",
    )
    namespace: Annotated[str, AfterValidator(pod_rules.check_namespace)] | None = Field(
        None,
        description="namespace of the pods; default: that of the context, or of the "
        "supervisor's pod",
    )
    reach: Reach = Field(
        Reach.AUTO,
        description="path from the supervisor to the agents: direct (pod addresses), port_forward "
        "(through the API server), or auto (direct within the cluster, port_forward outside)",
    )
    agent_port: int = Field(
        8470,
        ge=1024,
        le=65535,
        description="port that agents listen on; with host_network, a port of the node",
    )
    place_timeout_s: float = Field(
        600.0,
        ge=1,
        description="seconds for all pods to start, image pulls included; after that "
        "the placement fails and its pods are deleted",
    )
    resources: dict[str, str | int] = Field(
        {},
        description="resources of each pod, both as requests and as limits, such as "
        "{huawei.com/Ascend910: 8, cpu: 96, memory: 700Gi}",
    )
    shm_size: str | None = Field(
        None,
        description="size limit of /dev/shm, which counts as memory, such as 64Gi; default: "
        "no limit",
    )
    node_selector: dict[str, str] = Field({}, description="labels that a node must have")
    topology: tuple[str, ...] = Field(
        (),
        max_length=4,
        description="labels of nodes that name their place in the network, the narrowest first, "
        "such as [example.com/rack, example.com/spine]: pods of a run prefer to share all of them, "
        "spares and partner copies another value of the first",
    )
    tolerations: tuple[dict[str, Any], ...] = Field(
        (), description="tolerations, written as in a pod"
    )
    labels: dict[str, str] = Field({}, description="additional labels of the pods")
    annotations: dict[str, str] = Field({}, description="annotations of the pods")
    host_network: bool = Field(False, description="put the pods on their nodes' network")
    volumes: tuple[VolumeSpec, ...] = Field((), description="additional volumes of the pods")
    env_secrets: tuple[Name, ...] = Field(
        (), description="Secrets whose keys become environment variables of the container"
    )
    storage_secret: Name | None = Field(
        None,
        description="Secret with the store's AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; "
        "default: a new Secret made from the supervisor's keys",
    )
    service_account: Name | None = Field(
        None, description="service account of the pods; its token is not mounted"
    )
    priority_class: Name | None = Field(None, description="priority class of the pods")
    pod_security: Literal["restricted"] | None = Field(
        None,
        description="restricted: pods that a namespace with the PodSecurity level `restricted` "
        "admits, as user and group 1000; without node_path, host_network and hostPath volumes",
    )
    node_path: str | None = Field(
        None,
        pattern="^/",
        description="folder on the node's disk for checkpoint copies that outlive the pod",
    )
    volcano: VolcanoSpec | None = Field(
        None, description="placement by Volcano; default: by the cluster's own scheduler"
    )
    kueue: KueueSpec | None = Field(
        None,
        description="admission by Kueue, which lets pods start when its queue has room for all; "
        "excludes volcano and warm_spares",
    )
    cordon: bool = Field(
        False, description="also cordon isolated nodes; requires the right to patch nodes"
    )
    mindcluster: bool = Field(
        True, description="read the faults that MindCluster's device plugin reports"
    )
    pod: dict[str, Any] = Field(
        {},
        description="fields to merge into each pod's document: maps merge recursively, lists of "
        "named items merge by name",
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

    @field_validator("topology")
    @classmethod
    def _check_topology(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        for label in labels:
            pod_rules.check_label_name(label)
        if len(set(labels)) < len(labels):
            raise ValueError("names a label twice")
        return labels

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

    @model_validator(mode="after")
    def _check_kueue(self) -> Self:
        if self.kueue is None:
            return self
        if self.volcano is not None:
            raise ValueError("kueue and volcano both hold pods back: set one of them")
        if self.warm_spares:
            raise ValueError(
                f"warm_spares={self.warm_spares} must be 0 with kueue, whose groups have a fixed "
                "number of pods"
            )
        return self

    @model_validator(mode="after")
    def _check_pod_security(self) -> Self:
        if self.pod_security is None:
            return self
        host_paths = [v.name for v in self.volumes if "hostPath" in v.source]
        for field, value in (
            ("node_path", self.node_path),
            ("host_network", self.host_network),
            ("volumes", host_paths),
        ):
            if value:
                raise ValueError(
                    f"{field}={value!r} takes a part of the node, which "
                    "pod_security=restricted does not allow"
                )
        return self

    @model_validator(mode="after")
    def _check_sp_block(self) -> Self:
        block, total = self.sp_block, self.nodes * self.slots_per_node
        if block is not None and (block % self.slots_per_node or total % block):
            raise ValueError(
                f"volcano.sp_block={block} must be a multiple of "
                f"slots_per_node={self.slots_per_node} and divide all {total} ranks"
            )
        return self

    @property
    def num_warm_spares(self) -> int:
        """None with Kueue: a spare that becomes a member cannot join the group."""
        return 0 if self.kueue is not None else super().num_warm_spares

    @property
    def sp_block(self) -> int | None:
        """As the section of Volcano has it."""
        return self.volcano.sp_block if self.volcano is not None else None

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
AnyEngineSpec = Annotated[
    LocalEngineSpec | KubernetesEngineSpec | LaunchedEngineSpec, BeforeValidator(_of_its_kind)
]


class WorkerSpec(SettingsModel):
    """The training program, at one of three depths: recipe, script with a callback, or command."""

    recipe: str | None = Field(
        None, description="session depth: module:function that each rank calls with the job"
    )
    command: tuple[str, ...] | None = Field(
        None, min_length=1,
        description="command depth: program and arguments, started as `per` says; "
        "${MA_NUM_HOSTS}, ${VC_TASK_INDEX}, ${MASTER_ADDR}, ${MASTER_PORT} and the like, "
        "${NNODES}, ${NODE_RANK} and ${WORLD_SIZE} are filled in; $$ is a plain $",
    )  # fmt: skip
    script: tuple[str, ...] | None = Field(
        None, min_length=1,
        description="callback depth: a Python file and its arguments, which each rank runs as "
        "python does; a callback of perdure.integrations takes over its loop, or training_steps "
        "supplies the loop's steps",
    )  # fmt: skip
    integration: Literal["megatron", "mindspore"] | None = Field(
        None, description="scripts: what takes over the loop of an unchanged program: megatron, "
        "for Megatron-LM and MindSpeed-LLM; or mindspore: the script has the callback of "
        "perdure.integrations.mindspore, and its ranks need no torch. For a command with "
        "per=device, mindspore starts MindSpore's scheduler, in place of msrun",
    )  # fmt: skip
    python: str | None = Field(
        None, description="integration=mindspore: interpreter of the ranks, in an environment with "
        "MindSpore; default: the one that runs Perdure",
    )  # fmt: skip
    preload: tuple[str, ...] = Field(
        (),
        description="scripts and recipes: modules that each node imports once, before it starts "
        "ranks; processes of new ranks inherit them",
    )
    per: Literal["node", "device"] = Field(
        "node",
        description="commands: start once per node, for a launcher that starts its ranks itself "
        "(torchrun), or once per device, each process with RANK, LOCAL_RANK, WORLD_SIZE, "
        "MASTER_ADDR and MASTER_PORT set",
    )
    cwd: str | None = Field(
        None,
        description="folder that the workers start in; default: the folder in which the run was "
        "first started",
    )
    progress: ProgressSpec | None = Field(
        None, description="commands: how to read steps and losses from the output"
    )
    checkpoints: ProgramCheckpointsSpec | None = Field(
        None, description="commands: where the program saves its checkpoints"
    )
    resume: ResumeSpec | None = Field(
        None, description="commands: arguments and variables to add when the program starts again "
        "and this run has a checkpoint; ${PERDURE_CHECKPOINT} is its path"
    )  # fmt: skip
    mindformers: str | None = Field(
        None, min_length=1, description="commands: YAML configuration of MindSpore Transformers, "
        "relative to cwd, which is read with the job file: it gives progress, checkpoints, resume, "
        "parallelism and restart.from_platform, where the job itself does not"
    )  # fmt: skip
    restart_codes: tuple[int, ...] = Field(
        (), description="exit codes by which the program asks to be started again, such as [85, "
        "99], each from 1 to 255: no fault, and free while each start comes further than the "
        "one before",
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

    @field_validator("restart_codes")
    @classmethod
    def _check_restart_codes(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        for code in value:
            if not 1 <= code <= MAX_EXIT_CODE:
                raise ValueError(f"{code} is no exit code of a failure, which is 1 to 255")
        return value

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if self.preload and self.command is not None:
            raise ValueError("preload is for a script or recipe: a command imports by itself")
        if self.python is not None and (self.script is None or not self.is_mindspore):
            raise ValueError("python is for a script with integration=mindspore, without torch")
        if self.integration is not None and self.script is None and not self.needs_scheduler:
            raise ValueError(
                "integration is for worker.script: it takes over the script's loop; mindspore is "
                "for worker.command with per=device, too: it starts MindSpore's scheduler"
            )
        depths = [
            name for name in ("recipe", "script", "command") if getattr(self, name) is not None
        ]
        if len(depths) > 1:
            raise ValueError(f"{' and '.join(depths)} exclude each other, give one")
        if self.per == "device" and self.command is None:
            kind = "script" if self.script is not None else "recipe"
            raise ValueError(f"per=device is for worker.command: a {kind} is started so anyway")
        for name in ("progress", "checkpoints", "resume", "mindformers"):
            if getattr(self, name) is not None and self.command is None:
                raise ValueError(f"{name} is for worker.command: a recipe's session does it")
        if self.resume is not None and self.checkpoints is None:
            raise ValueError("resume needs checkpoints, which says where the program saves")
        return self

    @property
    def is_mindspore(self) -> bool:
        """Whether the ranks train with MindSpore, without torch."""
        return self.integration == "mindspore"

    @property
    def needs_scheduler(self) -> bool:
        """Whether the agent starts MindSpore's scheduler beside the ranks of a command."""
        return self.is_mindspore and self.command is not None and self.per == "device"

    @property
    def is_command(self) -> bool:
        """Whether the program is an unchanged command (command depth)."""
        return self.command is not None

    @property
    def is_launcher(self) -> bool:
        """Whether the program is started once per node, and starts its ranks itself."""
        return self.is_command and self.per == "node"
