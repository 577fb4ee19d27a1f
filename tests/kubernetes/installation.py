"""An installation of Perdure in the lab, by kustomize or by Helm: its servers, and runs on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.kubernetes.lab.cluster import Lab
from tests.kubernetes.overlay import DEPLOY, NAMESPACE
from tests.kubernetes.store import Store
from tests.waiting import wait_for

UP_S = 900.0
RUN_S = 900.0
CLI_S = 240.0
AUTH = "perdure:a-long-word"
IN_NAMESPACE = ("--namespace", NAMESPACE)


@dataclass(frozen=True, slots=True)
class Installation:
    """What was installed, and how to ask its Prefect servers."""

    lab: Lab
    store: Store
    settings: Mapping[str, str]

    def prefect(self, *arguments: str) -> str:
        """What the command line of Prefect printed, as on a user's machine."""
        done = subprocess.run(
            [str(Path(sys.executable).with_name("prefect")), *arguments],
            env={**os.environ, **self.settings},
            capture_output=True,
            text=True,
            timeout=CLI_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def pods(self, labels: str = "") -> list[dict[str, Any]]:
        """Pods of the namespace."""
        chosen = ("--selector", labels) if labels else ()
        found: list[dict[str, Any]] = self.lab.get("pods", *IN_NAMESPACE, *chosen)["items"]
        return found

    def flow_run(self, flow_run_id: str) -> dict[str, Any]:
        """A flow run, as the server has it."""
        text = self.prefect("flow-run", "inspect", flow_run_id, "--output", "json")
        found: dict[str, Any] = json.loads(text)
        return found


def secret(store: Store) -> dict[str, Any]:
    """The one that a user makes by hand; the password has what an address would not take."""
    values = {
        "postgres-password": "pa#ss/wo:rd@%",
        "redis-password": "redis7",
        "prefect-auth-string": AUTH,
        **{key: value for key, value in store.environment.items() if "KEY" in key},
    }
    metadata = {"name": "perdure", "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": values}


def are_all_ready(lab: Lab, *, servers: int) -> bool:
    """Whether all pods of the installation are."""
    pods = lab.get("pods", *IN_NAMESPACE)["items"]
    names = [pod["metadata"]["name"] for pod in pods]
    ready = [
        condition["status"] == "True"
        for pod in pods
        for condition in pod["status"].get("conditions", [])
        if condition["type"] == "Ready"
    ]
    return f"perdure-prefect-{servers - 1}" in names and len(ready) == len(pods) and all(ready)


def sample_job(installation: Installation, run_id: str, *, steps: int) -> dict[str, Any]:
    """The sample job, with the lab's image and store."""
    lab, store = installation.lab, installation.store
    document: dict[str, Any] = yaml.safe_load((DEPLOY / "job.yaml").read_text(encoding="utf-8"))
    engine = document["engine"] | {
        "image": lab.image,
        "python": sys.executable,
        "pod_security": None,  # which allows no files of the host
        # A tenth of a CPU takes minutes to import torch.
        "resources": {"cpu": "1", "memory": "2Gi"},
        "volumes": [
            {"name": name, "mount_path": mount["mountPath"], "read_only": True, "source": source}
            for volume, mount in zip(lab.volumes(), lab.mounts(), strict=True)
            for name, source in [(volume["name"], {"hostPath": volume["hostPath"]})]
        ],
        "pod": {"spec": {"containers": [_agent(lab)]}},
    }
    return document | {
        "run_id": run_id,
        "steps": steps,
        "storage": {
            "address": store.below(run_id),
            "endpoint": store.environment["AWS_ENDPOINT_URL"],
            "region": "us-east-1",
        },
        "data": {"sources": [str(DEPLOY.parents[1] / "docs/*.md")], "shard_size_bytes": 65536},
        "engine": engine,
    }


def _agent(lab: Lab) -> dict[str, Any]:
    env = [{"name": name, "value": value} for name, value in lab.environment().items()]
    return {"name": "agent", "env": env}


def start(installation: Installation, job: Mapping[str, Any], *options: str) -> str:
    """Start a job as the page on Kubernetes says. Returns the flow run's id."""
    parameter = ("--param", f"job={json.dumps(job)}")
    printed = installation.prefect("deployment", "run", "pretrain/cluster", *parameter, *options)
    (line,) = (line for line in printed.splitlines() if "UUID:" in line)
    return line.split()[-1]


def prefect_settings(lab: Lab, home: Path) -> dict[str, str]:
    """Variables with which Prefect's command line reaches the installation."""
    service = lab.get("service", "perdure-prefect", *IN_NAMESPACE)
    return {
        "PREFECT_API_URL": f"http://{service['spec']['clusterIP']}:4200/api",
        "PREFECT_API_AUTH_STRING": AUTH,
        "PREFECT_HOME": str(home),
        "PREFECT_CLIENT_MAX_RETRIES": "10",
    }


def await_completion(installation: Installation, flow_run_id: str) -> None:
    """Wait until a flow run is Completed."""

    def over() -> bool:
        state = installation.flow_run(flow_run_id)["state"]
        assert state["type"] not in ("FAILED", "CANCELLED"), state
        return bool(state["type"] == "COMPLETED")

    wait_for(over, timeout_s=RUN_S, period_s=5, what="the run is completed")


def wait_for_no_pod(installation: Installation, labels: str) -> list[str]:
    """Names of the pods that are left when they have had the time to end."""
    wait_for(lambda: not installation.pods(labels), period_s=1, what="no pod is left")
    return [one["metadata"]["name"] for one in installation.pods(labels)]
