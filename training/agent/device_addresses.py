"""The addresses of a node's devices: /etc/hccn.conf, and in a super pod npu-smi.

The driver keeps a line `address_<device>=<ip>` for each port in /etc/hccn.conf. `npu-smi info -t
spod-info -i <card> -c <chip>` prints "SDID" and "Super Pod ID", which are what HCCL calls
super_device_id and super_pod_id (CANN, HCCL user guide, cluster_info_config).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from training.health.sources.npu_smi import Chip, parse_table
from training.health.sources.vendor_tools import NoAnswer, ask, assignments, fields
from training.specs.recovery import RankTableForm
from training.wire.rank_table import DeviceAddress, DevicesQuery, NodeDevices

HCCN_CONF = Path("/etc/hccn.conf")
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"


def addresses_here(query: DevicesQuery) -> NodeDevices:
    """The devices of this node.

    Raises:
        ValueError: an address is not known.
    """
    lines = assignments(HCCN_CONF)
    visible = query.visible or os.environ.get(VISIBLE, "")
    devices = ports(lines, device_ids(query.slots, visible))
    if query.form is RankTableForm.V1_0:
        return NodeDevices(devices=devices)
    try:
        return in_super_pod(devices, parse_table(ask(["npu-smi", "info"])), ask)
    except NoAnswer as error:
        raise ValueError(f"npu-smi, which knows the super pod: {error}") from error


def device_ids(slots: int, visible: str) -> Sequence[int]:
    """Physical numbers of the devices, by local rank.

    Raises:
        ValueError: fewer are visible than there are ranks.
    """
    if not visible:
        return range(slots)
    seen = [int(one) for one in re.findall(r"\d+", visible)]
    if len(seen) < slots:
        raise ValueError(f"{VISIBLE}={visible} has fewer than {slots} devices")
    return seen[:slots]


def ports(lines: Mapping[str, str], numbers: Sequence[int]) -> tuple[DeviceAddress, ...]:
    """The devices with the addresses of their ports.

    Raises:
        ValueError: one has none.
    """
    missing = [number for number in numbers if not lines.get(f"address_{number}")]
    if missing:
        raise ValueError(f"{HCCN_CONF} has no address_{missing[0]}")
    return tuple(DeviceAddress(device_id=n, device_ip=lines[f"address_{n}"]) for n in numbers)


def in_super_pod(
    devices: Sequence[DeviceAddress], chips: Sequence[Chip], asked: Callable[[Sequence[str]], str]
) -> NodeDevices:
    """The same devices with their places in a super pod.

    Raises:
        ValueError: npu-smi does not name one.
    """
    places = {chip.physical: (chip.npu, chip.chip) for chip in chips}
    found, pods = [], set()
    for device in devices:
        if device.device_id not in places:
            raise ValueError(f"npu-smi info shows no device {device.device_id}")
        card, chip = places[device.device_id]
        command = ["npu-smi", "info", "-t", "spod-info", "-i", str(card), "-c", str(chip)]
        said = fields(asked(command))
        if not said.get("SDID") or not said.get("Super Pod ID"):
            raise ValueError(f"{' '.join(command)} shows no SDID and Super Pod ID")
        found.append(device.model_copy(update={"super_device_id": said["SDID"]}))
        pods.add(said["Super Pod ID"])
    if len(pods) != 1:
        raise ValueError(f"its devices are in super pods {', '.join(sorted(pods))}")
    return NodeDevices(devices=tuple(found), super_pod_id=pods.pop())
