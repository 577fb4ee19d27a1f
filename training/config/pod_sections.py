"""Sections of a Kubernetes engine that shape its pods: volumes, queues."""

from __future__ import annotations

import posixpath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from perdure.storage.frozen_model import SettingsModel
from perdure.training.config import pod_rules

_LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"  # RFC 1123, as Kubernetes wants names

Name = Annotated[str, AfterValidator(pod_rules.check_name)]


class VolumeSpec(SettingsModel):
    """A volume of the pods, and its mount path in the agent's container."""

    name: str = Field(description="name of the volume", pattern=_LABEL)
    mount_path: str = Field(description="absolute mount path in the container", pattern="^/")
    source: dict[str, Any] = Field(
        description="source of the volume, as in a pod: {hostPath: {path: "
        "/usr/local/Ascend/driver}} or {persistentVolumeClaim: {claimName: corpus}}"
    )
    read_only: bool = Field(False, description="mount the volume read-only")
    sub_path: str | None = Field(
        None, description="folder within the volume to mount; default: its root"
    )

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
        if len(source) != 1 or not all(isinstance(fields, dict) for fields in source.values()):
            raise ValueError("must be one kind of volume with its fields, {hostPath: {path: ...}}")
        return source

    def holds(self, folder: str) -> bool:
        """Whether a folder is in it that all pods share, and may write to."""
        if self.read_only or "emptyDir" in self.source:
            return False
        path = posixpath.normpath(self.mount_path)
        return posixpath.commonpath((path, posixpath.normpath(folder))) == path


class NetworkTopologySpec(SettingsModel):
    """Volcano's limit on how far apart in the network a gang is placed (Volcano 1.11 and newer)."""

    mode: Literal["hard", "soft"] = Field(
        "soft", description="hard: wait until the gang fits within the tier; soft: prefer it"
    )
    highest_tier: int | None = Field(
        None, ge=0, description="highest tier of HyperNodes that the gang may span; default: any"
    )


class KueueSpec(SettingsModel):
    """Admission by Kueue: the members' pods are one pod group."""

    queue: Name = Field(description="LocalQueue of the pods")
    priority_class: Name | None = Field(
        None, description="WorkloadPriorityClass, which orders the queue; engine.priority_class "
        "is that of the pods"
    )  # fmt: skip


class VolcanoSpec(SettingsModel):
    """Gang placement by Volcano: a PodGroup, and Volcano's scheduler for the pods."""

    queue: Name = Field("default", description="queue of the PodGroup")
    scheduler: Name = Field("volcano", description="schedulerName of the pods")
    sp_block: int | None = Field(
        None, ge=1, description="MindCluster's sp-block: chips of a logical super pod. The "
        "scheduler places the nodes of each block of ranks in one super pod"
    )  # fmt: skip
    network_topology: NetworkTopologySpec | None = Field(
        None, description="limit on how far apart in the network the gang is placed; default: none"
    )
