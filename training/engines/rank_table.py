"""HCCL's rank table, hccl.json: the server and the device of every rank.

Forms v1.0 and v1.2 as in CANN's HCCL user guide (cluster_info_config), with the fields of
MindCluster's hccl.json (hccl.json_file_description.md). All numbers in it are strings. The servers
of a super pod must stand together, whatever their ranks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perdure.training.config.recovery import RankTableForm
from perdure.training.wire.node import DeviceAddress, NodeDevices

_log = logging.getLogger("perdure.engine")


@dataclass(frozen=True, slots=True)
class Server:
    """A node of the job; its place in the sequence is its node rank."""

    name: str
    host: str
    devices: NodeDevices


def rank_table(
    form: RankTableForm, servers: Sequence[Server], *, sp_block: int | None = None
) -> str:
    """Write the rank table of a job as text.

    Args:
        form: its form.
        servers: in order of their node ranks.
        sp_block: chips of a block of ranks that should be in one super pod; None: no blocks.
    """
    if form is RankTableForm.V1_2 and sp_block is not None:
        for line in split_blocks(servers, sp_block):
            _log.warning(f"sp_block={sp_block}: {line}")
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


def split_blocks(servers: Sequence[Server], sp_block: int) -> list[str]:
    """Name the blocks of ranks whose servers lie in several super pods.

    HCCL connects super pods by RoCE, which is slower than the links inside of them.

    Args:
        servers: in order of their node ranks.
        sp_block: chips of a block, a multiple of a server's.
    """
    pods: dict[int, dict[str, None]] = {}
    rank = 0
    for server in servers:
        pods.setdefault(rank // sp_block, {})[server.devices.super_pod_id or "unknown"] = None
        rank += len(server.devices.devices)
    return [
        f"ranks {block * sp_block} to {(block + 1) * sp_block - 1} are in super pods "
        f"{' and '.join(names)}"
        for block, names in pods.items()
        if len(names) > 1
    ]


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
