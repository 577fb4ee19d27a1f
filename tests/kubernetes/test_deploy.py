"""From `kubectl apply -k` to a completed run, with the manifests that users get."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from perdure.training.config.job import parse_job
from perdure.training.drill.driver import RunDriver
from perdure.training.drill.evaluation import differences
from perdure.training.engines.kubernetes.objects import AGENT, PART, RUN
from tests.kubernetes.lab.cluster import Lab
from tests.kubernetes.overlay import DEPLOY, NAMESPACE, write_overlay
from tests.kubernetes.runs import KEYS
from tests.kubernetes.store import Store
from tests.waiting import wait_for

UP_S = 600.0
RUN_S = 600.0
CLI_S = 240.0
ORPHANED_STEPS = 1500  # longer than the next supervisor takes to come
BASES = [DEPLOY / "overlays/two-servers", DEPLOY / "options/nodes-read"]
AUTH = "perdure:a-long-word"
IN_NAMESPACE = ("--namespace", NAMESPACE)

# The first one installs everything, on a busy machine.
pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]


@dataclass(frozen=True, slots=True)
class Installation:
    """What `kubectl apply -k` has made, and how to ask its Prefect servers."""

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


@pytest.fixture(scope="module")
def installation(
    cluster: Lab, store: Store, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    """The manifests with two Prefect servers, applied to an empty cluster."""
    if not isinstance(cluster, Lab):
        pytest.skip("installs the manifests with the lab's files, so not on your cluster")
    overlay = write_overlay(tmp_path_factory.mktemp("overlay"), cluster, bases=BASES)
    try:
        cluster.kubectl("apply", "-k", str(overlay))
        cluster.create(_secret(store))
        wait_for(lambda: _are_all_ready(cluster), timeout_s=UP_S, period_s=2, what="pods are ready")
        service = cluster.get("service", "perdure-prefect", *IN_NAMESPACE)
        settings = {
            "PREFECT_API_URL": f"http://{service['spec']['clusterIP']}:4200/api",
            "PREFECT_API_AUTH_STRING": AUTH,
            "PREFECT_HOME": str(tmp_path_factory.mktemp("prefect")),
            "PREFECT_CLIENT_MAX_RETRIES": "10",
        }
        yield Installation(cluster, store, settings)
    finally:
        kinds = "clusterroles,clusterrolebindings"
        cluster.kubectl("delete", kinds, "perdure-nodes-read", "--ignore-not-found")
        cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", timeout_s=180)


def _secret(store: Store) -> dict[str, Any]:
    """The one that a user makes by hand; the password has what an address would not take."""
    values = {
        "postgres-password": "pa#ss/wo:rd@%",
        "redis-password": "redis7",
        "prefect-auth-string": AUTH,
        **{key: value for key, value in store.environment.items() if "KEY" in key},
    }
    metadata = {"name": "perdure", "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": values}


def _are_all_ready(lab: Lab) -> bool:
    pods = lab.get("pods", *IN_NAMESPACE)["items"]
    names = [pod["metadata"]["name"] for pod in pods]
    ready = [
        condition["status"] == "True"
        for pod in pods
        for condition in pod["status"].get("conditions", [])
        if condition["type"] == "Ready"
    ]
    return "perdure-prefect-1" in names and len(ready) == len(pods) and all(ready)


def _job(installation: Installation, run_id: str, *, steps: int) -> dict[str, Any]:
    """The sample job, with the lab's image and store."""
    lab, store = installation.lab, installation.store
    document: dict[str, Any] = yaml.safe_load((DEPLOY / "job.yaml").read_text(encoding="utf-8"))
    engine = document["engine"] | {
        "image": lab.image,
        "python": sys.executable,
        # No limit of CPUs: a tenth of one takes minutes to import torch.
        "resources": {"memory": "2Gi"},
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


def _start(installation: Installation, job: Mapping[str, Any]) -> str:
    """Start the sample as the page on Kubernetes says. Returns the flow run's id."""
    printed = installation.prefect(
        *("deployment", "run", "pretrain/cluster", "--param", f"job={json.dumps(job)}")
    )
    (line,) = (line for line in printed.splitlines() if "UUID:" in line)
    return line.split()[-1]


def test_a_run_completes_while_one_of_two_prefect_servers_is_killed(installation):
    flow_run_id = _start(installation, _job(installation, "on-cluster", steps=60))

    def trains() -> bool:
        pods = installation.pods("perdure.io/run=on-cluster")
        return len(pods) == 3 and all(one["status"]["phase"] == "Running" for one in pods)

    wait_for(trains, timeout_s=RUN_S, period_s=2, what="two agents and their supervisor run")
    kill = ("delete", "pod", "perdure-prefect-0", "--grace-period=0", "--force")
    installation.lab.kubectl(*kill, *IN_NAMESPACE)

    def over() -> bool:
        state = installation.flow_run(flow_run_id)["state"]["type"]
        assert state not in ("FAILED", "CANCELLED"), installation.flow_run(flow_run_id)["state"]
        return state == "COMPLETED"

    wait_for(over, timeout_s=RUN_S, period_s=5, what="the run is completed")
    assert installation.flow_run(flow_run_id)["name"] == "on-cluster"
    left = wait_for_none(installation, agents_of("on-cluster"))
    assert left == []
    secrets = installation.lab.get("secrets", *IN_NAMESPACE, "-l", "perdure.io/run=on-cluster")
    assert secrets["items"] == []


def test_the_sample_passes_the_checks_of_a_laptop_that_has_nothing_of_the_image(
    installation, tmp_path
):
    lab, store = installation.lab, installation.store
    text = (DEPLOY / "job.yaml").read_text(encoding="utf-8")
    text = text.replace("s3://my-bucket/perdure", store.below("sample"))
    text = text.replace("https://s3.example.com", store.environment["AWS_ENDPOINT_URL"])
    text = text.replace("registry.example.com/perdure:0.1.0", lab.image)
    # The lab's nodes have two cores for all that is in it.
    text = text.replace('{cpu: "2", memory: 4Gi}', "{memory: 64Mi}")
    file = tmp_path / "job.yaml"
    file.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "perdure", "preflight", str(file)],
        env={**os.environ, **store.environment, "PERDURE_HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=CLI_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "/opt/perdure/docs" in done.stdout + done.stderr


def agents_of(run_id: str) -> str:
    """Selects the agents of a run, without the pods of its supervisors."""
    return f"{RUN}={run_id},{PART}={AGENT}"


def wait_for_none(installation: Installation, labels: str) -> list[str]:
    """Names of the pods that are left when they have had the time to end."""
    wait_for(lambda: not installation.pods(labels), period_s=1, what="no pod is left")
    return [one["metadata"]["name"] for one in installation.pods(labels)]


def test_no_secret_stands_in_a_job_or_in_the_pod_of_a_flow_run(installation):
    documents = [
        *installation.lab.get("jobs", *IN_NAMESPACE)["items"],
        *installation.pods(),
    ]
    assert any(one["kind"] == "Job" for one in documents)
    text = json.dumps(documents)
    for key, secret in _secret(installation.store)["stringData"].items():
        assert secret not in text, key


def test_the_keeper_learns_the_runs_of_the_cluster_and_looks_after_them(installation):
    printed = installation.prefect("deployment", "run", "checkpoint-retention/cluster")
    (line,) = (line for line in printed.splitlines() if "UUID:" in line)
    flow_run_id = line.split()[-1]

    def looked_after() -> str:
        state = installation.flow_run(flow_run_id)["state"]
        return state["message"] or "" if state["type"] in ("COMPLETED", "FAILED") else ""

    message = wait_for(looked_after, timeout_s=RUN_S, period_s=3, what="the retention is over")
    assert message.startswith("1 run of this machine looked after")


def test_the_deployments_come_back_the_same_when_the_worker_starts_again(installation):
    before = installation.prefect("deployment", "ls")
    installation.lab.kubectl("rollout", "restart", "deployment/perdure-worker", *IN_NAMESPACE)
    status = ("rollout", "status", "deployment/perdure-worker", "--timeout=240s")
    installation.lab.kubectl(*status, *IN_NAMESPACE, timeout_s=260)
    assert installation.prefect("deployment", "ls") == before


def test_a_run_goes_on_in_a_new_pod_when_the_pod_of_its_supervisor_is_killed(
    installation, tmp_path
):
    document = _job(installation, "orphaned", steps=ORPHANED_STEPS)
    flow_run_id = _start(installation, document)
    cluster = RunDriver(tmp_path / "cluster", credentials=KEYS)
    job = parse_job(document)
    wait_for(
        lambda: cluster.outcome(job, "").history.open_attempt is not None,
        timeout_s=RUN_S, period_s=2, what="an attempt",
    )  # fmt: skip
    (before,) = installation.pods(f"prefect.io/flow-run-id={flow_run_id}")
    kill = ("delete", "pod", before["metadata"]["name"], "--grace-period=0", "--force")
    installation.lab.kubectl(*kill, *IN_NAMESPACE)

    def over() -> bool:
        state = installation.flow_run(flow_run_id)["state"]
        assert state["type"] not in ("FAILED", "CANCELLED"), state
        return bool(state["type"] == "COMPLETED")

    wait_for(over, timeout_s=RUN_S, period_s=5, what="the run is completed")
    twins = f"prefect.io/flow-run-id={flow_run_id}"
    wait_for(
        lambda: all(one["status"]["phase"] != "Running" for one in installation.pods(twins)),
        timeout_s=RUN_S, period_s=2, what="no supervisor is left",
    )  # fmt: skip
    assert over(), "the process that came too late leaves the state as it is"
    outcome = cluster.outcome(job, "completed")
    assert outcome.history.epoch == 2, "another supervisor has taken the run"
    assert len(outcome.history.attempts) == 1, "and has started nothing anew"
    plain = {
        "storage": {"address": f"file://{tmp_path / 'undisturbed'}"},
        "engine": {"nodes": 2, "slots_per_node": 2},
    }
    undisturbed = RunDriver(tmp_path).run(parse_job(document | plain))
    assert differences(outcome.curve, undisturbed.curve) == []
    assert wait_for_none(installation, agents_of("orphaned")) == []
