"""A run that gets no pods says why in time, in the words of the cluster, and leaves nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.lab.kubectl import Cluster
from tests.kubernetes.runs import ClusterRuns
from tests.waiting import BEYOND_A_TEST_S

PLACE_S = 15.0
GANG_S = 45.0  # until all but one of four pods are up
NPU = "huawei.com/Ascend910"

pytestmark = pytest.mark.process


def refused(runs: ClusterRuns, name: str, **engine: Any) -> str:
    """Why a run was not placed."""
    engine = {"place_timeout_s": PLACE_S, **engine}
    job = runs.job(name, steps=5, engine=engine)
    played = runs.run(job)
    assert played.history.attempts == []
    assert played.leftovers == []
    return played.outcome.ended


def test_a_gang_that_no_nodes_have_room_for_names_what_they_lack(runs):
    assert f"Insufficient {NPU}" in refused(runs, "room", resources={NPU: 9})


@pytest.mark.long
def test_a_gang_of_which_one_member_has_no_node_is_given_back(runs, cluster):
    nodes = len(cluster.ready_nodes())
    # On a busy machine the scheduler comes to the last pod after a quarter of a minute.
    engine = {"nodes": nodes + 1, "slots_per_node": 1, "spares": 0, "place_timeout_s": GANG_S}
    why = refused(runs, "gang", **engine)
    assert f"{nodes} of {nodes + 1} pods were up" in why
    assert "didn't match pod affinity/anti-affinity" in why


@pytest.mark.long
def test_a_taint_that_the_job_does_not_tolerate_is_named(runs, lab):
    for node in lab.nodes:
        lab.kubectl("taint", "node", node, "kept-for=others:NoSchedule", "--overwrite")
    try:
        assert "{kept-for: others}" in refused(runs, "taint")
    finally:
        lab.kubectl("taint", "nodes", "--all", "kept-for-")


@pytest.mark.long
def test_an_image_that_is_not_there_is_named(runs):
    why = refused(runs, "image", image="lab.local/absent:1")
    assert "lab.local/absent:1" in why
    assert "ErrImagePull" in why or "ImagePullBackOff" in why


def test_an_image_whose_name_is_none_is_not_waited_for(runs):
    why = refused(runs, "name", image="no image", place_timeout_s=BEYOND_A_TEST_S)
    assert "InvalidImageName" in why


@pytest.mark.long
def test_a_secret_that_is_not_there_is_named(runs):
    why = refused(runs, "secret", env_secrets=["absent"])
    assert 'secret "absent" not found' in why


def test_a_quota_that_is_used_up_is_named(runs, create):
    quota = {"spec": {"hard": {"pods": "1"}}}
    create({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}, **quota})
    assert "exceeded quota: small" in refused(runs, "quota")


def test_a_right_that_is_missing_is_named(runs, cluster, namespace, create, tmp_path, monkeypatch):
    create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "nobody"}})
    monkeypatch.setenv("KUBECONFIG", str(config_of(cluster, namespace, "nobody", tmp_path)))
    job = runs.job("rights", steps=5)
    with pytest.raises(Exception, match="cannot list resource"):
        runs.run(job)


def config_of(cluster: Cluster, namespace: str, account: str, folder: Path) -> Path:
    """A kubeconfig with the rights of a service account."""
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    answer = cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(request))
    document = json.loads(cluster.kubectl("config", "view", "--raw", "-o", "json"))
    document["users"] = [{"name": "it", "user": {"token": json.loads(answer)["status"]["token"]}}]
    for context in document["contexts"]:
        context["context"]["user"] = "it"
    file = folder / "account.kubeconfig"
    file.write_text(json.dumps(document))
    return file
