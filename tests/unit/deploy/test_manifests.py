"""What `kubectl apply -k` sends: no field is misspelt, and the parts fit each other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from tests.kubernetes.schema import unknown_fields
from tests.unit.deploy.conftest import KUBERNETES, ROOT, documents_of

FOLDERS = sorted(
    str(path.parent.relative_to(KUBERNETES)) for path in KUBERNETES.rglob("kustomization.yaml")
)
ALL = "overlays/ascend"
# Prefect's own check wants them in the pod, where the API server drops them (3.8.8).
WANTED_BY_PREFECT = ["spec.template.spec.completions", "spec.template.spec.parallelism"]


def named(kind: str, name: str, folder: str = "base") -> dict[str, Any]:
    (found,) = (
        one for one in documents_of(folder)
        if one["kind"] == kind and one["metadata"]["name"] == name
    )  # fmt: skip
    return found


def job_template() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        named("ConfigMap", "perdure-job-template")["data"]["base-job-template.json"]
    )
    return found


def pod_specs(folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for one in documents_of(folder):
        if one["kind"] in ("Deployment", "StatefulSet"):
            yield one["metadata"]["name"], one["spec"]["template"]["spec"]
    manifest = job_template()["job_configuration"]["job_manifest"]
    yield "a flow run", manifest["spec"]["template"]["spec"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_object_has_a_field_that_the_api_server_would_drop(folder):
    found = documents_of(folder)
    assert found
    for one in found:
        assert unknown_fields(one) == [], f"{one['kind']} {one['metadata']['name']}"


def test_a_misspelt_field_is_found_in_core_objects_and_in_custom_ones():
    pod = {"containers": [{"name": "a", "imag": "b"}], "volumes": {"name": "c"}}
    assert unknown_fields({"apiVersion": "v1", "kind": "Pod", "spec": pod}) == [
        "spec.containers[0].imag", "spec.volumes is no list",
    ]  # fmt: skip
    env = [{"name": "A", "value": 8}]
    typed = {"containers": [{"name": "a", "env": env, "resources": {"limits": {"cpu": 8}}}]}
    assert unknown_fields({"apiVersion": "v1", "kind": "Pod", "spec": typed}) == [
        "spec.containers[0].env[0].value is no str"
    ]
    group = {"apiVersion": "scheduling.volcano.sh/v1beta1", "kind": "PodGroup"}
    assert unknown_fields({**group, "spec": {"minMembers": 2, "queue": "default"}}) == [
        "spec.minMembers"
    ]
    with pytest.raises(LookupError):
        unknown_fields({"apiVersion": "v9", "kind": "Pod"})


def test_the_job_of_a_flow_run_has_no_field_that_the_api_server_would_drop():
    manifest = job_template()["job_configuration"]["job_manifest"]
    texts = {"image", "namespace", "labels", "annotations", "command", "finished_job_ttl"}
    assert texts <= set(job_template()["variables"]["properties"]), "or nobody fills them in"
    # Placeholders of maps, lists and numbers are texts until they are filled in.
    metadata = {**manifest["metadata"], "labels": {}, "annotations": {}}
    spec = {**manifest["spec"], "ttlSecondsAfterFinished": 1}
    spec["template"]["spec"]["containers"][0]["args"] = []
    job = {**manifest, "metadata": metadata, "spec": spec}
    assert unknown_fields(job) == WANTED_BY_PREFECT


def test_a_flow_run_is_started_by_prefect_again_and_never_by_kubernetes():
    spec = job_template()["job_configuration"]["job_manifest"]["spec"]
    assert spec["backoffLimit"] == 0
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    # It has to give up its lease, or to end the pods of a run that was cancelled.
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] >= 60


def test_no_password_and_no_key_stands_in_a_manifest_but_by_reference():
    used = set()
    for one in documents_of(ALL):
        assert one["kind"] != "Secret", "the user makes the only one"
        for reference in re.findall(r'"secretKeyRef": ({.*?})', json.dumps(one)):
            secret = json.loads(reference)
            assert secret["name"] == "perdure"
            used.add(secret["key"])
    readme = (KUBERNETES / "README.md").read_text(encoding="utf-8")
    assert used | {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} == set(
        re.findall(r"--from-literal=([\w-]+)=", readme)
    )


@pytest.mark.parametrize("folder", ["base", ALL])
def test_every_pod_runs_as_a_user_without_rights_of_root(folder):
    for name, spec in pod_specs(folder):
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            locked = container["securityContext"]
            assert locked["allowPrivilegeEscalation"] is False, name
            assert locked["capabilities"] == {"drop": ["ALL"]}, name


def test_what_is_named_in_a_pod_is_there():
    maps = {one["metadata"]["name"] for one in documents_of(ALL) if one["kind"] == "ConfigMap"}
    accounts = {
        one["metadata"]["name"] for one in documents_of(ALL) if one["kind"] == "ServiceAccount"
    }
    for name, spec in pod_specs(ALL):
        asked = set(re.findall(r'"configMap(?:Ref)?": {"name": "([\w-]+)"}', json.dumps(spec)))
        assert asked <= maps, name
        account = spec["serviceAccountName"]
        assert account in accounts or account == "{{ service_account_name }}", name
        volumes = {one["name"] for one in spec.get("volumes", [])} | {"data"}
        for container in spec["containers"]:
            mounted = {one["name"] for one in container.get("volumeMounts", [])}
            assert mounted <= volumes, name


def allowed_into(name: str, folder: str = ALL) -> list[Mapping[str, str]]:
    """Labels of the pods that a NetworkPolicy lets in."""
    (rule,) = named("NetworkPolicy", name, folder)["spec"]["ingress"]
    return [one["podSelector"]["matchLabels"] for one in rule["from"]]


def test_the_database_and_redis_are_for_the_prefect_servers_alone():
    servers = [{"app.kubernetes.io/name": "perdure-prefect"}]
    assert allowed_into("perdure-postgres") == allowed_into("perdure-redis") == servers
    assert named("NetworkPolicy", "perdure-nobody", ALL)["spec"]["podSelector"] in ({}, None)


def test_policies_know_supervisors_and_agents_by_the_labels_that_they_have():
    supervisor = {"perdure.io/role": "supervisor"}
    assert supervisor in allowed_into("perdure-agents")
    assert supervisor in allowed_into("perdure-prefect")
    flow_run = job_template()["job_configuration"]["job_manifest"]["spec"]["template"]
    keeper = named("Deployment", "perdure-keeper")["spec"]["template"]
    for template in (flow_run, keeper):
        assert supervisor.items() <= template["metadata"]["labels"].items()


def deployments_of(place: str) -> list[dict[str, Any]]:
    """The deployments for a place in prefect.yaml."""
    document = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))
    return [one for one in document["deployments"] if one["name"] == place]


def test_a_machine_and_a_cluster_have_deployments_of_the_same_flows():
    flows = [one["entrypoint"] for one in deployments_of("local")]
    assert [one["entrypoint"] for one in deployments_of("cluster")] == flows
    assert {one["work_pool"]["name"] for one in deployments_of("local")} == {"perdure"}


def test_deployments_of_the_cluster_are_of_flows_that_are_there_and_of_pools_that_are_made():
    from perdure.flows import cluster

    deployments = deployments_of("cluster")
    for one in deployments:
        module, _, function = one["entrypoint"].rpartition(".")
        path = ROOT / f"{module.replace('.', '/')}.py"
        assert f"def {function}(" in path.read_text(encoding="utf-8")
        assert one["work_pool"]["name"] in (cluster.RUNS_POOL, cluster.KEEPER_POOL)
    assert len(deployments) == 5
    worker, keeper = named("Deployment", "perdure-worker"), named("Deployment", "perdure-keeper")
    assert cluster.RUNS_POOL in json.dumps(worker)
    assert cluster.KEEPER_POOL in json.dumps(keeper)


def test_the_worker_pod_fills_its_image_and_namespace_into_the_template():
    from perdure.flows.cluster import filled_in

    filled = filled_in(job_template(), image="registry/perdure:7", namespace="elsewhere")
    properties = filled["variables"]["properties"]
    assert properties["image"]["default"] == "registry/perdure:7"
    assert properties["namespace"]["default"] == "elsewhere"
    assert properties["labels"] == job_template()["variables"]["properties"]["labels"]


def test_flow_runs_are_loaded_from_the_folder_that_the_image_names():
    (folder,) = {
        one["pull"][0]["prefect.deployments.steps.set_working_directory"]["directory"]
        for one in deployments_of("cluster")
    }
    name = re.fullmatch(r"\{\{ \$(\w+) \}\}", folder)
    assert name is not None
    image = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    workdir = re.search(r"^WORKDIR (\S+)$", image, re.MULTILINE)
    assert workdir is not None
    assert f"ENV {name[1]}={workdir[1]}\n" in image


MANIFESTS = [path for path in KUBERNETES.rglob("*.yaml") if path.parent.name != "templates"]


@pytest.mark.parametrize("path", sorted(MANIFESTS), ids=lambda path: path.name)
def test_no_manifest_has_an_anchor(path):
    # kubectl 1.21 and 1.22 lose them (kustomize before 4.4.0, issue 3614).
    events = yaml.parse(path.read_text(encoding="utf-8"))
    assert [found for one in events if (found := getattr(one, "anchor", None))] == []
