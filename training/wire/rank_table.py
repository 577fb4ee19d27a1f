"""The question which addresses the devices of a node have, for a rank table, and its answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from perdure.storage.frozen_model import FrozenModel
from perdure.training.specs.recovery import RankTableForm

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"


class DevicesQuery(FrozenModel):
    """Ask for the addresses of the devices that the ranks of this node use.

    Attributes:
        visible: ASCEND_RT_VISIBLE_DEVICES of the workers; empty: the agent's own, else all.
    """

    op: Literal["devices"] = "devices"
    form: RankTableForm
    slots: int
    visible: str = ""


class DeviceAddress(FrozenModel):
    """One device.

    Attributes:
        device_id: physical number on the node.
        device_ip: of its network port.
        super_device_id: SDID, in a super pod.
    """

    device_id: int
    device_ip: str
    super_device_id: str | None = None


class NodeDevices(FrozenModel):
    """The devices of a node, in the order of its local ranks."""

    devices: tuple[DeviceAddress, ...]
    super_pod_id: str | None = None


def device_ids(slots: int, visible: str) -> Sequence[int]:
    """Physical numbers of the devices, by local rank.

    Raises:
        ValueError: `visible` is no list of numbers, names one twice, or too few.
    """
    if not visible:
        return range(slots)
    parts = [part.strip() for part in visible.split(",")]
    if not all(re.fullmatch(r"[0-9]+", part) for part in parts):
        raise ValueError(f"{VISIBLE}={visible} is no list of device numbers, as 0,1,2,3")
    seen = [int(part) for part in parts]
    if len(set(seen)) < len(seen):
        raise ValueError(f"{VISIBLE}={visible} names a device twice")
    if len(seen) < slots:
        raise ValueError(f"{VISIBLE}={visible} has fewer than {slots} devices")
    return seen[:slots]
