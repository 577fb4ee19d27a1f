"""MindCluster's documents come down to faults of chips and nodes, and those to evidence."""

from __future__ import annotations

import json
import logging

import pytest

from perdure.training.diagnosis.classify import diagnose
from perdure.training.diagnosis.evidence import Evidence, NodeOutput
from perdure.training.engines.kubernetes import mindcluster
from perdure.training.engines.kubernetes.fault_feed import chip_reports, exclusions, fault_logs
from perdure.training.recovery.chip_events import ChipReport
from perdure.training.recovery.chips import ChipLevel
from perdure.training.recovery.faults import FaultClass, RecoverableBy

NODE = "n1"
CONFIG_MAP = "mindx-dl-deviceinfo-n1"
CPU = "0000001D"
BEGAN_S = 1_760_000_000.0
BEGAN_MS = 1_760_000_000_000


def chip_fault(
    chip: str, codes: dict[str, str], *, kind: str = "CardUnhealthy", at: int = BEGAN_MS
):
    """A fault of a chip, with the level of each code."""
    level = next(iter(codes.values()))
    times_and_levels = {
        code: {"fault_time": at, "fault_level": level} for code, level in codes.items()
    }
    return {
        "fault_type": kind, "npu_name": chip, "large_model_fault_level": level,
        "fault_level": level, "fault_handling": level, "fault_code": ",".join(codes),
        "fault_time_and_level_map": times_and_levels,
    }  # fmt: skip


def device_list(*faults, unhealthy: str = "", network: str = "") -> dict[str, str]:
    return {
        "huawei.com/Ascend910": "Ascend910-1",
        "huawei.com/Ascend910-Fault": json.dumps(faults),
        "huawei.com/Ascend910-NetworkUnhealthy": network,
        "huawei.com/Ascend910-Recovering": "",
        "huawei.com/Ascend910-Unhealthy": unhealthy,
    }


def device_info(*faults, by_hand: str = "", **lists) -> list[mindcluster.ReportedFault]:
    document = {
        "DeviceInfo": {"DeviceList": device_list(*faults, **lists), "UpdateTime": 1_760_000_001},
        "SuperPodID": -2, "ServerIndex": -2, "CheckCode": "0" * 64,
    }  # fmt: skip
    data = {"DeviceInfoCfg": json.dumps(document), "ManuallySeparateNPU": by_hand}
    return mindcluster.device_info(data, CONFIG_MAP)


def evidence_of(faults, *, since_s: float = BEGAN_S, chips=()):
    return [*fault_logs(faults, since_s=since_s, chips=chips)]


def fault_of(faults):
    outputs = [NodeOutput(NODE, o.name, o.text, device=o.device) for o in evidence_of(faults)]
    return diagnose(Evidence(BEGAN_S + 60, 7, outputs=outputs)).fault


def test_a_chip_has_each_of_its_codes_with_its_own_level_and_time():
    faults = device_info(
        chip_fault("Ascend910-4", {"80E18402": "SeparateNPU", "80E18401": "NotHandleFault"})
    )
    assert [(f.chip, f.code, f.level, f.since_s, f.takes_out) for f in faults] == [
        (4, "80E18402", "SeparateNPU", BEGAN_S, True),
        (4, "80E18401", "NotHandleFault", BEGAN_S, False),
    ]


@pytest.mark.parametrize(
    ("level", "takes_out"),
    [
        ("NotHandleFault", False),
        ("SubHealthFault", False),
        ("RestartRequest", False),
        ("RestartBusiness", False),
        ("FreeRestartNPU", False),
        ("RestartNPU", False),
        ("PreSeparateNPU", True),
        ("SeparateNPU", True),
        ("ManuallySeparateNPU", True),
    ],
)
def test_a_chip_takes_its_node_out_where_nothing_new_may_be_put_on_it(level, takes_out):
    nodes_out = exclusions({NODE: device_info(chip_fault("Ascend910-4", {"80C98000": level}))})
    assert bool(nodes_out) is takes_out
    if takes_out:
        assert nodes_out[NODE] == f"Ascend910-4: {level} 80C98000 since 2025-10-09T08:53:20+00:00"


def test_chips_that_are_listed_without_a_code_take_their_node_out():
    faults = device_info(unhealthy="Ascend910-2,Ascend910-3", network="Ascend910-5")
    assert exclusions({NODE: faults})[NODE] == (
        "Ascend910-5: CardNetworkUnhealthy; Ascend910-2: CardUnhealthy; Ascend910-3: CardUnhealthy"
    )


def test_a_listed_chip_that_only_restarts_keeps_its_node():
    fault = chip_fault("Ascend910-2", {"80C98000": "RestartBusiness"})
    assert not exclusions({NODE: device_info(fault, unhealthy="Ascend910-2")})


def test_a_chip_that_was_separated_by_hand_takes_its_node_out():
    assert exclusions({NODE: device_info(by_hand="Ascend910-6")}) == {
        NODE: "Ascend910-6: ManuallySeparateNPU"
    }


def test_a_public_fault_has_its_time_in_seconds():
    fault = chip_fault(
        "Ascend910-0", {"220001001": "SeparateNPU"}, kind="PublicFault", at=1_760_000_005
    )
    (reported,) = device_info(fault)
    assert reported.since_s == BEGAN_S + 5


def test_codes_of_the_containers_chips_are_reports_with_mindclusters_own_level():
    levels = {"80E01801": "SeparateNPU", "80E18401": "NotHandleFault", "80C98000": "New"}
    faults = device_info(
        chip_fault("Ascend910-4", levels), chip_fault("Ascend910-5", {"80E18402": "SeparateNPU"})
    )
    reports = [*chip_reports(NODE, faults, since_s=BEGAN_S, chips=(2, 4))]
    assert reports == [
        ChipReport(NODE, 1, "80E01801", ChipLevel.SEPARATE, "MindCluster"),
        ChipReport(NODE, 1, "80C98000", None, "MindCluster"),
    ]
    assert [*chip_reports(NODE, faults, since_s=BEGAN_S + 60, chips=(2, 4))] == []
    assert [*chip_reports(NODE, device_info(unhealthy="Ascend910-4"), since_s=0, chips=())] == []


def node_document(status: str, *parts) -> dict[str, object]:
    return {"FaultDevList": list(parts) or None, "NodeStatus": status}


def node_part(level: str) -> dict[str, object]:
    return {"DeviceType": "CPU", "DeviceId": 0, "FaultCode": [CPU], "FaultLevel": level}


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (node_document("Healthy"), None),
        (node_document("Healthy", node_part("NotHandleFault")), None),
        (
            node_document("Healthy", node_part("PreSeparateFault")),
            "CPU 0: PreSeparateFault 0000001D",
        ),
        (node_document("UnHealthy", node_part("SeparateFault")), "CPU 0: SeparateFault " + CPU),
        (node_document("UnHealthy"), "the node: NodeUnhealthy"),
    ],
)
def test_a_node_is_out_when_its_own_parts_take_it_out(document, why):
    data = {"NodeInfo": json.dumps({"NodeInfo": document, "CheckCode": "0" * 64})}
    nodes_out = exclusions({NODE: mindcluster.node_info(data, "mindx-dl-nodeinfo-n1")})
    assert nodes_out.get(NODE) == why


def test_a_fault_of_the_node_began_when_its_document_was_written():
    document = {"NodeInfo": node_document("UnHealthy", node_part("SeparateFault"))}
    data = {"NodeInfo": json.dumps(document), "updateTime": "2025-10-09T08:53:20Z"}
    (fault,) = mindcluster.node_info(data, "mindx-dl-nodeinfo-n1")
    assert fault.since_s == BEGAN_S


def switch(level: str, status: str) -> dict[str, object]:
    code = "[0x00f103b0,155649,na,na]"
    event = {"EventType": 4, "AssembledFaultCode": code, "SwitchChipId": 1, "SwitchPortId": 2}
    return {
        "FaultCode": [json.dumps(event)], "FaultLevel": level, "UpdateTime": 1_760_000_000,
        "NodeStatus": status,
        "FaultTimeAndLevelMap": {f"{code}_1_2": {"fault_time": BEGAN_MS, "fault_level": level}},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("level", "status", "is_out"),
    [
        ("NotHandle", "Healthy", False),
        ("SubHealthFault", "SubHealthy", False),
        ("RestartRequest", "UnHealthy", True),
        ("Separate", "UnHealthy", True),
    ],
)
def test_the_status_of_a_switch_says_whether_its_node_is_out(level, status, is_out):
    data = {"SwitchInfoCfg": json.dumps(switch(level, status))}
    nodes_out = exclusions({NODE: mindcluster.device_info(data, CONFIG_MAP)})
    assert (NODE in nodes_out) is is_out


def test_documents_of_the_whole_cluster_name_the_nodes():
    fault = chip_fault("Ascend910-4", {"80E18402": "SeparateNPU"})
    devices = json.dumps(
        {
            "mindx-dl-deviceinfo-n1": {"DeviceList": device_list(fault), "CmName": "x"},
            "mindx-dl-deviceinfo-n2": {"DeviceList": device_list(), "RackID": 3},
        }
    )
    nodes = json.dumps({"mindx-dl-nodeinfo-n2": node_document("UnHealthy")})
    switches = json.dumps({"mindx-dl-switchinfo-n3": switch("Separate", "UnHealthy")})
    assert list(exclusions(mindcluster.cluster_devices(devices, "d"))) == ["n1"]
    assert list(exclusions(mindcluster.cluster_nodes(nodes, "n"))) == ["n2"]
    assert list(exclusions(mindcluster.cluster_switches(switches, "s"))) == ["n3"]


@pytest.mark.parametrize(
    "data",
    [
        {"DeviceInfoCfg": "{"},
        {"DeviceInfoCfg": '{"DeviceInfo": 3}'},
        {"DeviceInfoCfg": '{"DeviceInfo": {"DeviceList": {"huawei.com/Ascend910-Fault": "nil"}}}'},
        {"SwitchInfoCfg": '{"FaultCode": [7]}'},
        {"SwitchInfoCfg": '{"FaultCode": ["x"]}'},
    ],
)
def test_a_damaged_document_is_a_warning_and_speaks_against_nobody(data, caplog):
    with caplog.at_level(logging.WARNING, logger="perdure.engine"):
        assert not mindcluster.device_info(data, CONFIG_MAP)
    (line,) = (record.getMessage() for record in caplog.records)
    assert CONFIG_MAP in line
    assert "cannot be read" in line


def test_an_unknown_level_is_a_warning_and_takes_nothing_out(caplog):
    with caplog.at_level(logging.WARNING, logger="perdure.engine"):
        faults = device_info(chip_fault("Ascend910-4", {"80C98000": "ExorciseNPU"}))
    assert not exclusions({NODE: faults})
    assert "'ExorciseNPU' of Ascend910-4 is not known" in caplog.text


def test_a_code_since_the_attempt_began_is_diagnosed_by_its_class():
    fault = fault_of(device_info(chip_fault("Ascend910-4", {"80E18402": "SeparateNPU"})))
    assert fault.fault_class is FaultClass.DEVICE_MEMORY_ERROR
    assert (fault.node, fault.device, fault.code) == (NODE, 4, "80E18402")
    assert fault.recoverable_by is RecoverableBy.ISOLATE


def test_what_the_tables_do_not_know_is_diagnosed_by_what_mindcluster_calls_it():
    fault = fault_of(device_info(chip_fault("Ascend910-4", {"11111111": "SeparateNPU"})))
    assert (fault.fault_class, fault.device) == (FaultClass.DEVICE_LOST, 4)
    public = chip_fault("Ascend910-3", {"999999999": "SeparateNPU"}, kind="PublicFault")
    fault = fault_of(device_info(public))
    assert (fault.fault_class, fault.recoverable_by) == (
        FaultClass.DEVICE_LOST,
        RecoverableBy.ISOLATE,
    )
    data = {"SwitchInfoCfg": json.dumps(switch("Separate", "UnHealthy"))}
    assert fault_of(mindcluster.device_info(data, CONFIG_MAP)).fault_class is FaultClass.NODE_LOST


def test_what_asks_for_nothing_is_no_cause():
    data = {"SwitchInfoCfg": json.dumps(switch("SubHealthFault", "SubHealthy"))}
    assert fault_of(mindcluster.device_info(data, CONFIG_MAP)).fault_class is FaultClass.UNKNOWN
    assert not evidence_of(device_info(chip_fault("Ascend910-4", {"80E18402": "NotHandleFault"})))


def test_a_fault_from_before_the_attempt_is_no_evidence():
    faults = device_info(chip_fault("Ascend910-4", {"80E18402": "SeparateNPU"}))
    assert evidence_of(faults, since_s=BEGAN_S + 0.5)
    assert not evidence_of(faults, since_s=BEGAN_S + 2)
    assert not evidence_of(device_info(unhealthy="Ascend910-2"))


def test_a_chip_of_somebody_else_is_no_evidence_and_our_own_is_counted_from_0():
    faults = device_info(chip_fault("Ascend910-5", {"80E18402": "SeparateNPU"}))
    assert not evidence_of(faults, chips=(0, 1, 2, 3))
    (text,) = evidence_of(faults, chips=(7, 6, 5, 4))
    assert text.device == 1
