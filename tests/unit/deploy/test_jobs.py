"""The sample jobs, and the pods that the engine makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from perdure.training.config.engine import KubernetesEngineSpec
from perdure.training.config.job import Job, parse_job
from perdure.training.engines.base import Placement
from perdure.training.engines.kubernetes import objects
from perdure.training.journal.records import Member
from tests.kubernetes.schema import unknown_fields
from tests.unit.deploy.conftest import KUBERNETES, ROOT, documents_of
from tests.values import not_none

SAMPLES = [KUBERNETES / "job.yaml", KUBERNETES / "overlays/ascend/job.yaml"]
OWNER = objects.Owner("perdure-run", "0-0-0")


def job_in(path: Path) -> tuple[Job, KubernetesEngineSpec]:
    job = parse_job(yaml.safe_load(path.read_text(encoding="utf-8")))
    assert isinstance(job.engine, KubernetesEngineSpec)
    return job, job.engine


def pod_of(path: Path) -> objects.Document:
    job, spec = job_in(path)
    member = Member(index=0, node="n1", schedule_cnt=1)
    placement = Placement(1, (member,), avoid=("n2",))
    plan = objects.PodPlan(member, "perdure-run-m0-s1-abcde", placement)
    return objects.pod(job, spec, OWNER, plan, store_secret="perdure-run-store")


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.parent.name)
def test_the_pods_of_a_sample_have_no_field_that_the_api_server_would_drop(path):
    assert unknown_fields(pod_of(path)) == []


def test_the_pod_group_of_the_sample_for_ascend_is_one_of_volcano():
    job, spec = job_in(SAMPLES[1])
    group = objects.pod_group(job, spec, not_none(spec.volcano), OWNER)
    assert unknown_fields(group) == []
    (queue,) = (one for one in documents_of("overlays/ascend") if one["kind"] == "Queue")
    assert group["spec"]["queue"] == queue["metadata"]["name"]
    assert group["spec"]["minMember"] == spec.nodes


def test_the_pods_of_the_sample_for_ascend_have_driver_devices_and_logs_of_their_node():
    pod = pod_of(SAMPLES[1])
    paths = {one["hostPath"]["path"] for one in pod["spec"]["volumes"] if "hostPath" in one}
    assert paths >= {
        "/usr/local/Ascend/driver", "/usr/local/dcmi", "/usr/local/bin/npu-smi",
        "/etc/ascend_install.info", "/var/log/npu",
    }  # fmt: skip
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"]["huawei.com/Ascend910"] == "8"
    (visible,) = (one for one in container["env"] if one["name"] == "ASCEND_VISIBLE_DEVICES")
    assert "huawei.com/Ascend910" in visible["valueFrom"]["fieldRef"]["fieldPath"]


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.parent.name)
def test_agents_get_the_account_without_a_token_and_the_labels_of_the_policies(path):
    pod = pod_of(path)
    account = pod["spec"]["serviceAccountName"]
    (found,) = (
        one for one in documents_of("base")
        if one["kind"] == "ServiceAccount" and one["metadata"]["name"] == account
    )  # fmt: skip
    assert found["automountServiceAccountToken"] is False
    assert pod["spec"]["automountServiceAccountToken"] is False
    (policy,) = (
        one for one in documents_of("base")
        if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] == "perdure-agents"
    )  # fmt: skip
    wanted = policy["spec"]["podSelector"]["matchLabels"]
    assert wanted.items() <= pod["metadata"]["labels"].items()


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.parent.name)
def test_metrics_of_a_sample_are_where_the_service_and_the_annotations_say(path):
    job, spec = job_in(path)
    (service,) = (one for one in documents_of("options/monitoring") if one["kind"] == "Service")
    (port,) = service["spec"]["ports"]
    assert port["targetPort"] == job.watch.metrics_port
    assert spec.annotations["prometheus.io/port"] == str(job.watch.metrics_port)
    assert service["spec"]["selector"].items() <= pod_of(path)["metadata"]["labels"].items()


def test_the_image_has_everything_that_its_containers_start():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for part in ("perdure", "flows", "tasks", "training", "storage", "docs", "deploy"):
        assert f"\nCOPY {part} {part}\n" in text
        assert f"\n!{part}\n" in (ROOT / ".dockerignore").read_text(encoding="utf-8")
    _, ascend = job_in(SAMPLES[1])
    assert f"/usr/local/bin/{ascend.python}" in text
