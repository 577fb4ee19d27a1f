"""The image of the Dockerfile runs a job on a cluster with nothing but what is in it."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from perdure.training.config.job import parse_job
from perdure.training.drill.driver import Curve, RunDriver
from tests.kubernetes.accounts import NAME as SUPERVISOR
from tests.kubernetes.accounts import NEEDED, role
from tests.kubernetes.conftest import absent
from tests.kubernetes.lab import built_image
from tests.kubernetes.lab.cluster import Lab
from tests.kubernetes.lab.places import REPO, ROOT
from tests.kubernetes.overlay import DEPLOY
from tests.kubernetes.runs import KEYS
from tests.waiting import wait_for

RUN_S = 900.0
HELP_S = 240.0
STEPS = 40
USER = 1000
# As the manifests have it for everything of Perdure.
RESTRICTED = {"runAsNonRoot": True, "fsGroup": USER}

# The build, and three nodes that unpack it, one after the other.
pytestmark = [pytest.mark.long, pytest.mark.process, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the sample job trains on, as it is when the image is built."""
    return Path(shutil.copytree(REPO / "docs", tmp_path_factory.mktemp("texts") / "docs"))


@pytest.fixture(scope="module")
def image(cluster: Lab, texts: Path) -> Iterator[str]:
    """The image, on all nodes."""
    if not isinstance(cluster, Lab):
        pytest.skip("builds an image for the lab; yours is named by PERDURE_TEST_IMAGE")
    if lacking := built_image.missing():
        absent(f"the Dockerfile is not built: {lacking}")
    folder = Path(tempfile.mkdtemp(prefix="image-", dir=ROOT))
    try:
        began_s = time.monotonic()
        archive = built_image.build_image(folder)
        built_s = time.monotonic()
        size_bytes = archive.stat().st_size
        for node in cluster.nodes:
            cluster.import_image(node, archive)
        print(f"\nimage of {size_bytes / 1e9:.2f} GB built in {built_s - began_s:.0f} s,")
        print(f"on {len(cluster.nodes)} nodes in {time.monotonic() - built_s:.0f} s")
    finally:
        shutil.rmtree(folder)
    yield built_image.NAME
    for node in cluster.nodes:
        cluster.remove_image(node, built_image.NAME)


def pod(name: str, image: str, **container: Any) -> dict[str, Any]:
    """A pod of the image as it is."""
    spec = {
        "restartPolicy": "Never", "securityContext": RESTRICTED,
        "containers": [{"name": "main", "image": image, **container}],
    }  # fmt: skip
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def finished(lab: Lab, namespace: str, name: str, *, timeout_s: float) -> str:
    """The output of a pod that has succeeded."""

    def phase() -> str:
        return str(lab.get("pod", name, "--namespace", namespace)["status"].get("phase"))

    def is_over() -> bool:
        return phase() in ("Succeeded", "Failed")

    wait_for(is_over, timeout_s=timeout_s, period_s=1, what=f"{name} is over")
    output = lab.kubectl("logs", name, "--namespace", namespace)
    assert phase() == "Succeeded", output
    return output


def undisturbed(document: Mapping[str, Any], texts: Path, home: Path) -> Curve:
    """The curve of the same job on this machine's own processes."""
    plain = {
        "storage": {"address": f"file://{home / 'store'}"},
        "data": document["data"] | {"sources": [str(texts / "*.md")]},
        "engine": {name: document["engine"][name] for name in ("nodes", "slots_per_node")},
        "watch": {},
    }
    return RunDriver(home).run(parse_job({**document, **plain})).curve


def test_its_default_command_is_the_help_of_the_command_line(lab, image, create, namespace):
    create(pod("help", image))
    output = finished(lab, namespace, "help", timeout_s=HELP_S)
    assert "Usage: perdure" in output
    assert "preflight" in output


def users_of_ranks(lab: Lab) -> set[int]:
    """Who the ranks are that live on the lab's nodes."""
    found = set()
    for process in (one for node in lab.nodes for one in lab.processes_in(node)):
        with suppress(psutil.Error):
            if process.name().startswith("rank-"):
                found.add(process.uids().real)
    return found


def sample(image: str, store: Any, run_id: str) -> dict[str, Any]:
    """The sample job of the manifests; image, store and number of steps alone are others."""
    document: dict[str, Any] = yaml.safe_load((DEPLOY / "job.yaml").read_text(encoding="utf-8"))
    storage = {
        "address": store.below(run_id), "endpoint": store.environment["AWS_ENDPOINT_URL"],
        "region": "us-east-1",
    }  # fmt: skip
    engine = document["engine"] | {"image": image}
    return document | {"run_id": run_id, "steps": STEPS, "storage": storage, "engine": engine}


def test_the_sample_job_and_its_supervisor_run_from_it_alone(
    lab, image, create, namespace, store, tmp_path, texts
):
    document = sample(image, store, "from-image")
    account = {"apiVersion": "v1", "kind": "ServiceAccount"}
    keys = {name: value for name, value in store.environment.items() if "KEY" in name}
    create(
        *role(NEEDED),
        {**account, "metadata": {"name": document["engine"]["service_account"]}},
        {
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "job"},
            "data": {"job.yaml": yaml.safe_dump(document)},
        },
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": keys},
    )  # fmt: skip
    supervisor = pod(
        "supervisor", image, command=["perdure", "run", "/job/job.yaml"],
        envFrom=[{"secretRef": {"name": "keys"}}],
        volumeMounts=[{"name": "job", "mountPath": "/job"}],
    )  # fmt: skip
    supervisor["spec"] |= {
        "serviceAccountName": SUPERVISOR,
        "volumes": [{"name": "job", "configMap": {"name": "job"}}],
    }
    create(supervisor)
    agents: dict[str, dict[str, Any]] = {}
    users: set[int] = set()

    def trained() -> bool:
        users.update(users_of_ranks(lab))
        found = lab.get("pods", "--namespace", namespace)["items"]
        phases = {one["metadata"]["name"]: one["status"].get("phase") for one in found}
        members = {one["metadata"]["name"]: one["spec"] for one in found}
        agents.update({n: spec for n, spec in members.items() if re.search(r"-m\d+-s", n)})
        if phases["supervisor"] == "Failed":
            raise AssertionError(lab.kubectl("logs", "supervisor", "--namespace", namespace))
        return phases["supervisor"] == "Succeeded"

    wait_for(trained, timeout_s=RUN_S, period_s=1, what="the supervisor is over")
    assert len(agents) >= 2, "more where a member has moved"
    assert users == {USER}
    for spec in agents.values():
        assert not any("hostPath" in volume for volume in spec["volumes"])
        assert [one["image"] for one in spec["containers"]] == [image]
        assert spec["securityContext"]["runAsUser"] == USER
    job = parse_job(document)
    outcome = RunDriver(tmp_path, credentials=KEYS).outcome(job, "completed")
    assert outcome.history.ended is not None
    assert outcome.history.ended.outcome == "completed"
    assert len(outcome.curve) == STEPS
    assert outcome.curve == undisturbed(document, texts, tmp_path / "undisturbed")
