"""What a job lacks in a real cluster is told without a pod, one line for each thing."""

from __future__ import annotations

import base64
import json

import pytest

from perdure.training.engines.registry import platform_checks
from perdure.training.wire.node import CheckOutcome
from tests.image_registry import MISSING, PASSWORD, PROGRAM, USER, Access, ImageRegistry
from tests.jobs import small_job
from tests.kubernetes.accounts import NEEDED, kubeconfig_of, role
from tests.kubernetes.conftest import absent

FAILED, SKIPPED, OK = CheckOutcome.FAILED, CheckOutcome.SKIPPED, CheckOutcome.OK
WARNING = CheckOutcome.WARNING


@pytest.fixture
def checks(cluster, namespace, tmp_path, monkeypatch):
    """The checks of a job, by name and how they came out."""
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))

    def run(**section):
        engine = {"kind": "kubernetes", "image": cluster.image, "namespace": namespace, **section}
        store, batch = {"address": "s3://bucket/runs"}, {"global_batch_size": 48}
        job = small_job(tmp_path, engine=engine, storage=store, batch=batch)
        return platform_checks(job)

    return run


def seen(checks, name, outcome):
    return [one.seen for one in checks if one.name == name and one.outcome is outcome]


def failures(checks):
    return [f"{one.name}: {one.seen}" for one in checks if one.outcome is FAILED]


def secret(name, **values):
    data = {key: base64.b64encode(text.encode()).decode() for key, text in values.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": data}


def claim(name, storage_class):
    spec = {
        "accessModes": ["ReadWriteMany"], "storageClassName": storage_class,
        "resources": {"requests": {"storage": "1Mi"}},
    }  # fmt: skip
    return {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name},
        "spec": spec,
    }  # fmt: skip


def volume(name):
    source = {"persistentVolumeClaim": {"claimName": name}}
    return {"name": name, "mount_path": f"/{name}", "source": source}


def test_a_job_that_has_all_it_needs_passes_and_no_pod_was_started(
    cluster, namespace, create, checks
):
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    create(secret("keys", **keys), secret("wandb", TOKEN="t"))
    found = checks(
        nodes=2, spares=1, storage_secret="keys", env_secrets=["wandb"], service_account="default",
        priority_class="system-node-critical", resources={"cpu": "100m"},
    )  # fmt: skip
    assert not failures(found)
    assert seen(found, "storage_secret", OK) == ["keys"]
    assert not cluster.get("pods", "--namespace", namespace)["items"]


def test_everything_that_is_named_and_not_there_has_its_line(create, checks):
    create(secret("half", AWS_ACCESS_KEY_ID="a"))
    found = checks(
        nodes=1, spares=0, storage_secret="half", env_secrets=["nothing"],
        image_pull_secrets=["registry"], service_account="nobody", priority_class="urgent",
        volumes=[volume("corpus")],
    )  # fmt: skip
    assert failures(found) == [
        "service_account: nobody does not exist",
        "priority_class: urgent does not exist",
        "image_pull_secret: registry does not exist",
        "env_secret: nothing does not exist",
        "storage_secret: half has no AWS_SECRET_ACCESS_KEY",
        "volume_claim: corpus does not exist",
    ]


def test_a_namespace_that_is_not_there_is_all_that_is_said(checks):
    (check,) = checks(namespace="no-such-place")
    assert check.seen == "no-such-place does not exist"


def test_a_claim_that_nothing_binds_is_a_failure(create, checks):
    create(claim("corpus", "no-such-class"))
    (line,) = failures(checks(nodes=1, spares=0, volumes=[volume("corpus")]))
    assert line == "volume_claim: corpus is Pending, its storage class is no-such-class"


@pytest.mark.parametrize(
    ("resource", "verb"),
    [("pods", "delete"), ("secrets", "patch"), ("configmaps", "get"), ("pods/portforward", "get")],
)
def test_a_right_that_lacks_is_named(
    cluster, namespace, create, checks, tmp_path, monkeypatch, resource, verb
):
    rights = {**NEEDED, resource: [one for one in NEEDED[resource] if one != verb]}
    create(*role(rights))
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig_of(cluster, namespace, tmp_path)))
    found = checks(nodes=1, spares=0, reach="port_forward")
    (line,) = failures(found)
    assert line.startswith(f"rights: may not {verb} {resource} in {namespace}: ")
    notes = " ".join(seen(found, "rights", SKIPPED))
    assert "list nodes" in notes
    assert "list events" in notes
    (room,) = seen(found, "nodes", SKIPPED)
    assert room == "this process may not read them: how many have room is unknown"
    assert "may not get ConfigMaps mindx-dl-deviceinfo-*" in seen(found, "mindcluster", SKIPPED)[0]


def test_with_the_rights_of_a_plain_job_nothing_fails(
    cluster, namespace, create, checks, tmp_path, monkeypatch
):
    create(*role(NEEDED))
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig_of(cluster, namespace, tmp_path)))
    assert not failures(checks(nodes=1, spares=0, reach="port_forward"))
    (line,) = failures(checks(nodes=1, spares=0, reach="direct", cordon=True))[:1]
    assert line.startswith("rights: may not patch nodes: engine.cordon")


def test_fewer_nodes_than_the_job_and_its_spares_need(cluster, checks):
    size = len(cluster.ready_nodes())
    found = checks(nodes=size, spares=1)
    assert not failures(found)
    (line,) = seen(found, "nodes", WARNING)
    assert line.startswith(f"{size} of ")
    (line,) = failures(checks(nodes=1, spares=0, resources={"example.com/warp": 8}))
    assert "example.com/warp not offered of 8" in line
    (line,) = failures(checks(nodes=1, spares=0, node_selector={"zone": "nowhere"}))
    assert "no label zone=nowhere (none)" in line


def test_nodes_that_offer_too_little_say_how_much(lab, checks):
    assert not failures(checks(nodes=2, spares=1, resources={"huawei.com/Ascend910": 8}))
    (line,) = failures(checks(nodes=1, spares=0, resources={"huawei.com/Ascend910": 16}))
    assert "n1: huawei.com/Ascend910 8 of 16" in line


def test_volcano_needs_its_queue_and_a_class_of_pod_groups(lab, checks):
    found = failures(checks(nodes=1, spares=0, volcano={"queue": "no-such-queue"}))
    assert found == ["volcano: queue no-such-queue does not exist"]


def test_without_the_class_of_pod_groups_there_is_no_volcano(checks, monkeypatch):
    from perdure.training.engines.kubernetes import cluster_checks
    from perdure.training.engines.kubernetes.api import Resource

    # The lab has Volcano's classes: one of another version is what a cluster without them shows.
    absent = Resource("scheduling.volcano.sh", "v9", "podgroups")
    monkeypatch.setattr(cluster_checks, "POD_GROUPS", absent)
    (line,) = failures(checks(nodes=1, spares=0, volcano={}))
    assert line.endswith("no Volcano")


def test_an_image_that_all_nodes_have_needs_no_registry(checks):
    (line,) = seen(checks(nodes=1, spares=0), "image", OK)
    assert "has been pulled on" in line


def test_a_registry_that_is_not_reached_from_here_is_a_note(checks):
    found = checks(nodes=1, spares=0, image="127.0.0.1:9/none:1")
    assert not failures(found)
    (line,) = seen(found, "image", SKIPPED)
    assert "could not be asked for from here; nodes may reach 127.0.0.1:9" in line


@pytest.fixture
def registry(tmp_path):
    """Starts registries that tests reach."""
    if PROGRAM is None:
        absent(MISSING)
    started = []

    def start(access):
        started.append(ImageRegistry(tmp_path / access, access))
        return started[-1]

    yield start
    for one in started:
        one.end()


def pull_secret(name, registry, password):
    users = {"auths": {registry.address: {"username": USER, "password": password}}}
    document = secret(name, **{".dockerconfigjson": json.dumps(users)})
    return document | {"type": "kubernetes.io/dockerconfigjson"}


def test_whether_an_image_is_there_is_known_from_its_registry(cluster, namespace, checks, registry):
    image = registry(Access.ALL).push("team/perdure", "1")
    found = checks(nodes=1, spares=0, image=image)
    assert not failures(found)
    assert "is in its registry" in seen(found, "image", OK)[0]
    (line,) = failures(checks(nodes=1, spares=0, image=f"{image}0"))
    assert line.startswith(f"image: {image}0 is not in its registry: ")
    assert not cluster.get("pods", "--namespace", namespace)["items"]


@pytest.mark.parametrize("access", [Access.PASSWORD, Access.TOKEN])
def test_a_registry_that_wants_a_user_is_asked_with_the_pull_secret(
    create, checks, registry, access
):
    closed = registry(access)
    image = closed.push("team/perdure", "1")
    create(
        pull_secret("right", closed, PASSWORD), pull_secret("wrong", closed, "battery-staple"),
        secret("other"),
    )  # fmt: skip

    def outcome(*names):
        found = checks(nodes=1, spares=0, image=image, image_pull_secrets=names)
        assert PASSWORD not in str(found)
        assert "battery-staple" not in str(found)
        (one,) = (check for check in found if check.name == "image")
        return one.outcome, one.seen

    assert outcome("right")[0] is OK
    assert outcome("wrong", "right")[0] is OK
    is_so, text = outcome("wrong")
    assert is_so is FAILED
    assert "with the pull secret wrong" in text
    is_so, text = outcome("other")
    assert is_so is WARNING
    assert "the pull secret other has nothing for it" in text
    is_so, text = outcome()
    assert is_so is WARNING
    assert "names no pull secret" in text


def test_the_pull_secrets_of_the_account_count_where_the_job_has_none(create, checks, registry):
    closed = registry(Access.PASSWORD)
    image = closed.push("team/perdure", "1")
    create(
        pull_secret("right", closed, PASSWORD),
        {
            "apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "agent"},
            "imagePullSecrets": [{"name": "right"}],
        },
    )  # fmt: skip
    found = checks(nodes=1, spares=0, image=image, service_account="agent")
    assert "is in its registry" in seen(found, "image", OK)[0]


def test_a_pull_secret_that_may_not_be_read_is_a_note(
    cluster, namespace, create, checks, registry, tmp_path, monkeypatch
):
    closed = registry(Access.PASSWORD)
    image = closed.push("team/perdure", "1")
    rights = {**NEEDED, "secrets": [one for one in NEEDED["secrets"] if one != "get"]}
    create(*role(rights), pull_secret("right", closed, PASSWORD))
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig_of(cluster, namespace, tmp_path)))
    found = checks(nodes=1, spares=0, image=image, image_pull_secrets=["right"])
    (line,) = seen(found, "image", SKIPPED)
    assert "without the pull secret right, not to be read" in line


def test_a_cluster_that_does_not_answer_is_one_line(cluster, checks, tmp_path, monkeypatch):
    text = cluster.kubectl("config", "view", "--raw", "--flatten", "--minify")
    path = tmp_path / "kubeconfig"
    server = next(line for line in text.splitlines() if "server:" in line)
    path.write_text(text.replace(server, "    server: https://127.0.0.1:9"), encoding="utf-8")
    monkeypatch.setenv("KUBECONFIG", str(path))
    (line,) = failures(checks())
    assert line.startswith("cluster: the API server cannot be reached: ")
    assert "\n" not in line
