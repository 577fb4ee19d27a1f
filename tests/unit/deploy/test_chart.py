"""The Helm chart: the same objects as kustomize makes, and what each value changes in them."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import yaml

from tests.helm import CHART, helm
from tests.kubernetes.schema import unknown_fields
from tests.unit.deploy.conftest import documents_of
from tests.values import not_none

Document = dict[str, Any]
Key = tuple[str, str, str]
ALL_OPTIONS = ("nodes-read", "cordon", "mindcluster", "volcano", "monitoring")
POSTGRES = "externalPostgresql.host"


@cache
def rendered(*settings: str, namespace: str = "perdure") -> dict[Key, Document]:
    """The objects of the chart with `--set` of these settings."""
    options = [part for setting in settings for part in ("--set", setting)]
    done = helm("template", "perdure", str(CHART), "--namespace", namespace, *options)
    assert done.returncode == 0, done.stderr
    return _by_key(
        document for document in yaml.load_all(done.stdout, yaml.CSafeLoader) if document
    )


def _by_key(documents: Any) -> dict[Key, Document]:
    keyed = [
        ((d["kind"], d["metadata"].get("namespace", ""), d["metadata"]["name"]), d)
        for d in documents
    ]
    assert len(dict(keyed)) == len(keyed), "no object is there twice"
    return dict(keyed)


def _pods(documents: dict[Key, Document]) -> dict[str, Document]:
    """The specs of all pods that the chart's objects make, those of flow runs with them."""
    pods = {
        key[2]: document["spec"]["template"]["spec"]
        for key, document in documents.items()
        if key[0] in ("Deployment", "StatefulSet")
    }
    (template,) = (d for key, d in documents.items() if key[2] == "perdure-job-template")
    job = json.loads(template["data"]["base-job-template.json"])["job_configuration"]
    return pods | {"flow run": job["job_manifest"]["spec"]["template"]["spec"]}


def _comparable(document: Document) -> Document:
    """Without what the chart says in other words: order of variables, addresses with namespace."""
    text = json.dumps(document)
    text = text.replace("http://perdure-prefect.perdure:4200", "http://perdure-prefect:4200")
    copied: Document = json.loads(text)
    for key, value in copied.get("data", {}).items():
        if key.endswith(".json"):
            copied["data"][key] = json.loads(value)
    for container in (
        copied.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])
    ):
        container.get("env", []).sort(key=lambda variable: variable["name"])
        for variable in container.get("env", []):
            if variable.get("value") == "$(PERDURE_NAMESPACE)":
                variable["value"] = "perdure"
    return copied


@pytest.mark.parametrize(
    ("folder", "settings"),
    [
        ("base", ("image=perdure",)),
        ("overlays/two-servers", ("image=perdure", "servers=2")),
        *((f"options/{name}", ("image=perdure", f"options.{name}=true")) for name in ALL_OPTIONS),
    ],
)
def test_the_chart_makes_what_kustomize_makes(folder, settings):
    chart = rendered(*settings)
    for key, document in _by_key(documents_of(folder)).items():
        if key[0] == "Namespace":
            continue  # `helm install --create-namespace` makes it
        if key[1] != "perdure":  # of the whole cluster, or in a namespace of others
            ours = chart[key[0], key[1], f"{key[2]}-perdure"]
            assert ours.get("rules") == document.get("rules")
            assert ours.get("subjects") == document.get("subjects")
            continue
        assert _comparable(chart[key]) == _comparable(document), key


def test_without_options_the_chart_makes_no_more_than_the_base():
    base = {key for key in _by_key(documents_of("base")) if key[0] != "Namespace"}
    assert set(rendered()) == base


def test_no_object_of_the_chart_has_a_field_that_the_api_server_would_drop():
    options = tuple(f"options.{name}=true" for name in ALL_OPTIONS)
    values = ("servers=2", "storageClass=sfs", "priorityClass=high", "imagePullSecrets={swr}")
    for key, document in rendered(*options, *values, "namespaces={team-a,team-b}").items():
        assert unknown_fields(document) == [], key


def test_all_objects_are_in_the_namespace_of_the_release():
    places = {key[1] for key in rendered("servers=2", namespace="mlops")}
    assert places == {"mlops"}
    client = rendered(namespace="mlops")["ConfigMap", "mlops", "perdure-prefect-client"]
    assert client["data"]["PREFECT_API_URL"] == "http://perdure-prefect.mlops:4200/api"


def test_images_of_a_private_registry_and_their_pull_secrets():
    chart = rendered(
        "image=swr/perdure:7", "postgresImage=swr/postgres:16", "redisImage=swr/redis:7",
        "imagePullSecrets={swr,other}", "servers=2",
    )  # fmt: skip
    images = {
        container["image"]
        for name, pod in _pods(chart).items() if name != "flow run"
        for container in [*pod.get("initContainers", []), *pod["containers"]]
    }  # fmt: skip
    assert images == {"swr/perdure:7", "swr/postgres:16", "swr/redis:7"}
    accounts = [document for key, document in chart.items() if key[0] == "ServiceAccount"]
    assert len(accounts) == 4
    for account in accounts:
        assert account["imagePullSecrets"] == [{"name": "swr"}, {"name": "other"}]


def test_a_database_of_the_site_takes_the_place_of_the_own_one():
    chart = rendered(f"{POSTGRES}=pg.example.com", "externalPostgresql.port=5433")
    assert not [key for key in chart if key[2] == "perdure-postgres"]
    data = chart["ConfigMap", "perdure", "perdure-prefect-server"]["data"]
    assert data["PREFECT_SERVER_DATABASE_HOST"] == "pg.example.com"
    assert data["PREFECT_SERVER_DATABASE_PORT"] == "5433"
    assert data["PREFECT_SERVER_DATABASE_NAME"] == "prefect"


def test_the_claim_has_the_storage_class_and_size_of_the_site():
    (claim,) = rendered("storageClass=sfs", "storageSize=50Gi")[
        "StatefulSet", "perdure", "perdure-postgres"
    ]["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "sfs"
    assert claim["spec"]["resources"]["requests"]["storage"] == "50Gi"
    (default,) = rendered()["StatefulSet", "perdure", "perdure-postgres"]["spec"][
        "volumeClaimTemplates"
    ]
    assert "storageClassName" not in default["spec"], 'class "" would bind to no provisioner'


def test_endpoint_and_region_of_the_store_reach_supervisors_and_the_keeper():
    url = "https://obs.cn-north-4.myhuaweicloud.com"
    chart = rendered(f"store.endpoint={url}", "store.region=cn-north-4", "namespaces={team-a}")
    for namespace in ("perdure", "team-a"):
        data = chart["ConfigMap", namespace, "perdure-prefect-client"]["data"]
        assert (data["AWS_ENDPOINT_URL"], data["AWS_REGION"]) == (url, "cn-north-4")


def test_the_priority_class_is_that_of_every_pod_and_of_flow_runs():
    pods = _pods(rendered("priorityClass=high", "servers=2"))
    assert {pod["priorityClassName"] for pod in pods.values()} == {"high"}
    assert not any("priorityClassName" in pod for pod in _pods(rendered()).values())


@pytest.mark.parametrize("settings", [(), ("servers=2", "namespaces={team-a}")])
def test_every_pod_fits_the_pod_security_level_restricted(settings):
    for name, pod in _pods(rendered(*settings)).items():
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        kinds = {kind for volume in pod.get("volumes", []) for kind in volume if kind != "name"}
        assert kinds <= {"emptyDir", "configMap", "secret"}, name
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            locked = container["securityContext"]
            assert locked["allowPrivilegeEscalation"] is False, name
            assert locked["capabilities"] == {"drop": ["ALL"]}, name


def _subjects(chart: dict[Key, Document], key: Key) -> set[tuple[str, str]]:
    return {(one["name"], one["namespace"]) for one in chart[key]["subjects"]}


def test_a_team_has_rights_in_its_own_namespace_alone():
    chart = rendered("namespaces={team-a,team-b}", namespace="mlops")
    keeper = ("perdure-supervisor", "mlops")
    for team in ("team-a", "team-b"):
        binding = ("RoleBinding", team, "perdure-supervisor")
        assert _subjects(chart, binding) == {("perdure-supervisor", team), keeper}
        assert _subjects(chart, ("RoleBinding", team, "perdure-worker")) == {
            ("perdure-worker", "mlops")
        }
    assert _subjects(chart, ("RoleBinding", "mlops", "perdure-supervisor")) == {keeper}
    assert not [key for key in chart if key[0].startswith("Cluster")]


def test_rights_in_the_whole_cluster_are_those_of_all_supervisors_that_are_asked_for():
    chart = rendered("namespaces={team-a}", "options.nodes-read=true", namespace="mlops")
    key = ("ClusterRoleBinding", "", "perdure-nodes-read-mlops")
    assert {place for _, place in _subjects(chart, key)} == {"mlops", "team-a"}
    role = chart["ClusterRole", "", chart[key]["roleRef"]["name"]]
    assert role["rules"][0]["verbs"] == ["get", "list", "watch"]


def test_supervisors_of_a_team_reach_prefect_and_the_keeper_reaches_their_agents():
    chart = rendered("namespaces={team-a}", namespace="mlops")

    def namespaces(namespace: str, name: str) -> list[str | None]:
        (rule,) = chart["NetworkPolicy", namespace, name]["spec"]["ingress"]
        selectors = [peer.get("namespaceSelector") for peer in rule["from"]]
        name_label = "kubernetes.io/metadata.name"
        return [one and one["matchLabels"][name_label] for one in selectors]

    assert namespaces("mlops", "perdure-prefect") == [None, None, "team-a"]
    assert namespaces("team-a", "perdure-agents") == [None, None, "mlops"]
    assert namespaces("mlops", "perdure-agents") == [None, None]


def test_the_worker_watches_the_jobs_of_all_namespaces():
    worker = rendered("namespaces={team-a,team-b}", namespace="mlops")[
        "Deployment", "mlops", "perdure-worker"
    ]
    env = worker["spec"]["template"]["spec"]["containers"][0]["env"]
    (watched,) = (one["value"] for one in env if "OBSERVER_NAMESPACES" in one["name"])
    assert watched == "mlops,team-a,team-b"


def test_an_option_that_does_not_exist_is_refused():
    done = helm("template", "perdure", str(CHART), "--set", "options.volcanoes=true")
    assert done.returncode != 0
    assert "options.volcanoes: no such option" in done.stderr


def test_the_secret_that_the_notes_ask_for_is_that_of_the_readme():
    readme = (CHART / "README.md").read_text(encoding="utf-8")
    notes = (CHART / "templates/NOTES.txt").read_text(encoding="utf-8")
    lines = [line for line in readme.splitlines() if "--from-literal" in line]
    assert lines
    assert all(line.strip().removesuffix(" \\") in notes for line in lines)


def test_the_version_of_the_chart_is_that_of_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    project = (CHART.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{not_none(chart["version"])}"\n' in project
    assert chart["appVersion"] == chart["version"]
