"""The addresses of a node's devices: /etc/hccn.conf, and in a super pod npu-smi.

The driver keeps a line `address_<device>=<ip>` for each port in /etc/hccn.conf. `npu-smi info -t
spod-info -i <card> -c <chip>` prints "SDID" and "Super Pod ID", which are what HCCL calls
super_device_id and super_pod_id (CANN, HCCL user guide, cluster_info_config). In a super pod, the
port of the chip's other die is the backup that HCCL's operator retry may use. A container without
/etc/hccn.conf has all of it from the rank table that MindCluster mounts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from perdure.training.config.job import Job
from perdure.training.config.recovery import RankTableForm
from perdure.training.telemetry.mounted_files import (
    is_super_pod,
    local_names,
    mounted_devices,
    mounted_rank_table,
    other_die,
)
from perdure.training.telemetry.npu_smi import Chip, parse_table
from perdure.training.telemetry.vendor_tools import (
    Ask,
    NoAnswer,
    parse_fields,
    read_assignments,
    run_tool,
)
from perdure.training.wire.agent import AgentReply
from perdure.training.wire.node import (
    VISIBLE,
    Check,
    CheckOutcome,
    DeviceAddress,
    DevicesQuery,
    NodeDevices,
    device_ids,
)

HCCN_CONF = Path("/etc/hccn.conf")
NAME = "rank_table"


def devices_reply(query: DevicesQuery, node: str) -> AgentReply:
    """Answer an agent's query with the devices of this node, or with an error."""
    try:
        return AgentReply(devices=_read_addresses(query, node))
    except ValueError as error:
        return AgentReply(error=f"comm.rank_table={query.form} cannot be written, {node}: {error}")


def _read_addresses(query: DevicesQuery, node: str) -> NodeDevices:
    """Read the addresses of this node's devices.

    Raises:
        ValueError: an address is not known.
    """
    visible = query.visible or os.environ.get(VISIBLE, "")
    has_super_pod = query.form is not RankTableForm.V1_0
    table = None if HCCN_CONF.exists() else mounted_rank_table()
    if table is not None:
        names = local_names(node)
        return mounted_devices(table, query.slots, visible, names, with_super_pod=has_super_pod)
    lines = read_assignments(HCCN_CONF)
    devices = read_ports(lines, device_ids(query.slots, visible))
    if not has_super_pod:
        return NodeDevices(devices=devices)
    devices = add_backups(devices, lines)
    try:
        return add_super_pod(devices, parse_table(run_tool(["npu-smi", "info"])), run_tool)
    except NoAnswer as error:
        raise ValueError(f"npu-smi, which knows the super pod: {error}") from error


def check_rank_table(query: DevicesQuery, node: str) -> Check:
    """Check that a job's rank table can be written for the devices of this node."""
    allowed = f"comm.rank_table={query.form}: an address for each of {query.slots} ranks"
    try:
        addresses = _read_addresses(query, node)
    except ValueError as error:
        return Check(name=NAME, outcome=CheckOutcome.FAILED, seen=str(error), allowed=allowed)
    text = ", ".join(f"{device.device_id}: {device.device_ip}" for device in addresses.devices)
    if addresses.super_pod_id is not None:
        text += f"; super pod {addresses.super_pod_id}"
    return Check(name=NAME, outcome=CheckOutcome.OK, seen=text, allowed=allowed)


def query_of(job: Job) -> DevicesQuery | None:
    """Build the query for a job's rank table; None where the job asks for none."""
    form = job.comm.rank_table
    if form is None:
        return None
    visible = job.env.get(VISIBLE, "")
    return DevicesQuery(form=form, slots=job.engine.slots_per_node, visible=visible)


def read_ports(lines: Mapping[str, str], numbers: Sequence[int]) -> tuple[DeviceAddress, ...]:
    """Return the devices with the addresses of their ports.

    Raises:
        ValueError: a device has no address.
    """
    missing = [number for number in numbers if not lines.get(f"address_{number}")]
    if missing:
        raise ValueError(f"{HCCN_CONF} has no address_{missing[0]}")
    return tuple(DeviceAddress(device_id=n, device_ip=lines[f"address_{n}"]) for n in numbers)


def add_backups(
    devices: Sequence[DeviceAddress], lines: Mapping[str, str]
) -> tuple[DeviceAddress, ...]:
    """Add the port of each chip's other die, where it has an address."""
    return tuple(
        device.model_copy(
            update={"backup_device_ip": lines.get(f"address_{other_die(device.device_id)}")}
        )
        for device in devices
    )


def add_super_pod(
    devices: Sequence[DeviceAddress], chips: Sequence[Chip], ask_tool: Ask
) -> NodeDevices:
    """Add to the devices their places in a super pod.

    Raises:
        ValueError: npu-smi does not name the place of a device.
    """
    places = {chip.physical: (chip.npu, chip.chip) for chip in chips}
    placed, pods = [], set()
    for device in devices:
        if device.device_id not in places:
            raise ValueError(f"npu-smi info shows no device {device.device_id}")
        card, chip = places[device.device_id]
        command = ["npu-smi", "info", "-t", "spod-info", "-i", str(card), "-c", str(chip)]
        values = parse_fields(ask_tool(command))
        if not values.get("SDID") or not is_super_pod(values.get("Super Pod ID", "")):
            raise ValueError(f"{' '.join(command)} shows no SDID and Super Pod ID")
        placed.append(device.model_copy(update={"super_device_id": values["SDID"]}))
        pods.add(values["Super Pod ID"])
    if len(pods) != 1:
        raise ValueError(f"its devices are in super pods {', '.join(sorted(pods))}")
    return NodeDevices(devices=tuple(placed), super_pod_id=pods.pop())
