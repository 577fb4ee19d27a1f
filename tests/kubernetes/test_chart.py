"""From `helm install` to a completed run of a team, and to an empty cluster again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.helm import CHART, helm
from tests.kubernetes.installation import (
    IN_NAMESPACE,
    UP_S,
    Installation,
    are_all_ready,
    await_completion,
    prefect_settings,
    sample_job,
    secret,
    start,
)
from tests.kubernetes.lab.cluster import Lab
from tests.kubernetes.overlay import NAMESPACE, write_post_renderer
from tests.kubernetes.store import Store
from tests.waiting import wait_for

TEAM = "team-a"
RELEASE = ("perdure", "--namespace", NAMESPACE)

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]


def _helm(lab: Lab, *arguments: str) -> str:
    done = helm(*arguments, env={**os.environ, "KUBECONFIG": str(lab.kubeconfig)})
    assert done.returncode == 0, done.stderr
    return done.stdout


def _values(lab: Lab, store: Store, folder: Path) -> Path:
    values = {
        **dict.fromkeys(("image", "postgresImage", "redisImage"), lab.image),
        "store": {"endpoint": store.environment["AWS_ENDPOINT_URL"], "region": "us-east-1"},
        "options": {"nodes-read": True},
        "namespaces": [TEAM],
    }
    path = folder / "values.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


@pytest.fixture
def installation(cluster: Lab, store: Store, tmp_path: Path) -> Iterator[Installation]:
    """The chart with one further namespace, installed in an empty cluster."""
    if not isinstance(cluster, Lab):
        pytest.skip("installs the chart with the lab's files, so not on your cluster")
    values = _values(cluster, store, tmp_path)
    text = _helm(cluster, "template", *RELEASE, "--values", str(values), str(CHART))
    documents = [document for document in yaml.safe_load_all(text) if document]
    renderer = write_post_renderer(tmp_path / "renderer", cluster, documents)
    install = ("--values", str(values), "--create-namespace", "--post-renderer", str(renderer))
    try:
        cluster.kubectl("create", "namespace", TEAM)
        _helm(cluster, "install", *RELEASE, str(CHART), *install)
        for namespace in (NAMESPACE, TEAM):
            document = secret(store)
            document["metadata"]["namespace"] = namespace
            cluster.create(document)
        wait_for(
            lambda: are_all_ready(cluster, servers=1),
            timeout_s=UP_S, period_s=2, what="pods are ready",
        )  # fmt: skip
        yield Installation(cluster, store, prefect_settings(cluster, tmp_path))
    finally:
        helm("uninstall", *RELEASE, env={**os.environ, "KUBECONFIG": str(cluster.kubeconfig)})
        for namespace in (NAMESPACE, TEAM):
            cluster.kubectl("delete", "namespace", namespace, "--ignore-not-found", timeout_s=180)


def test_a_team_trains_in_its_own_namespace_and_nothing_is_left_of_a_release(installation):
    lab = installation.lab
    job = sample_job(installation, "of-a-team", steps=30)
    job["engine"]["namespace"] = TEAM
    for name in ("endpoint", "region"):  # the release has them
        del job["storage"][name]
    flow_run_id = start(installation, job, "--job-variable", f"namespace={TEAM}")
    await_completion(installation, flow_run_id)
    run = installation.flow_run(flow_run_id)
    assert run["job_variables"] == {"namespace": TEAM, "image": lab.image}
    pods = lab.get("pods", "--namespace", TEAM)["items"]
    accounts = {pod["spec"]["serviceAccountName"] for pod in pods}
    assert accounts == {"perdure-supervisor"}, "that of the supervisor; those of agents are gone"
    may = ("auth", "can-i", "list", "pods", f"--as=system:serviceaccount:{TEAM}:perdure-supervisor")
    assert lab.try_kubectl(*may, "--namespace", TEAM).returncode == 0
    assert lab.try_kubectl(*may, *IN_NAMESPACE).returncode != 0
    _helm(lab, "uninstall", *RELEASE)
    kinds = "deployments,statefulsets,configmaps,serviceaccounts,roles,networkpolicies,services"
    left = [
        item["metadata"]["name"]
        for namespace in (NAMESPACE, TEAM)
        for item in lab.get(kinds, "--namespace", namespace)["items"]
    ]
    assert {name for name in left if name.startswith("perdure-")} == set()
    assert lab.try_kubectl("get", "clusterrole", f"perdure-nodes-read-{NAMESPACE}").returncode != 0
    kept = lab.get("persistentvolumeclaims", *IN_NAMESPACE)["items"]
    assert [claim["metadata"]["name"] for claim in kept] == ["data-perdure-postgres-0"]
