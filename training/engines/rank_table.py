"""HCCL's rank table, hccl.json: the server and the device of every rank.

Forms v1.0 and v1.2 as in CANN's HCCL user guide (cluster_info_config), with the fields of
MindCluster's hccl.json (hccl.json_file_description.md). All numbers in it are strings. The servers
of a super pod must stand together, whatever their ranks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perdure.training.config.recovery import RankTableForm
from perdure.training.wire.node import DeviceAddress, NodeDevices


@dataclass(frozen=True, slots=True)
class Server:
    """A node of the job; its place in the sequence is its node rank."""

    name: str
    host: str
    devices: NodeDevices


def rank_table(form: RankTableForm, servers: Sequence[Server]) -> str:
    """Write the rank table of a job as text."""
    entries, first_rank = [], 0
    for server in servers:
        entries.append((server, _entry(server, first_rank)))
        first_rank += len(server.devices.devices)
    pods = dict.fromkeys(server.devices.super_pod_id for server in servers)
    table: dict[str, Any] = {
        "status": "completed",
        "version": form.value.removeprefix("v"),
        "server_count": str(len(servers)),
        "server_list": [e for pod in pods for s, e in entries if s.devices.super_pod_id == pod],
    }
    if form is RankTableForm.V1_2:
        table["super_pod_list"] = [
            {
                "super_pod_id": pod,
                "server_list": [
                    {"server_id": s.name} for s in servers if s.devices.super_pod_id == pod
                ],
            }
            for pod in pods
        ]
    return json.dumps(table, indent=2)


def _entry(server: Server, first_rank: int) -> dict[str, Any]:
    devices = enumerate(server.devices.devices, first_rank)
    return {
        "server_id": server.name,
        "host_ip": server.host,
        "device": [_device(address, rank) for rank, address in devices],
    }


def _device(address: DeviceAddress, rank: int) -> dict[str, str]:
    device = {"device_id": str(address.device_id), "device_ip": address.device_ip}
    if address.super_device_id is not None:
        device["super_device_id"] = address.super_device_id
    if address.backup_device_ip is not None:
        device["backup_device_ip"] = address.backup_device_ip
    return {**device, "rank_id": str(rank)}
