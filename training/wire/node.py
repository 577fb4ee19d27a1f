"""Messages about the devices of a node: addresses for a rank table, healing, checks, samples.

A value that a tool does not report is None; a tool that is missing, or gives no answer, is a gap
with its name. Percentages are 0 to 100, sizes bytes, times seconds; `at_s` since the epoch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Literal

from pydantic import Field, TypeAdapter

from perdure.storage.frozen_model import FrozenModel
from perdure.training.config.job import Job
from perdure.training.config.recovery import RankTableForm
from perdure.training.journal.events import ChipsHealed
from perdure.training.recovery.chips import ChipLevel
from perdure.training.recovery.healing import HealPlan
from perdure.training.recovery.rungs import Rung

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
        device_ip: address of its network port.
        super_device_id: SDID, in a super pod.
        backup_device_ip: address of the port of the chip's other die, in a super pod, which HCCL's
            operator retry takes when this one is lost; None: not known.
    """

    device_id: int
    device_ip: str
    super_device_id: str | None = None
    backup_device_ip: str | None = None


class NodeDevices(FrozenModel):
    """The devices of a node, in the order of its local ranks."""

    devices: tuple[DeviceAddress, ...]
    super_pod_id: str | None = None


def device_ids(slots: int, visible: str) -> Sequence[int]:
    """Return the physical numbers of the devices, by local rank.

    Raises:
        ValueError: `visible` is no list of numbers, names a device twice, or too few.
    """
    if not visible:
        return range(slots)
    parts = [part.strip() for part in visible.split(",")]
    if not all(re.fullmatch(r"[0-9]+", part) for part in parts):
        raise ValueError(f"{VISIBLE}={visible} is no list of device numbers, as 0,1,2,3")
    devices = [int(part) for part in parts]
    if len(set(devices)) < len(devices):
        raise ValueError(f"{VISIBLE}={visible} names a device twice")
    if len(devices) < slots:
        raise ValueError(f"{VISIBLE}={visible} has fewer than {slots} devices")
    return devices[:slots]


class HealOrder(FrozenModel):
    """Heal the chips after an attempt, in the background; repeated: how far.

    Repeated after its end it gives the same answer: a supervisor may have died while it waited.

    Attributes:
        rung: recovery that would start processes there again.
        slots_per_node: devices that the job uses on the node, from 0 on.
        variables: environment of the workers.
        cwd: their folder.
    """

    op: Literal["heal"] = "heal"
    placement: int
    attempt: int
    rung: Rung
    plan: HealPlan
    slots_per_node: int
    variables: dict[str, str]
    cwd: str


class HealReply(FrozenModel):
    """How far a node is.

    Attributes:
        done: what came of it; None while it goes on.
    """

    done: ChipsHealed | None = Field(None)


class CheckOutcome(StrEnum):
    """How a check came out, from good to bad."""

    SKIPPED = "skipped"  # it does not apply here, `seen` has the reason
    OK = "ok"
    WARNING = "warning"  # it can be used, and an operator should look
    FAILED = "failed"  # it must not be used


class Check(FrozenModel):
    """One check.

    Attributes:
        name: the check's name.
        node: the checked node; None: the job or the gang as a whole.
        seen: what was found.
        allowed: what it is compared with; "" where nothing is.
        seconds: it took.
        figures: what was measured, by name with its unit.
    """

    name: str
    outcome: CheckOutcome
    seen: str
    allowed: str = ""
    node: str | None = None
    seconds: float = 0.0
    figures: dict[str, float] = Field(default={})


class PingTarget(FrozenModel):
    """A port of another node, and the device of this node that pings it.

    Attributes:
        device: local rank.
        member: the other node's.
        address: of the port.
    """

    device: int
    member: int
    address: str


class NodeTask(FrozenModel):
    """Task of checking a node.

    Attributes:
        job: it holds no secrets.
        folder: the container's scratch folder.
        node_folder: outlives the node's containers; None: there is none.
        first_rank: first global rank of this node, which has a rank for each slot.
        state_bytes: model and optimizer state of the whole job; None: not known.
        is_new: whether the node itself is checked; otherwise it takes part in the gang alone.
        gang_host: where the first rank listens; None: no check of the gang.
        with_store: whether the keys of the store are there.
        pings: ports of other nodes.
    """

    job: Job
    node: str
    folder: str
    node_folder: str | None
    slots: int
    first_rank: int
    world_size: int
    state_bytes: int | None = None
    is_new: bool
    gang_host: str | None
    gang_port: int = 0
    timeout_s: float
    with_store: bool = True
    pings: tuple[PingTarget, ...] = ()


CHECKS: TypeAdapter[tuple[Check, ...]] = TypeAdapter(tuple[Check, ...])


def unanswered(node: str, why: str) -> Check:
    """Make the check of a node whose agent did not answer."""
    return Check(name="agent", node=node, outcome=CheckOutcome.FAILED, seen=why)


def worst(outcomes: list[CheckOutcome]) -> CheckOutcome:
    """Choose the worst of several outcomes; skipped when there is none."""
    order = list(CheckOutcome)
    return max(outcomes, key=order.index, default=CheckOutcome.SKIPPED)


class ChipCode(FrozenModel):
    """A chip's code from the platform; `level` is the platform's own, None where it has none."""

    code: str
    level: ChipLevel | None = None


class DeviceSample(FrozenModel):
    """One device.

    Attributes:
        index: as workers count them (LOCAL_RANK).
        health: word of its driver: OK, Warning, Alarm, Critical; None when it reports none.
        error_codes: present error codes of the driver.
        platform_codes: present codes in the platform's report that is mounted.
        link_is_up: state of its network port.
        net_health: word of hccn_tool: Success, Init, Socket failed, ...
    """

    index: int
    name: str = ""
    health: str | None = None
    error_codes: tuple[str, ...] = ()
    platform_codes: tuple[ChipCode, ...] = ()
    utilisation_percent: float | None = None
    memory_percent: float | None = None
    memory_total_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    link_is_up: bool | None = None
    net_health: str | None = None

    @property
    def is_ill(self) -> bool:
        """Whether its driver reports a fault."""
        return self.health not in (None, "OK", "Warning")

    @property
    def is_healthy(self) -> bool:
        """Whether neither its driver nor its link reports a fault."""
        return not self.is_ill and self.link_is_up is not False


class HostSample(FrozenModel):
    """The host, or the part of it that the container sees."""

    cpu_percent: float | None = None
    memory_percent: float | None = None
    disk_free_percent: float | None = None
    disk_free_bytes: int | None = None


class NodeSample(FrozenModel):
    """A sample of a node.

    Attributes:
        gaps: tools and files that gave no reading, and why.
        is_complete: False where a tool that is there gave no answer.
    """

    at_s: float
    devices: tuple[DeviceSample, ...] = ()
    host: HostSample = HostSample()
    gaps: tuple[str, ...] = ()
    is_complete: bool = True
