"""From `kubectl apply -k` to a completed run, with the manifests that users get."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from perdure.training.config.job import parse_job
from perdure.training.drill.driver import RunDriver
from perdure.training.drill.evaluation import differences
from perdure.training.engines.kubernetes.objects import AGENT, PART, RUN
from tests.kubernetes.installation import (
    CLI_S,
    IN_NAMESPACE,
    RUN_S,
    UP_S,
    Installation,
    are_all_ready,
    await_completion,
    prefect_settings,
    sample_job,
    secret,
    start,
    wait_for_no_pod,
)
from tests.kubernetes.lab.cluster import Lab
from tests.kubernetes.overlay import DEPLOY, NAMESPACE, write_overlay
from tests.kubernetes.runs import KEYS
from tests.kubernetes.store import Store
from tests.waiting import wait_for

ORPHANED_STEPS = 1500  # longer than the next supervisor takes to come
BASES = [DEPLOY / "overlays/two-servers", DEPLOY / "options/nodes-read"]

# The first one installs everything, on a busy machine.
pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]


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
        cluster.create(secret(store))
        wait_for(
            lambda: are_all_ready(cluster, servers=2),
            timeout_s=UP_S, period_s=2, what="pods are ready",
        )  # fmt: skip
        settings = prefect_settings(cluster, tmp_path_factory.mktemp("prefect"))
        yield Installation(cluster, store, settings)
    finally:
        kinds = "clusterroles,clusterrolebindings"
        cluster.kubectl("delete", kinds, "perdure-nodes-read", "--ignore-not-found")
        cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", timeout_s=180)


def test_a_run_completes_while_one_of_two_prefect_servers_is_killed(installation):
    flow_run_id = start(installation, sample_job(installation, "on-cluster", steps=60))

    def trains() -> bool:
        pods = installation.pods("perdure.io/run=on-cluster")
        return len(pods) == 3 and all(one["status"]["phase"] == "Running" for one in pods)

    wait_for(trains, timeout_s=RUN_S, period_s=2, what="two agents and their supervisor run")
    kill = ("delete", "pod", "perdure-prefect-0", "--grace-period=0", "--force")
    installation.lab.kubectl(*kill, *IN_NAMESPACE)

    await_completion(installation, flow_run_id)
    assert installation.flow_run(flow_run_id)["name"] == "on-cluster"
    left = wait_for_no_pod(installation, agents_of("on-cluster"))
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


def test_no_secret_stands_in_a_job_or_in_the_pod_of_a_flow_run(installation):
    documents = [
        *installation.lab.get("jobs", *IN_NAMESPACE)["items"],
        *installation.pods(),
    ]
    assert any(one["kind"] == "Job" for one in documents)
    text = json.dumps(documents)
    for key, value in secret(installation.store)["stringData"].items():
        assert value not in text, key


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
    document = sample_job(installation, "orphaned", steps=ORPHANED_STEPS)
    flow_run_id = start(installation, document)
    cluster = RunDriver(tmp_path / "cluster", credentials=KEYS)
    job = parse_job(document)
    wait_for(
        lambda: cluster.outcome(job, "").history.open_attempt is not None,
        timeout_s=RUN_S, period_s=2, what="an attempt",
    )  # fmt: skip
    (before,) = installation.pods(f"prefect.io/flow-run-id={flow_run_id}")
    kill = ("delete", "pod", before["metadata"]["name"], "--grace-period=0", "--force")
    installation.lab.kubectl(*kill, *IN_NAMESPACE)

    await_completion(installation, flow_run_id)
    twins = f"prefect.io/flow-run-id={flow_run_id}"
    wait_for(
        lambda: all(one["status"]["phase"] != "Running" for one in installation.pods(twins)),
        timeout_s=RUN_S, period_s=2, what="no supervisor is left",
    )  # fmt: skip
    state = installation.flow_run(flow_run_id)["state"]
    assert state["type"] == "COMPLETED", "the process that came too late leaves the state as it is"
    outcome = cluster.outcome(job, "completed")
    assert outcome.history.epoch == 2, "another supervisor has taken the run"
    assert len(outcome.history.attempts) == 1, "and has started nothing anew"
    plain = {
        "storage": {"address": f"file://{tmp_path / 'undisturbed'}"},
        "engine": {"nodes": 2, "slots_per_node": 2},
    }
    undisturbed = RunDriver(tmp_path).run(parse_job(document | plain))
    assert differences(outcome.curve, undisturbed.curve) == []
    assert wait_for_no_pod(installation, agents_of("orphaned")) == []
