"""HCCL's rank table, and where the addresses in it come from."""

from __future__ import annotations

import json

import pytest

from perdure.training.config.recovery import RankTableForm
from perdure.training.engines.base import plan
from perdure.training.engines.fleet import Fleet
from perdure.training.engines.local import LocalEngine
from perdure.training.engines.rank_table import Server, rank_table, split_blocks
from perdure.training.errors import EngineError
from perdure.training.telemetry import device_addresses
from perdure.training.telemetry.device_addresses import add_backups, add_super_pod, read_ports
from perdure.training.telemetry.npu_smi import Chip
from perdure.training.telemetry.vendor_tools import read_assignments
from perdure.training.wire.agent import StartOrder
from perdure.training.wire.node import NodeDevices, device_ids
from tests.jobs import small_job

# As the driver keeps it.
HCCN_CONF = """
address_0=192.168.100.101
netmask_0=255.255.255.0
address_1=192.168.100.102
netmask_1=255.255.255.0
"""
SPOD_INFO = """
    SDID                           : {}
    Super Pod Size                 : 384
    Super Pod ID                   : {}
    Server Index                   : 4
"""


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "hccn.conf"
    path.write_text(HCCN_CONF)
    return read_assignments(path)


def chip(number: int) -> Chip:
    """Two of them are on a card."""
    return Chip(number // 2, number % 2, number, "Ascend910", "OK", None, None, None, 0, 0)


def of_pod(lines, pod: str, first: int) -> NodeDevices:
    def said(command) -> str:
        assert command[:4] == ["npu-smi", "info", "-t", "spod-info"]
        return SPOD_INFO.format(first + 2 * int(command[5]) + int(command[7]), pod)

    devices = add_backups(read_ports(lines, (0, 1)), lines)
    return add_super_pod(devices, [chip(0), chip(1)], said)


def test_the_form_of_clusters_has_every_device_with_its_rank(lines):
    devices = NodeDevices(devices=read_ports(lines, (0, 1)))
    servers = [Server("node-0", "10.0.0.1", devices), Server("node-1", "10.0.0.2", devices)]
    table = json.loads(rank_table(RankTableForm.V1_0, servers))
    second = table["server_list"].pop()
    assert table == {
        "status": "completed",
        "version": "1.0",
        "server_count": "2",
        "server_list": [
            {
                "server_id": "node-0",
                "host_ip": "10.0.0.1",
                "device": [
                    {"device_id": "0", "device_ip": "192.168.100.101", "rank_id": "0"},
                    {"device_id": "1", "device_ip": "192.168.100.102", "rank_id": "1"},
                ],
            }
        ],
    }
    assert second["server_id"] == "node-1"
    assert [device["rank_id"] for device in second["device"]] == ["2", "3"]


def test_the_form_of_super_pods_has_the_servers_of_one_together(lines):
    pods = [of_pod(lines, "7", 10), of_pod(lines, "8", 30), of_pod(lines, "7", 20)]
    servers = [Server(f"node-{i}", "10.0.0.1", pod) for i, pod in enumerate(pods)]
    table = json.loads(rank_table(RankTableForm.V1_2, servers))
    assert table["version"] == "1.2"
    assert [server["server_id"] for server in table["server_list"]] == [
        "node-0",
        "node-2",
        "node-1",
    ]
    assert table["super_pod_list"] == [
        {"super_pod_id": "7", "server_list": [{"server_id": "node-0"}, {"server_id": "node-2"}]},
        {"super_pod_id": "8", "server_list": [{"server_id": "node-1"}]},
    ]
    devices = [d for server in table["server_list"] for d in server["device"]]
    assert [device["backup_device_ip"] for device in devices] == [
        "192.168.100.102",
        "192.168.100.101",
    ] * 3
    assert [device["super_device_id"] for device in devices] == ["10", "11", "20", "21", "30", "31"]
    assert [device["rank_id"] for device in devices] == ["0", "1", "4", "5", "2", "3"]


def test_a_die_whose_other_die_has_no_address_has_no_backup(lines):
    backups = add_backups(read_ports({**lines, "address_6": "a6"}, (0, 6)), lines)
    assert [device.backup_device_ip for device in backups] == ["192.168.100.102", None]
    devices = NodeDevices(devices=backups)
    table = json.loads(rank_table(RankTableForm.V1_2, [Server("node-0", "10.0.0.1", devices)]))
    assert "backup_device_ip" not in table["server_list"][0]["device"][1]


@pytest.mark.parametrize(
    ("pods", "sp_block", "lines_of_blocks"),
    [
        ("7788", 4, []),
        ("7878", 4, ["ranks 0 to 3 are in super pods 7 and 8",
                     "ranks 4 to 7 are in super pods 7 and 8"]),
        ("7778", 4, ["ranks 4 to 7 are in super pods 7 and 8"]),
        ("7888", 8, ["ranks 0 to 7 are in super pods 7 and 8"]),
        ("7787", 2, []),
    ],
)  # fmt: skip
def test_blocks_of_ranks_that_lie_in_several_super_pods_are_named(
    lines, caplog, pods, sp_block, lines_of_blocks
):
    servers = [
        Server(f"node-{i}", "10.0.0.1", of_pod(lines, pod, 10 * i)) for i, pod in enumerate(pods)
    ]
    assert split_blocks(servers, sp_block) == lines_of_blocks
    rank_table(RankTableForm.V1_2, servers, sp_block=sp_block)
    assert caplog.messages == [f"sp_block={sp_block}: {line}" for line in lines_of_blocks]


@pytest.mark.parametrize("none", ["4294967295", "-1", "-2", "0xFFFFFFFF", ""])
def test_a_driver_that_knows_no_super_pod_is_told(lines, none):
    said = SPOD_INFO.format(1, none)
    with pytest.raises(ValueError, match="shows no SDID and Super Pod ID"):
        add_super_pod(read_ports(lines, (0,)), [chip(0)], lambda _: said)


def test_what_is_not_known_is_named(lines):
    assert list(device_ids(2, "")) == [0, 1]
    assert device_ids(2, "4,6,7") == [4, 6]
    assert device_ids(2, " 4, 6") == [4, 6]
    with pytest.raises(ValueError, match="ASCEND_RT_VISIBLE_DEVICES=4 has fewer than 2"):
        device_ids(2, "4")
    with pytest.raises(ValueError, match="ASCEND_RT_VISIBLE_DEVICES=0-7 is no list"):
        device_ids(2, "0-7")
    with pytest.raises(ValueError, match=r"/etc/hccn.conf has no address_2"):
        read_ports(lines, (0, 2))
    with pytest.raises(ValueError, match="npu-smi info shows no device 1"):
        add_super_pod(read_ports(lines, (0, 1)), [chip(0)], lambda _: SPOD_INFO.format(1, 1))
    with pytest.raises(ValueError, match="spod-info -i 0 -c 0 shows no SDID"):
        add_super_pod(read_ports(lines, (0, 1)), [chip(0), chip(1)], lambda _: "not supported")


def test_an_agent_without_the_addresses_says_so_before_anything_starts(tmp_path):
    assert not device_addresses.HCCN_CONF.exists(), "this machine has NPUs"
    job = small_job(
        tmp_path,
        worker={"command": ["true"]},
        comm={"rank_table": "v1.0"},
        engine={"nodes": 1, "spares": 0},
    )
    engine = Fleet(LocalEngine(job, home=tmp_path / "home", epoch=1), job, epoch=1)
    try:
        engine.submit(plan(engine.nodes(), 1, previous=None, avoid=()))
        order = StartOrder(
            placement=1, attempt=1, num_nodes=1, slots_per_node=2, hosts=(), master_addr="",
            master_port=0, command=("true",), is_command=True, is_launcher=True,
            cwd=str(tmp_path), grace_s=1, log_path=None, variables={},
            job=job, data_manifest_key=None, failover_grace_s=1,
        )  # fmt: skip
        words = r"comm.rank_table=v1.0 cannot be written, node-0: /etc/hccn.conf has no address_0"
        with pytest.raises(EngineError, match=words):
            engine.start(order)
    finally:
        engine.cancel(0)
