"""The files that MindCluster mounts, in the forms of its own documents."""

from __future__ import annotations

import json

import pytest

from perdure.training.agent.evidence import read_reset_codes
from perdure.training.config.recovery import RankTableForm
from perdure.training.recovery.chips import ChipLevel
from perdure.training.telemetry import device_addresses, mounted_files
from perdure.training.telemetry.device_addresses import check_rank_table, devices_reply
from perdure.training.telemetry.mounted_files import (
    mounted_devices,
    mounted_rank_table,
    reset_codes,
    super_pod_of,
)
from perdure.training.telemetry.sampling import Sampler
from perdure.training.wire.node import CheckOutcome, DevicesQuery
from tests.unit.telemetry.driver_tools import only_tools_of

HERE = "192.168.149.2"  # the address of this pod


def server(number: int, devices=range(2), *, in_super_pod=False, **names):
    return {
        "server_id": f"host-{number}",
        "host_ip": f"10.0.0.{number}",
        "container_ip": f"192.168.149.{number}",
        "hardware_type": "800I-A3-64G",
        **names,
        "device": [
            {
                "device_id": str(device),
                "device_ip": f"10.1.{number}.{device}",
                "rank_id": str(2 * number + at),
                **({"super_device_id": str(37748736 + device)} if in_super_pod else {}),
            }
            for at, device in enumerate(devices)
        ],
    }


def table_of(*servers, version="1.0", status="completed", **more):
    return {
        "status": status,
        "server_list": list(servers),
        "server_count": str(len(servers)),
        "version": version,
        **more,
    }


def super_pods(*servers):
    pods = [{"super_pod_id": "0", "server_list": [{"server_id": s["server_id"]} for s in servers]}]
    return table_of(*servers, version="1.2", super_pod_list=pods)


@pytest.fixture
def mount(tmp_path, monkeypatch):
    """Put a document where MindCluster mounts it."""
    places = {"hccl.json": tmp_path / "hccl.json", "reset.json": tmp_path / "reset.json"}
    monkeypatch.setattr(mounted_files, "RANK_TABLES", (places["hccl.json"],))
    monkeypatch.setattr(mounted_files, "RESET_FILE", places["reset.json"])
    monkeypatch.setattr(device_addresses, "HCCN_CONF", tmp_path / "hccn.conf")
    monkeypatch.delenv("RANK_TABLE_FILE", raising=False)
    monkeypatch.setenv("POD_IP", HERE)

    def write(name, document):
        text = document if isinstance(document, str) else json.dumps(document)
        places[name].write_text(text)
        return places[name]

    return write


def ask(form=RankTableForm.V1_0, slots=2, visible=""):
    return devices_reply(DevicesQuery(form=form, slots=slots, visible=visible), "node-0")


def test_a_container_without_hccn_conf_has_its_addresses_from_the_mounted_table(mount):
    mount("hccl.json", table_of(server(1), server(2), server(3)))
    reply = ask()
    assert reply.devices is not None
    assert [(d.device_id, d.device_ip) for d in reply.devices.devices] == [
        (0, "10.1.2.0"),
        (1, "10.1.2.1"),
    ]
    check = check_rank_table(DevicesQuery(form=RankTableForm.V1_0, slots=2), "node-0")
    assert (check.outcome, check.seen) == (CheckOutcome.OK, "0: 10.1.2.0, 1: 10.1.2.1")


def test_the_drivers_own_file_comes_before_the_mounted_table(mount, tmp_path):
    mount("hccl.json", table_of(server(2)))
    (tmp_path / "hccn.conf").write_text("address_0=192.168.100.1\n")
    reply = ask(slots=1)
    assert reply.devices is not None
    assert reply.devices.devices[0].device_ip == "192.168.100.1"


def test_a_super_pod_comes_with_the_ports_of_the_other_dies(mount):
    mount("hccl.json", super_pods(server(1, in_super_pod=True), server(2, in_super_pod=True)))
    reply = ask(RankTableForm.V1_2)
    assert reply.devices is not None
    assert reply.devices.super_pod_id == "0"
    assert [(d.super_device_id, d.backup_device_ip) for d in reply.devices.devices] == [
        ("37748736", "10.1.2.1"),
        ("37748737", "10.1.2.0"),
    ]


def test_devices_that_the_workers_see_are_chosen_by_their_physical_numbers(mount):
    mount("hccl.json", table_of(server(2, devices=(4, 5, 6, 7))))
    reply = ask(visible="7,4")
    assert reply.devices is not None
    assert [device.device_id for device in reply.devices.devices] == [7, 4]
    assert ask(visible="3,4").error.endswith("hccl.json does not have device 3 for host-2")
    assert ask(slots=5).error.endswith("hccl.json does not have 5 devices for host-2")


@pytest.mark.parametrize("field", ["container_ip", "host_ip", "server_id"])
def test_a_server_is_known_by_any_of_its_names(tmp_path, field):
    path = tmp_path / "hccl.json"
    path.write_text(json.dumps(table_of(server(1), server(2, **{field: "10.9.9.9"}))))
    devices = mounted_devices(path, 2, "", ["10.9.9.9"], with_super_pod=False)
    assert devices.devices[0].device_ip == "10.1.2.0"


def test_two_containers_of_a_host_are_told_apart_by_their_own_addresses(tmp_path):
    path = tmp_path / "hccl.json"
    servers = [server(1, host_ip="10.0.0.9"), server(2, host_ip="10.0.0.9")]
    path.write_text(json.dumps(table_of(*servers)))
    names = ["10.0.0.9", "192.168.149.2"]
    devices = mounted_devices(path, 2, "", names, with_super_pod=False)
    assert devices.devices[0].device_ip == "10.1.2.0"


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (table_of(server(2), status="initializing"), "is initializing: Ascend Operator"),
        ({"status": "initializing"}, "is initializing"),
        ({"status": "completed", "version": "2.0", "rank_list": []}, "of version 2.0 lists no"),
        (table_of(server(5), server(6)), "does not say which of its 2 servers this is"),
        ("{", "JSON: Invalid JSON"),
        (table_of({"server_id": "host-2"}), "server_list.0.device: Field required"),
    ],
)
def test_a_table_that_does_not_help_is_named_with_the_reason(mount, document, words):
    mount("hccl.json", document)
    assert words in ask().error


def test_a_table_without_super_pods_serves_no_form_that_has_them(mount):
    mount("hccl.json", table_of(server(2)))
    assert ask(RankTableForm.V1_2).error.endswith("has no super pod for host-2")


def test_the_table_that_the_environment_names_comes_first(mount, tmp_path):
    mounted = mount("hccl.json", table_of(server(2)))
    other = tmp_path / "own.json"
    other.write_text("{}")
    assert mounted_rank_table({"RANK_TABLE_FILE": str(other)}) == other
    assert mounted_rank_table({"RANK_TABLE_FILE": "/missing"}) == mounted
    assert mounted_rank_table({}) == mounted


def test_the_super_pod_of_a_server_is_in_the_table(mount):
    path = mount("hccl.json", super_pods(server(1), server(2)))
    assert super_pod_of(path, "host-2") == "0"
    assert super_pod_of(path, "host-9") is None
    assert super_pod_of(None, "host-2") is None


def at_fault(rank: int, policy="reset", *, status="unrecovered", **code):
    code = code or {"ErrorCode": [2162168833], "ErrorCodeHex": "80E01801"}
    return {"RankId": rank, "LogicId": 0, "Status": status, "Policy": policy, **code}


def reset_of(*ranks):
    return {"RankList": list(ranks), "UpdateTime": 1, "RetryTime": 0, "FaultFlushing": False,
            "GracefulExit": 0, "RestartFaultProcess": False}  # fmt: skip


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (at_fault(4), {0: [("80E01801", ChipLevel.RESET_NOW)]}),
        (at_fault(5, "isolate"), {1: [("80E01801", ChipLevel.SEPARATE)]}),
        (at_fault(5, "restart_request", ErrorCode=[2160689152]),
         {1: [("80C98000", ChipLevel.RESTART_REQUEST)]}),
        (at_fault(4, "restart", ErrorCodeHex="80c98000,80cb8000"),
         {0: [("80C98000", ChipLevel.RESTART_JOB), ("80CB8000", ChipLevel.RESTART_JOB)]}),
        (at_fault(4, "new_word", ErrorCodeHex="0x80E01801"), {0: [("80E01801", None)]}),
        (at_fault(3), {}),
        (at_fault(4, status="recovered"), {}),
        (at_fault(4, "empty"), {}),
        (at_fault(4, ErrorCode=[], ErrorCodeHex=""), {}),
    ],
    ids=["this node", "its second device", "decimal", "two codes", "a policy that is new",
         "another node", "recovered", "no fault", "no code"],
)  # fmt: skip
def test_codes_of_this_nodes_chips_are_read_from_reset_json(mount, rank, expected):
    mount("hccl.json", table_of(server(1), server(2)))
    mount("reset.json", reset_of(rank))
    codes = reset_codes(2)
    assert {d: [(c.code, c.level) for c in of] for d, of in codes.items()} == expected


def test_without_a_table_nobody_knows_whose_chip_it_is(mount):
    mount("reset.json", reset_of(at_fault(4)))
    with pytest.raises(ValueError, match="says which ranks are this node's"):
        reset_codes(2)
    assert list(read_reset_codes(2)) == []


def test_an_empty_report_and_a_missing_one_have_no_codes(mount):
    assert reset_codes(2) == {}
    mount("reset.json", {"RankList": None})
    assert reset_codes(2) == {}


def test_the_codes_are_in_the_sample_and_in_the_evidence(mount, tmp_path, monkeypatch):
    only_tools_of(tmp_path / "bin", monkeypatch)
    mount("hccl.json", table_of(server(1), server(2)))
    mount("reset.json", reset_of(at_fault(5)))
    sample = Sampler(tmp_path, 2).take_sample()
    assert [[c.code for c in d.platform_codes] for d in sample.devices] == [[], ["80E01801"]]
    assert [(log.name, log.device, log.text) for log in read_reset_codes(2)] == [
        ("reset.json", 1, "device 1: fault_code: 80E01801, level reset_now"),
    ]


def test_a_report_that_is_torn_is_a_gap_of_the_sample(mount, tmp_path, monkeypatch):
    only_tools_of(tmp_path / "bin", monkeypatch)
    mount("reset.json", '{"RankList": [')
    assert any("reset.json: JSON" in gap for gap in Sampler(tmp_path, 2).take_sample().gaps)
