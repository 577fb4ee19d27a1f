"""Small pods for tests of a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.kubernetes.lab.kubectl import Cluster
from tests.waiting import wait_for

START_S = 240.0


def pod(
    cluster: Cluster,
    name: str,
    command: Sequence[str],
    *,
    node: str | None = None,
    labels: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A pod of one container that runs a command with the files of Perdure."""
    container = {
        "name": "main",
        "image": cluster.image,
        "command": list(command),
        "volumeMounts": cluster.mounts(),
        "env": [{"name": key, "value": value} for key, value in cluster.environment().items()],
    }
    spec: dict[str, Any] = {
        "containers": [container],
        "volumes": cluster.volumes(),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
    }
    if node is not None:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": dict(labels or {"name": name})},
        "spec": spec,
    }


def wait_until_running(cluster: Cluster, namespace: str, *names: str) -> None:
    """Return when these pods run."""

    def running() -> bool:
        items = cluster.get("pods", "--namespace", namespace)["items"]
        phases = {item["metadata"]["name"]: item["status"].get("phase") for item in items}
        return all(phases.get(name) == "Running" for name in names)

    wait_for(running, timeout_s=START_S, period_s=0.2, what=f"{names} run")
