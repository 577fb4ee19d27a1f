"""The files that MindCluster mounts into a container: hccl.json and reset.json.

Ascend Operator writes the rank table of the platform's job, the device plugin the chips at fault
with its answer to each (Ascend/mind-cluster at 22bb3d987bc0: hccl.json_file_description.md,
api/ascend_device_plugin.md, pkg/common/proto.go). Both may be mounted at more than one place. Other
programs write them, so that unknown fields are skipped. Pure but for reading the files.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from perdure.training.recovery.chips import ChipLevel
from perdure.training.wire.node import ChipCode, DeviceAddress, NodeDevices, device_ids

RANK_TABLE_FILE = "RANK_TABLE_FILE"
RANK_TABLES = (
    Path("/user/serverid/devindex/config/hccl.json"),
    Path("/user/mindx-dl/ranktable/hccl.json"),
)
RESET_FILE = Path("/user/restore/reset/config/reset.json")
COMPLETED = "completed"
# Addresses of the container or its host, in pods of MindCluster and on ModelArts.
_ADDRESS_VARIABLES = ("HOST_IP", "XDL_IP", "POD_IP", "MA_CURRENT_IP")
_NO_SUPER_POD = frozenset({"-1", "-2", "4294967295", "0xffffffff"})  # the driver knows none
_CODE = re.compile(r"(?:0x)?([0-9A-Fa-f]{6,})")
# The device plugin's words for the answer to a fault.
_LEVELS: Mapping[str, ChipLevel] = {
    "ignore": ChipLevel.NOT_HANDLED,
    "restart_request": ChipLevel.RESTART_REQUEST,
    "restart": ChipLevel.RESTART_JOB,
    "free_reset": ChipLevel.RESET_WHEN_IDLE,
    "reset": ChipLevel.RESET_NOW,
    "isolate": ChipLevel.SEPARATE,
}


class _Document(BaseModel):
    """A document of another program; see the module's docstring."""

    model_config = ConfigDict(frozen=True, extra="ignore", coerce_numbers_to_str=True)


class _Device(_Document):
    device_id: int
    device_ip: str = ""
    rank_id: int
    super_device_id: str | None = None
    backup_device_ip: str | None = None


class _Server(_Document):
    server_id: str
    host_ip: str = ""
    container_ip: str = ""
    device: tuple[_Device, ...]


class _ServerName(_Document):
    server_id: str


class _SuperPod(_Document):
    super_pod_id: str
    server_list: tuple[_ServerName, ...]


class RankTableDocument(_Document):
    """A rank table of the forms v1.0 and v1.2; the form v2.0 has no servers."""

    status: str = COMPLETED
    version: str = ""
    server_list: tuple[_Server, ...] = ()
    super_pod_list: tuple[_SuperPod, ...] = ()

    @property
    def super_pods(self) -> dict[str, str]:
        """Super pods by the name of the server."""
        return {
            server.server_id: pod.super_pod_id
            for pod in self.super_pod_list
            for server in pod.server_list
        }


class _RankAtFault(_Document):
    RankId: int
    Status: str = ""
    Policy: str = ""
    ErrorCode: tuple[int, ...] | None = None
    ErrorCodeHex: str = ""

    @property
    def codes(self) -> tuple[str, ...]:
        """Its codes, as the code book writes them."""
        codes = _CODE.findall(self.ErrorCodeHex) or [f"{code:X}" for code in self.ErrorCode or ()]
        return tuple(code.upper() for code in codes)


class _ResetInfo(_Document):
    RankList: tuple[_RankAtFault, ...] | None = Field(None)


_Read = TypeVar("_Read", bound=_Document)


def mounted_rank_table(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the rank table of the platform's job; None where none is mounted."""
    named = environment.get(RANK_TABLE_FILE)
    places = (*([Path(named)] if named else []), *RANK_TABLES)
    return next((place for place in places if place.is_file()), None)


def read_rank_table(path: Path) -> RankTableDocument:
    """Read a rank table.

    Raises:
        ValueError: it cannot be read, or is not complete.
    """
    table = _read(RankTableDocument, path)
    if table.status != COMPLETED:
        raise ValueError(f"{path} is {table.status}: Ascend Operator has not completed it")
    if not table.server_list:
        raise ValueError(f"{path} of version {table.version or 'unknown'} lists no servers")
    return table


def mounted_devices(
    path: Path, slots: int, visible: str, names: Sequence[str], *, with_super_pod: bool
) -> NodeDevices:
    """Read the devices of this node from the platform's rank table.

    Args:
        path: the table.
        slots: number of devices that the job uses on the node.
        visible: their physical numbers; empty: the first of the table.
        names: of this node and its addresses.
        with_super_pod: whether their places in a super pod are needed.

    Raises:
        ValueError: the table does not have them.
    """
    table = read_rank_table(path)
    server = _server_of(table, path, names)
    devices = {device.device_id: device for device in server.device}
    in_order = sorted(server.device, key=lambda device: device.rank_id)
    wanted = device_ids(slots, visible) if visible else [d.device_id for d in in_order][:slots]
    missing = [number for number in wanted if number not in devices]
    if missing or len(wanted) < slots:
        lacks = f"device {missing[0]}" if missing else f"{slots} devices"
        raise ValueError(f"{path} does not have {lacks} for {server.server_id}")
    pod = table.super_pods.get(server.server_id)
    if with_super_pod and (pod is None or any(d.super_device_id is None for d in in_order)):
        raise ValueError(f"{path} has no super pod for {server.server_id}")
    return NodeDevices(
        devices=tuple(
            _place(devices, devices[number]) if with_super_pod else _address(devices[number])
            for number in wanted
        ),
        super_pod_id=pod if with_super_pod else None,
    )


def _address(device: _Device) -> DeviceAddress:
    return DeviceAddress(device_id=device.device_id, device_ip=device.device_ip)


def _place(devices: Mapping[int, _Device], device: _Device) -> DeviceAddress:
    """Return a device with its place in a super pod."""
    other = devices.get(other_die(device.device_id))
    backup = device.backup_device_ip or (other.device_ip if other is not None else None)
    places = {"super_device_id": device.super_device_id, "backup_device_ip": backup or None}
    return _address(device).model_copy(update=places)


def other_die(device_id: int) -> int:
    """Return the other device of the same chip, in a super pod: 0 and 1, 2 and 3, and so on."""
    return device_id ^ 1


def _server_of(table: RankTableDocument, path: Path, names: Sequence[str]) -> _Server:
    if len(table.server_list) == 1:
        return table.server_list[0]
    # Several containers may be on one host, so that the container's own address comes first.
    for field in ("container_ip", "host_ip", "server_id"):
        matches = [server for server in table.server_list if getattr(server, field) in names]
        if len(matches) == 1:
            return matches[0]
    raise ValueError(f"{path} does not say which of its {len(table.server_list)} servers this is")


def local_names(node: str) -> tuple[str, ...]:
    """List the names and addresses of this node and container."""
    addresses = [a.address for of in psutil.net_if_addrs().values() for a in of]
    variables = [os.environ[name] for name in _ADDRESS_VARIABLES if os.environ.get(name)]
    # Every node has the addresses of its loopback.
    outer = [a for a in addresses if not a.startswith("127.") and a != "::1"]
    return (*([node] if node else []), socket.gethostname(), *variables, *outer)


def is_super_pod(super_pod_id: str) -> bool:
    """Whether an id is that of a super pod; the driver has numbers for none."""
    return bool(super_pod_id) and super_pod_id.lower() not in _NO_SUPER_POD


def super_pod_of(path: Path | None, server: str) -> str | None:
    """Read the super pod of a server from a rank table; None where the table has none."""
    if path is None:
        return None
    try:
        return read_rank_table(path).super_pods.get(server)
    except ValueError:
        return None


def reset_codes(num_devices: int) -> dict[int, tuple[ChipCode, ...]]:
    """Read the codes of this node's chips that have not recovered, by device.

    reset.json is about all ranks of the platform's job, and hccl.json tells which are this node's.

    Args:
        num_devices: devices of the node, from 0 on.

    Raises:
        ValueError: one of the two cannot be read.
    """
    if not RESET_FILE.is_file():
        return {}
    at_fault = [rank for rank in _read(_ResetInfo, RESET_FILE).RankList or () if _is_at_fault(rank)]
    if not at_fault:
        return {}
    table = mounted_rank_table()
    if table is None:
        raise ValueError(f"{RESET_FILE}: no hccl.json says which ranks are this node's")
    server = _server_of(read_rank_table(table), table, local_names(""))
    ranks = sorted(device.rank_id for device in server.device)[:num_devices]
    codes = {rank.RankId: tuple(_codes_of(rank)) for rank in at_fault}
    return {device: codes[rank] for device, rank in enumerate(ranks) if rank in codes}


def _is_at_fault(rank: _RankAtFault) -> bool:
    return rank.Status != "recovered" and rank.Policy != "empty" and bool(rank.codes)


def _codes_of(rank: _RankAtFault) -> Iterator[ChipCode]:
    for code in rank.codes:
        yield ChipCode(code=code, level=_LEVELS.get(rank.Policy))


def _read(form: type[_Read], path: Path) -> _Read:
    try:
        return form.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path}: {field or 'JSON'}: {first['msg']}") from error
