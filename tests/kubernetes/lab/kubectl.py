"""A cluster through kubectl: the lab's, or one that somebody else runs. Times are seconds."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KUBECTL_S = 180.0


@dataclass(frozen=True)
class Cluster:
    """What tests need of a cluster whose nodes they leave alone.

    Attributes:
        image: in which Perdure runs.
        kubeconfig: an administrator's.
        command: that starts kubectl.
    """

    image: str
    kubeconfig: Path
    command: Sequence[str] = ("kubectl",)

    def volumes(self) -> list[dict[str, object]]:
        """For `spec.volumes` of a pod: what the image lacks."""
        return []

    def mounts(self) -> list[dict[str, object]]:
        """For `volumeMounts` of a container."""
        return []

    def environment(self) -> dict[str, str]:
        """Variables that such a container needs."""
        return {}

    def kubectl(
        self, *arguments: str, stdin: str | None = None, timeout_s: float = KUBECTL_S
    ) -> str:
        """What kubectl printed.

        Raises:
            RuntimeError: it failed; with what it said.
        """
        done = self.try_kubectl(*arguments, stdin=stdin, timeout_s=timeout_s)
        if done.returncode != 0:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def try_kubectl(
        self, *arguments: str, stdin: str | None = None, timeout_s: float = KUBECTL_S
    ) -> subprocess.CompletedProcess[str]:
        """The same, for what may fail."""
        return subprocess.run(
            [*self.command, f"--kubeconfig={self.kubeconfig}", *arguments],
            input=stdin or "",
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def get(self, *arguments: str) -> dict[str, Any]:
        """The document that `kubectl get` finds."""
        document: dict[str, Any] = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return document

    def create(self, *documents: dict[str, Any]) -> None:
        """Create objects."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(documents)}
        self.kubectl("create", "-f", "-", stdin=json.dumps(listed))

    def ready_nodes(self) -> list[str]:
        """Names of the nodes that Kubernetes calls Ready."""
        return [
            item["metadata"]["name"]
            for item in self.get("nodes")["items"]
            if ready_condition(item).get("status") == "True"
        ]


def ready_condition(node: dict[str, Any]) -> dict[str, str]:
    """What a node's document says of its being Ready; empty before its first report."""
    conditions: list[dict[str, str]] = node["status"].get("conditions", [])
    return next((one for one in conditions if one["type"] == "Ready"), {})
