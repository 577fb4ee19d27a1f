"""Accounts of a cluster with chosen rights, and how Perdure's command line takes one."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.kubernetes.lab.kubectl import Cluster
from tests.waiting import wait_for

NAME = "supervisor"
# What a plain job needs, as the manifests give it.
NEEDED: Mapping[str, Sequence[str]] = {
    "pods": ("create", "get", "list", "watch", "delete"),
    "pods/portforward": ("get", "create"),
    "secrets": ("create", "get", "list", "delete", "patch"),
    "configmaps": ("create", "get", "list", "delete"),
}


def role(rights: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """A ServiceAccount with a Role of these verbs by resource, and its token."""
    api = "rbac.authorization.k8s.io"
    rules = [
        {"apiGroups": [""], "resources": [resource], "verbs": list(verbs)}
        for resource, verbs in rights.items()
    ]
    subject = {"kind": "ServiceAccount", "name": NAME}
    token = {"name": f"{NAME}-token", "annotations": {"kubernetes.io/service-account.name": NAME}}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": NAME}},
        {
            "apiVersion": f"{api}/v1", "kind": "Role", "metadata": {"name": NAME}, "rules": rules,
        },
        {
            "apiVersion": f"{api}/v1", "kind": "RoleBinding", "metadata": {"name": NAME},
            "roleRef": {"apiGroup": api, "kind": "Role", "name": NAME}, "subjects": [subject],
        },
        {
            "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/service-account-token",
            "metadata": token,
        },
    ]  # fmt: skip


def kubeconfig_of(cluster: Cluster, namespace: str, folder: Path) -> Path:
    """A kubeconfig for that account, once its token is there."""
    found = ("secret", f"{NAME}-token", "--namespace", namespace)

    def token() -> str:
        data: dict[str, str] = cluster.get(*found).get("data") or {}
        return base64.b64decode(data.get("token", "")).decode()

    wait_for(token, what="the account's token")
    shown = json.loads(
        cluster.kubectl("config", "view", "--raw", "--flatten", "--minify", "-o", "json")
    )
    shown["users"] = [{"name": NAME, "user": {"token": token()}}]
    shown["contexts"][0]["context"] |= {"user": NAME, "namespace": namespace}
    path = folder / "kubeconfig"
    path.write_text(json.dumps(shown), encoding="utf-8")
    return path
