"""The question which addresses the devices of a node have, for a rank table, and its answer."""

from __future__ import annotations

from typing import Literal

from storage.frozen_model import FrozenModel
from training.specs.recovery import RankTableForm


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
