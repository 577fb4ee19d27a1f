"""A wrong value of a cluster's section is one line that names the field, the value and why."""

from __future__ import annotations

from decimal import Decimal

import pytest

from perdure.training.config.engine import KubernetesEngineSpec
from perdure.training.config.pod_rules import amount_of
from perdure.training.errors import InputError
from perdure.training.preflight.job import check_job
from tests.jobs import small_job


def agent(**fields):
    return {"spec": {"containers": [{"name": "agent", **fields}]}}


def job(tmp_path, **section):
    return small_job(tmp_path, engine={"kind": "kubernetes", "image": "perdure:1", **section})


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({"resources": {"memory": "700 Gi"}}, "engine.resources: memory: '700 Gi' is no quantity"),
        ({"resources": {"cpu": 0}}, "engine.resources: cpu: '0' must be more than 0"),
        ({"resources": {"huawei.com/Ascend910": "7.5"}}, "'7.5' must be a whole number"),
        ({"resources": {"npu": 8}}, "'npu' is no resource such as cpu"),
        ({"shm_size": "64GB"}, "engine.shm_size: '64GB' is no quantity"),
        ({"namespace": "My_Space"}, "engine.namespace: 'My_Space' is no namespace"),
        ({"storage_secret": "Keys"}, "engine.storage_secret: 'Keys' is no name"),
        ({"env_secrets": ["a", "b!"]}, "engine.env_secrets.1: 'b!' is no name"),
        ({"volcano": {"queue": "Q 1"}}, "engine.volcano.queue: 'Q 1' is no name"),
        ({"node_selector": {"a/b/c": "1"}}, "'a/b/c' is no name of a label"),
        ({"node_selector": {"zone": "a b"}}, "zone='a b' is no value of a label"),
        ({"labels": {"perdure.io/run": "x"}}, "'perdure.io/run' is the engine's own"),
        ({"annotations": {"-x": "y"}}, "'-x' is no name of a label or annotation"),
        ({"tolerations": [{"effects": "NoSchedule"}]}, "'effects' is no field of a toleration"),
        ({"tolerations": [{"key": "a", "operator": "In"}]}, "'In' must be Equal or Exists"),
        ({"tolerations": [{"operator": "Equal"}]}, "without a key the operator must be Exists"),
        (
            {"volumes": [{"name": "shm", "mount_path": "/a", "source": {"emptyDir": {}}}]},
            "'shm' is a volume of the engine's own",
        ),
        (
            {"volumes": [{"name": "a", "mount_path": "/dev/shm/", "source": {"emptyDir": {}}}]},  # noqa: S108
            "'/dev/shm/' is the engine's own",
        ),
        ({"volumes": [{"name": "a", "mount_path": "/a", "source": {}}]}, "must be one kind"),
        ({"pod": {"spec": {"restartPolicy": "Always"}}}, "spec.restartPolicy cannot be replaced"),
        ({"pod": {"spec": None}}, "spec.restartPolicy cannot be replaced"),
        ({"pod": agent(command=["sh"])}, "command of container agent cannot be replaced"),
        ({"pod": {"spec": {"containers": [{"image": "x"}]}}}, "spec.containers cannot be replaced"),
        ({"pod": {"spec": {"containers": None}}}, "spec.containers cannot be replaced"),
        ({"pod": {"spec": {"tolerations": []}}}, "use engine.tolerations"),
        ({"pod": {"spec": {"affinity": {"nodeAffinity": {}}}}}, "isolated nodes are excluded"),
        ({"pod": {"spec": {"affinity": None}}}, "cannot be replaced: isolated nodes"),
        ({"pod": {"spec": {"volumes": [{"name": "scratch"}]}}}, "scratch in spec.volumes"),
        ({"pod": agent(volumeMounts=[{"mountPath": "/a"}])}, "volumeMounts of container agent"),
        ({"pod": {"metadata": {"labels": {}}}}, "use engine.labels"),
    ],
)
def test_a_wrong_value_is_refused_with_its_reason(tmp_path, section, line):
    with pytest.raises(InputError) as raised:
        job(tmp_path, **section)
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_does_not_touch_the_engines_own_may_be_merged_in():
    overlay = {
        "metadata": {"annotations": {"example.com/team": "llm"}},
        "spec": {
            "hostIPC": True,
            "affinity": {"podAffinity": {}},
            "containers": [
                {"name": "agent", "securityContext": {"privileged": True}},
                {"name": "exporter", "image": "exporter:1", "command": ["exporter"]},
            ],
            "volumes": [{"name": "corpus", "emptyDir": {}}],
        },
    }
    spec = KubernetesEngineSpec(
        image="perdure:1",
        pod=overlay,
        resources={
            "huawei.com/Ascend910": 8,
            "cpu": "1500m",
            "memory": "700Gi",
            "hugepages-2Mi": "1Gi",
        },
        tolerations=({"operator": "Exists"}, {"key": "a", "value": "b", "effect": "NoExecute"}),
        node_selector={"topology.kubernetes.io/zone": "az_1", "empty": ""},
    )
    assert spec.pod == overlay


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("8", 8), ("1500m", Decimal("1.5")), ("700Gi", 700 * 2**30), ("1e3", 1000),
        ("2E", 2 * 10**18), (".5", Decimal("0.5")), ("3k", 3000), ("5u", Decimal("0.000005")),
    ],
)  # fmt: skip
def test_a_quantity_stands_for_a_number(text, amount):
    assert amount_of(text) == amount


PVC = {"persistentVolumeClaim": {"claimName": "store"}}


@pytest.mark.parametrize(
    ("mount", "source", "read_only", "is_there"),
    [
        ("", PVC, False, True),
        ("/..", PVC, False, True),
        ("", PVC, True, False),
        ("", {"emptyDir": {}}, False, False),
        ("/store2", PVC, False, False),
    ],
)
def test_a_folder_as_store_must_be_one_that_all_pods_share(
    tmp_path, monkeypatch, mount, source, read_only, is_there
):
    monkeypatch.setattr("perdure.training.preflight.job._check_engine", lambda _job: None)
    monkeypatch.setattr("perdure.training.preflight.job._check_data", lambda _job: None)
    path = f"{tmp_path}/store" if mount == "" else f"{tmp_path}{mount}"
    volume = {"name": "store", "mount_path": path, "source": source, "read_only": read_only}
    made = job(tmp_path, volumes=[volume])
    if is_there:
        check_job(made, with_storage=False)
        return
    with pytest.raises(InputError, match="the job's nodes do not have that folder"):
        check_job(made, with_storage=False)


def test_programs_and_folders_of_a_cluster_are_not_looked_for_on_this_machine(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("perdure.training.preflight.job._check_engine", lambda _job: None)
    worker = {"command": ["no-such-program"], "cwd": "/no/such/folder"}
    section = {"kind": "kubernetes", "image": "perdure:1"}
    made = small_job(
        tmp_path, worker=worker, engine=section, storage={"address": "s3://bucket/runs"}
    )
    check_job(made, with_storage=False)
    with pytest.raises(InputError, match=r"worker\.cwd"):
        check_job(small_job(tmp_path, worker=worker), with_storage=False)


def test_a_run_whose_name_can_be_no_objects_is_refused_on_a_cluster_alone():
    store = {"address": "s3://bucket/runs"}
    engine = {"kind": "kubernetes", "image": "perdure:1"}
    with pytest.raises(InputError, match="run_id=nightly- ends with '-'"):
        small_job(run_id="nightly-", engine=engine, storage=store)
    assert small_job(run_id="nightly-").run_id == "nightly-"
