"""MindCluster's ConfigMaps on a real API server: what they take out gets no pod, what they
report is evidence."""

from __future__ import annotations

import json
import logging
import time

import pytest

from perdure.training.diagnosis.classify import diagnose
from perdure.training.diagnosis.evidence import Evidence, NodeOutput
from perdure.training.engines.base import ANY_NODE
from perdure.training.engines.kubernetes.api import connect
from perdure.training.engines.kubernetes.fault_feed import FaultFeed, exclusions
from perdure.training.engines.registry import platform_checks
from perdure.training.errors import NoCapacity
from perdure.training.recovery.chip_events import ChipReport
from perdure.training.recovery.chips import ChipLevel
from perdure.training.recovery.faults import FaultClass
from perdure.training.wire.node import CheckOutcome
from tests.jobs import small_job
from tests.kubernetes.accounts import NEEDED, kubeconfig_of, role
from tests.kubernetes.bare import PLACE_S, placement
from tests.kubernetes.runs import Deed, node_of
from tests.waiting import wait_for

CODE = "80E18402"
DEVICES, CLUSTER = "kube-system", "mindx-dl"


def config_map(name, **data):
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def chip_fault(chip, level, *, at_s):
    told = {CODE: {"fault_time": int(at_s * 1000), "fault_level": level}}
    fault = {
        "fault_type": "CardUnhealthy", "npu_name": chip, "large_model_fault_level": level,
        "fault_level": level, "fault_handling": level, "fault_code": CODE,
        "fault_time_and_level_map": told,
    }  # fmt: skip
    return {
        "huawei.com/Ascend910": "", "huawei.com/Ascend910-Fault": json.dumps([fault]),
        "huawei.com/Ascend910-NetworkUnhealthy": "", "huawei.com/Ascend910-Unhealthy": chip,
    }  # fmt: skip


def device_info(devices):
    info = {"DeviceList": devices, "UpdateTime": int(time.time())}
    return json.dumps({"DeviceInfo": info, "SuperPodID": -2, "ServerIndex": -2, "CheckCode": ""})


@pytest.fixture(scope="module")
def clusterd(cluster):
    """ClusterD's namespace."""
    cluster.kubectl("create", "namespace", CLUSTER)
    yield
    cluster.kubectl("delete", "namespace", CLUSTER)


@pytest.fixture
def report(cluster, clusterd):
    """Writes a ConfigMap of MindCluster's; afterwards it is gone."""
    written = []

    def write(space, name, **data):
        document = config_map(name, **data)
        document["metadata"]["namespace"] = space
        cluster.create(document)
        written.append((space, name))

    yield write
    for space, name in written:
        cluster.kubectl("delete", "configmap", name, "--namespace", space)


def nodes_of(engine):
    return {contact.node for contact in engine.contacts().values()}


@pytest.mark.timeout(PLACE_S + 300)
def test_a_node_with_a_bad_chip_is_not_chosen_and_one_that_gets_one_is_evidence(
    report, engine, caplog
):
    bad = chip_fault("Ascend910-3", "SeparateNPU", at_s=time.time())
    report(DEVICES, "mindx-dl-deviceinfo-n1", DeviceInfoCfg=device_info(bad))
    made = engine()
    with caplog.at_level(logging.WARNING, logger="perdure.engine"):
        made.submit(placement("n1", ANY_NODE))  # where its member was before
    assert nodes_of(made) == {"n2", "n3"}
    assert "n1 gets no new pods, MindCluster reports Ascend910-3: SeparateNPU" in caplog.text
    began_s = time.time()
    assert not made.texts(began_s)
    bad = chip_fault("Ascend910-4", "SeparateNPU", at_s=began_s + 1)
    report(DEVICES, "mindx-dl-deviceinfo-n2", DeviceInfoCfg=device_info(bad))
    outputs = [
        NodeOutput(node, one.name, one.text, device=one.device) for node, one in made.texts(began_s)
    ]
    fault = diagnose(Evidence(began_s + 5, 3, outputs=outputs)).fault
    assert (fault.node, fault.device, fault.code) == ("n2", 4, CODE)
    assert fault.fault_class is FaultClass.DEVICE_MEMORY_ERROR
    assert not made.texts(began_s + 60)
    (chip,) = made.chip_reports(began_s)
    assert chip == ChipReport("n2", 4, CODE, ChipLevel.SEPARATE, "MindCluster")
    assert not made.chip_reports(began_s + 60)


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(900)
def test_a_chip_that_mindcluster_separates_costs_a_training_run_its_node_at_once(runs, report):
    def separates(run):
        bad = chip_fault("Ascend910-1", "SeparateNPU", at_s=time.time())
        name = f"mindx-dl-deviceinfo-{node_of(run, 1)}"
        report(DEVICES, name, DeviceInfoCfg=device_info(bad))

    watch = {"sample_every_s": 1.0}
    job = runs.job("separated", steps=300, watch=watch)
    played = runs.run(job, Deed(separates, ends_attempt=False))
    assert played.outcome.ended == "completed"
    assert played.answers == [("device_memory_error", "node_replace")]
    (evidence,) = played.evidence
    assert CODE in evidence
    (lost,) = played.history.isolated
    assert lost not in {member.node for member in played.history.placements[-1].members}
    assert played.leftovers == []


@pytest.mark.timeout(PLACE_S + 300)
def test_the_reports_can_be_ignored(report, engine):
    bad = chip_fault("Ascend910-4", "SeparateNPU", at_s=time.time())
    report(DEVICES, "mindx-dl-deviceinfo-n1", DeviceInfoCfg=device_info(bad))
    made = engine(mindcluster=False, nodes=1)
    made.submit(placement("n1"))
    assert nodes_of(made) == {"n1"}
    assert not made.texts(0.0)


def test_a_cluster_whose_reports_leave_too_few_nodes_says_which_and_why(report, engine):
    down = {"FaultDevList": [], "NodeStatus": "UnHealthy"}
    text = json.dumps({f"mindx-dl-nodeinfo-{node}": down for node in ("n1", "n2")})
    fine = json.dumps({"mindx-dl-deviceinfo-n3": {"DeviceList": {}, "CmName": "x"}})
    report(CLUSTER, "cluster-info-node-cm", **{"cluster-info-node-cm": text})
    report(CLUSTER, "cluster-info-device-0", **{"cluster-info-device-0": fine})
    made = engine(place_timeout_s=8)
    with pytest.raises(NoCapacity, match=r"MindCluster reports .*n1: the node: NodeUnhealthy; n2"):
        made.submit(placement(ANY_NODE, ANY_NODE))
    assert not made.inventory()


def test_preflight_counts_a_node_that_is_taken_out_as_missing(
    report, lab, namespace, tmp_path, monkeypatch
):
    monkeypatch.setenv("KUBECONFIG", str(lab.kubeconfig))
    bad = chip_fault("Ascend910-4", "PreSeparateNPU", at_s=time.time())
    report(DEVICES, "mindx-dl-deviceinfo-n1", DeviceInfoCfg=device_info(bad))
    section = {"kind": "kubernetes", "image": lab.image, "namespace": namespace, "nodes": 3}
    store, batch = {"address": "s3://bucket/runs"}, {"global_batch_size": 48}
    job = small_job(tmp_path, engine=section, storage=store, batch=batch)
    (room,) = (one for one in platform_checks(job) if one.name == "nodes")
    assert room.outcome is CheckOutcome.FAILED
    assert "n1: MindCluster reports Ascend910-4: PreSeparateNPU" in room.seen


def test_without_the_right_to_read_the_reports_one_line_says_so(
    report, cluster, namespace, create, tmp_path, monkeypatch, caplog
):
    bad = chip_fault("Ascend910-4", "SeparateNPU", at_s=time.time())
    report(DEVICES, "mindx-dl-deviceinfo-n1", DeviceInfoCfg=device_info(bad))
    create(*role(NEEDED))
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig_of(cluster, namespace, tmp_path)))
    feed = FaultFeed(connect(context=None, namespace=namespace))
    with caplog.at_level(logging.INFO, logger="perdure.engine"):
        assert not exclusions(feed.of_cluster(["n1", "n2"]))
        assert not exclusions(feed.of_run(["n1", "n2"]))
    (line,) = (record for record in caplog.records if record.name == "perdure.engine")
    assert line.levelno == logging.INFO
    assert "not all of MindCluster's reports are there" in line.getMessage()


def test_a_damaged_report_speaks_against_nobody(report, cluster, namespace, monkeypatch, caplog):
    report(DEVICES, "mindx-dl-deviceinfo-n1", DeviceInfoCfg="{}", ManuallySeparateNPU="")
    report(CLUSTER, "cluster-info-device-0", **{"cluster-info-device-0": "[1"})
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    feed = FaultFeed(connect(context=None, namespace=namespace))
    found = wait_for(lambda: feed.of_run(["n1"]), what="an answer")
    assert found == {"n1": []}
    assert "DeviceInfoCfg of mindx-dl-deviceinfo-n1 cannot be read" in caplog.text
    assert "cluster-info-device-0 cannot be read" in caplog.text
