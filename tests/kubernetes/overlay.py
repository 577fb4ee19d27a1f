"""The manifests of `deploy/kubernetes`, changed for the lab: its image has the host's files.

An overlay of kustomize is written beside the manifests' own folders, as a user would write one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.kubernetes.lab.cluster import Lab
from tests.kubernetes.lab.places import REPO

DEPLOY = REPO / "deploy" / "kubernetes"
NAMESPACE = "perdure"
# What the official image does when it starts for the first time, with Debian's programs.
POSTGRES = """set -eu
bin=$(echo /usr/lib/postgresql/*/bin)
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  printf %s "$POSTGRES_PASSWORD" > /var/run/postgresql/password
  "$bin/initdb" --username "$POSTGRES_USER" --pwfile /var/run/postgresql/password \
    --auth scram-sha-256 --encoding UTF8 --pgdata "$PGDATA"
  echo "host all all all scram-sha-256" >> "$PGDATA/pg_hba.conf"
  echo "CREATE DATABASE $POSTGRES_DB" | "$bin/postgres" --single -D "$PGDATA" postgres
fi
exec "$bin/postgres" -D "$PGDATA" -c listen_addresses='*' \
  -c unix_socket_directories=/var/run/postgresql
"""
REDIS = 'exec redis-server --requirepass "$REDIS_PASSWORD" --save "" --dir /tmp'
COMMANDS = {"perdure-postgres": POSTGRES, "perdure-redis": REDIS}
# Users of the pods; None: root, since the files of a checkout may be root's alone.
USERS = {"perdure-postgres": 999}
# Two cores are shared by three nodes and everything else; with less, a busy machine starves them.
RESOURCES = {"requests": {"cpu": "200m", "memory": "64Mi"}, "limits": None}


def write_overlay(folder: Path, lab: Lab, *, bases: Iterable[Path]) -> Path:
    """Write an overlay into a folder. Returns the folder, for `kubectl apply -k`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = list(bases)
    patches = _write_patches(folder, lab, [one for path in paths for one in rendered(lab, path)])
    template = _job_template(lab)
    (folder / "base-job-template.json").write_text(json.dumps(template), encoding="utf-8")
    image, _, tag = lab.image.rpartition(":")
    overlay = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "bases": [os.path.relpath(path.resolve(), folder.resolve()) for path in paths],
        "patchesStrategicMerge": patches,
        "images": [
            {"name": name, "newName": image, "newTag": tag}
            for name in ("perdure", "postgres", "redis")
        ],
        "configMapGenerator": [
            {
                "name": "perdure-job-template", "namespace": NAMESPACE, "behavior": "replace",
                "files": ["base-job-template.json"],
            }
        ],
        "generatorOptions": {"disableNameSuffixHash": True},
    }  # fmt: skip
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay), encoding="utf-8")
    return folder


def write_post_renderer(folder: Path, lab: Lab, documents: Iterable[Mapping[str, Any]]) -> Path:
    """Write the same changes for documents of Helm. Returns the program for `--post-renderer`."""
    folder.mkdir(parents=True, exist_ok=True)
    patches = _write_patches(folder, lab, documents)
    template = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "perdure-job-template", "namespace": NAMESPACE},
        "data": {"base-job-template.json": json.dumps(_job_template(lab))},
    }
    (folder / "template.yaml").write_text(yaml.safe_dump(template), encoding="utf-8")
    overlay = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["all.yaml"],
        "patchesStrategicMerge": [*patches, "template.yaml"],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay), encoding="utf-8")
    program = folder / "post-renderer"
    program.write_text(f"#!/bin/sh\ncat > {folder}/all.yaml && kubectl kustomize {folder}\n")
    program.chmod(0o755)
    return program


def _write_patches(folder: Path, lab: Lab, documents: Iterable[Mapping[str, Any]]) -> list[str]:
    """Write a patch for each workload. Returns the names of the files."""
    names = []
    for one in documents:
        if one["kind"] not in ("Deployment", "StatefulSet"):
            continue
        file = folder / f"{one['kind'].lower()}-{one['metadata']['name']}.yaml"
        file.write_text(yaml.safe_dump(_patch(lab, one)), encoding="utf-8")
        names.append(file.name)
    return names


def rendered(lab: Lab, path: Path) -> list[dict[str, Any]]:
    """The documents that kustomize makes of a folder."""
    return [one for one in yaml.safe_load_all(lab.kubectl("kustomize", str(path))) if one]


def _patch(lab: Lab, workload: Mapping[str, Any]) -> dict[str, Any]:
    name, pod = workload["metadata"]["name"], workload["spec"]["template"]["spec"]
    user = USERS.get(name, 0)
    spec: dict[str, Any] = {
        "volumes": lab.volumes(),
        "securityContext": {"runAsUser": user, "runAsGroup": user, "runAsNonRoot": bool(user)},
    }
    for part in ("initContainers", "containers"):
        spec[part] = [_container(lab, name, one["name"]) for one in pod.get(part, [])]
    if "volumeClaimTemplates" in workload["spec"]:
        spec["initContainers"].append(_owner_of_disk(lab, workload, user))
    return {
        "apiVersion": workload["apiVersion"],
        "kind": workload["kind"],
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"template": {"spec": {k: v for k, v in spec.items() if v}}},
    }


def _container(lab: Lab, workload: str, name: str) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": name,
        "workingDir": str(REPO),
        "env": [{"name": key, "value": value} for key, value in lab.environment().items()],
        "volumeMounts": lab.mounts(),
        "resources": RESOURCES,
        # Root without capabilities may not read the files of others.
        "securityContext": {"capabilities": None},
    }
    if workload in COMMANDS:
        document["command"] = ["/bin/bash", "-c", COMMANDS[workload]]
    return document


def _owner_of_disk(lab: Lab, workload: Mapping[str, Any], user: int) -> dict[str, Any]:
    """A claim is a folder of the host here, whose owner `fsGroup` does not change."""
    (claim,) = workload["spec"]["volumeClaimTemplates"]
    folder = "/disk"
    return {
        "name": "own-disk",
        "image": lab.image,
        "command": ["chown", str(user), folder],
        "env": [{"name": key, "value": value} for key, value in lab.environment().items()],
        "securityContext": {"runAsUser": 0, "runAsNonRoot": False},
        "volumeMounts": [*lab.mounts(), {"name": claim["metadata"]["name"], "mountPath": folder}],
    }


def _job_template(lab: Lab) -> dict[str, Any]:
    """The base job template, with the host's files for the supervisor's pod."""
    template = json.loads((DEPLOY / "base/base-job-template.json").read_text(encoding="utf-8"))
    pod = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    pod["securityContext"] = {"runAsUser": 0}
    pod["volumes"] += lab.volumes()
    container = pod["containers"][0]
    container["securityContext"] = {}
    container["workingDir"] = str(REPO)
    container["volumeMounts"] += lab.mounts()
    container["env"] += [{"name": key, "value": value} for key, value in lab.environment().items()]
    requests = template["variables"]["properties"]
    requests["cpu_request"]["default"] = "200m"
    requests["memory_request"]["default"] = "64Mi"
    return template
