"""Faults of nodes and chips, parsed from MindCluster's documents. Pure.

Formats and names are those of Ascend/mind-cluster at 22bb3d987bc0: docs/en/scheduling/api/
ascend_device_plugin.md (DeviceInfoCfg, SwitchInfoCfg, ManuallySeparateNPU), api/clusterd/
00_cluster_resources.md (cluster-info-*), references/common_operations.md (examples), and the types
in component/clusterd/pkg/common/constant/type.go. Its programs write these documents for each
other and add fields from version to version, so the parser skips unknown fields. A document that it
cannot read is a warning in the log and reports no fault. Times are seconds since
the epoch; MindCluster's own are milliseconds for most faults and seconds for public ones.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from perdure.training.recovery.chips import BY_LEVEL, ChipAnswer, ChipLevel, chip_fact

DEVICE_KEY = "DeviceInfoCfg"
SWITCH_KEY = "SwitchInfoCfg"
BY_HAND_KEY = "ManuallySeparateNPU"
NODE_KEY = "NodeInfo"
UPDATED_KEY = "updateTime"  # of noded, RFC 3339
DEVICE_PREFIX = "mindx-dl-deviceinfo-"
NODE_PREFIX = "mindx-dl-nodeinfo-"
SWITCH_PREFIX = "mindx-dl-switchinfo-"
# A person's chips: "Ascend910-3", "npu-3", or with a cluster's own prefix.
_CHIP = re.compile(r"^[A-Za-z][-\w]*-(?P<number>\d+)$")
_MILLISECONDS_FROM = 100_000_000_000  # as seconds that were the year 5138
_UNHEALTHY = "UnHealthy"

# MindCluster's words for the levels of faults: of chips, of the node, of the switch in it.
LEVELS: Mapping[str, ChipLevel] = {
    "NotHandleFault": ChipLevel.NOT_HANDLED,
    "SubHealthFault": ChipLevel.SUB_HEALTHY,
    "RestartRequest": ChipLevel.RESTART_REQUEST,
    "RestartBusiness": ChipLevel.RESTART_JOB,
    "FreeRestartNPU": ChipLevel.RESET_WHEN_IDLE,
    "RestartNPU": ChipLevel.RESET_NOW,
    "PreSeparateNPU": ChipLevel.NO_NEW_JOBS,
    "SeparateNPU": ChipLevel.SEPARATE,
    "ManuallySeparateNPU": ChipLevel.SEPARATE_BY_HAND,
    "PreSeparateFault": ChipLevel.NO_NEW_JOBS,
    "SeparateFault": ChipLevel.SEPARATE,
    "NotHandle": ChipLevel.NOT_HANDLED,
    "SubHealth": ChipLevel.SUB_HEALTHY,
    "Reset": ChipLevel.SEPARATE,  # of a switch, it takes the node out
    "Separate": ChipLevel.SEPARATE,
}
_BY_HAND = "ManuallySeparateNPU"
_OF_CHIPS = frozenset({"CardUnhealthy", "CardNetworkUnhealthy"})

_log = logging.getLogger("perdure.engine")


@dataclass(frozen=True, slots=True)
class ReportedFault:
    """A fault of a node or of a chip on it.

    Attributes:
        kind: MindCluster's word, such as "CardUnhealthy" or "NodeUnhealthy".
        part: the faulty part: a chip such as "Ascend910-4", "CPU 0", "switch"; "" for the node.
        code: such as "80E18402"; "" where the document has none.
        level: MindCluster's word for the answer to the fault; "" where the document has none.
        since_s: when the fault began; None: unknown.
        takes_out: whether the node must get no new pods.
    """

    kind: str
    part: str
    code: str
    level: str
    since_s: float | None
    takes_out: bool

    @property
    def chip(self) -> int | None:
        """Physical number of the faulty chip on its node; None where it is another part."""
        match = _CHIP.match(self.part)
        return int(match["number"]) if match else None

    @property
    def text(self) -> str:
        """The fault in words for people."""
        label = " ".join(word for word in (self.level, self.code) if word) or self.kind
        since = f" since {_iso(self.since_s)}" if self.since_s is not None else ""
        return f"{self.part or 'the node'}: {label}{since}"

    @property
    def line(self) -> str:
        """The fault for the diagnosis, whose rules match codes or MindCluster's own words."""
        since = _iso(self.since_s) if self.since_s is not None else "a time that is not known"
        if self.code and chip_fact(self.code) is not None and self.code.isalnum():
            return f"{self.part}: fault_code: {self.code}, level {self.level}, since {since}"
        if not (self.takes_out or self.kind in _OF_CHIPS):
            return self.text  # an unknown fault that takes nothing out is no cause
        named = f'"npu_name":"{self.part}",' if self.chip is not None else ""
        words = f'{{"fault_type":"{self.kind}",{named}"fault_level":"{self.level}"}}'
        return f"{words} {self.part} {self.code} since {since}"

    @property
    def is_serious(self) -> bool:
        """Whether the fault can be behind a failure, by MindCluster's level."""
        return LEVELS.get(self.level) is not ChipLevel.NOT_HANDLED


def _iso(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds")


class _Document(BaseModel):
    """A document of another program; see the module's docstring."""

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)


class _Since(_Document):
    fault_time: int = 0
    fault_level: str = ""


class _ChipFault(_Document):
    fault_type: str = ""
    npu_name: str = ""
    fault_level: str = ""
    fault_code: str = ""
    fault_time_and_level_map: dict[str, _Since] | None = None


class _Devices(_Document):
    DeviceList: dict[str, str] | None = None


class _DeviceInfo(_Document):
    DeviceInfo: _Devices


class _NodePart(_Document):
    DeviceType: str = ""
    DeviceId: int = 0
    FaultCode: tuple[str, ...] | None = None
    FaultLevel: str = ""


class _Node(_Document):
    FaultDevList: tuple[_NodePart, ...] | None = None
    NodeStatus: str = ""
    UpdateTime: int = 0


class _NodeInfo(_Document):
    NodeInfo: _Node


class _SwitchFault(_Document):
    AssembledFaultCode: str = ""
    SwitchChipId: int = 0
    SwitchPortId: int = 0


class _Switch(_Document):
    FaultCode: tuple[str, ...] | None = None
    FaultLevel: str = ""
    NodeStatus: str = ""
    UpdateTime: int = 0
    FaultTimeAndLevelMap: dict[str, _Since] | None = None


_ChipFaults = TypeAdapter(tuple[_ChipFault, ...])
_DevicesOfNodes = TypeAdapter(dict[str, _Devices])
_Nodes = TypeAdapter(dict[str, _Node])
_Switches = TypeAdapter(dict[str, _Switch])
_Read = TypeVar("_Read")


def device_info(data: Mapping[str, str], where: str) -> list[ReportedFault]:
    """Parse the ConfigMap that the device plugin writes for its node.

    Args:
        data: the ConfigMap's data.
        where: its name, for warnings.
    """
    faults: list[ReportedFault] = []
    if DEVICE_KEY in data:
        info = _read(TypeAdapter(_DeviceInfo), data[DEVICE_KEY], f"{DEVICE_KEY} of {where}")
        faults += _of_devices(info.DeviceInfo, where) if info is not None else []
    by_hand = {fault.part for fault in faults if fault.level == _BY_HAND}
    for chip in _names(data.get(BY_HAND_KEY, "")):
        if chip not in by_hand:
            faults.append(_fault("CardUnhealthy", chip, "", _BY_HAND, None))
    if data.get(SWITCH_KEY):
        switch = _read(TypeAdapter(_Switch), data[SWITCH_KEY], f"{SWITCH_KEY} of {where}")
        faults += _of_switch(switch, where) if switch is not None else []
    return faults


def node_info(data: Mapping[str, str], where: str) -> list[ReportedFault]:
    """Parse the ConfigMap that noded writes for its node; arguments as for `device_info`."""
    if NODE_KEY not in data:
        return []
    info = _read(TypeAdapter(_NodeInfo), data[NODE_KEY], f"{NODE_KEY} of {where}")
    if info is None:
        return []
    return list(_of_node(info.NodeInfo, _stamp(data.get(UPDATED_KEY, ""), where)))


def cluster_devices(text: str, where: str) -> dict[str, list[ReportedFault]]:
    """Parse a document `cluster-info-device-*` of ClusterD. Returns faults by node."""
    documents = _read(_DevicesOfNodes, text, where) or {}
    return {
        name.removeprefix(DEVICE_PREFIX): _of_devices(devices, f"{name} in {where}")
        for name, devices in documents.items()
    }


def cluster_nodes(text: str, where: str) -> dict[str, list[ReportedFault]]:
    """Parse the document `cluster-info-node-cm` of ClusterD. Returns faults by node."""
    documents = _read(_Nodes, text, where) or {}
    # The documentation's own example has a node under the prefix of its devices.
    return {
        name.removeprefix(NODE_PREFIX).removeprefix(DEVICE_PREFIX): list(_of_node(node))
        for name, node in documents.items()
    }


def cluster_switches(text: str, where: str) -> dict[str, list[ReportedFault]]:
    """Parse a document `cluster-info-switch-*` of ClusterD. Returns faults by node."""
    documents = _read(_Switches, text, where) or {}
    return {
        name.removeprefix(SWITCH_PREFIX): _of_switch(switch, f"{name} in {where}")
        for name, switch in documents.items()
    }


def _of_devices(devices: _Devices, where: str) -> list[ReportedFault]:
    report: list[ReportedFault] = []
    listed: dict[str, str] = {}
    for name, text in (devices.DeviceList or {}).items():
        if name.endswith("-Fault"):
            faults = _read(_ChipFaults, text or "[]", f"{name} of {where}") or ()
            report += [chip_fault for fault in faults for chip_fault in _of_chip(fault)]
        elif name.endswith("-NetworkUnhealthy"):
            listed |= dict.fromkeys(_names(text), "CardNetworkUnhealthy")
        elif name.endswith("-Unhealthy"):
            listed |= dict.fromkeys(_names(text), "CardUnhealthy")
    explained = {fault.part for fault in report}
    # Older device plugins name the chip and not its fault.
    report += [
        ReportedFault(kind, chip, "", "", None, takes_out=True)
        for chip, kind in listed.items()
        if chip not in explained
    ]
    return report


def _of_chip(fault: _ChipFault) -> Iterator[ReportedFault]:
    details = fault.fault_time_and_level_map or {}
    for code in _names(fault.fault_code) or [""]:
        detail = details.get(code)
        level = (detail.fault_level if detail is not None else "") or fault.fault_level
        since_s = _seconds(detail.fault_time) if detail is not None else None
        yield _fault(fault.fault_type, fault.npu_name, code, level, since_s)


def _of_node(node: _Node, updated_s: float | None = None) -> Iterator[ReportedFault]:
    # ClusterD uses the time of the document as the time of a node's faults (node_util.go).
    since_s = updated_s if updated_s is not None else _seconds(node.UpdateTime)
    is_known = False
    for part in node.FaultDevList or ():
        for code in part.FaultCode or ("",):
            name = f"{part.DeviceType} {part.DeviceId}".strip()
            fault = _fault("NodeUnhealthy", name, code, part.FaultLevel, since_s)
            is_known |= fault.takes_out
            yield fault
    if node.NodeStatus == _UNHEALTHY and not is_known:
        yield ReportedFault("NodeUnhealthy", "", "", "", since_s, takes_out=True)


def _of_switch(switch: _Switch, where: str) -> list[ReportedFault]:
    details, faults = switch.FaultTimeAndLevelMap or {}, []
    is_out = switch.NodeStatus == _UNHEALTHY
    for text in switch.FaultCode or ():
        switch_fault = _read(
            TypeAdapter(_SwitchFault), text, f"a fault code of the switch in {where}"
        )
        if switch_fault is None:
            continue
        detail = details.get(
            f"{switch_fault.AssembledFaultCode}_{switch_fault.SwitchChipId}_{switch_fault.SwitchPortId}"
        )
        since_s = _seconds(detail.fault_time if detail is not None else switch.UpdateTime)
        level = detail.fault_level if detail is not None else switch.FaultLevel
        # Only the status shows what a level means for the node: RestartRequest takes it out, too.
        takes_out = is_out and LEVELS.get(level) is not ChipLevel.NOT_HANDLED
        code = switch_fault.AssembledFaultCode
        faults.append(ReportedFault("NodeUnhealthy", "switch", code, level, since_s, takes_out))
    if is_out and not any(fault.takes_out for fault in faults):
        since_s = _seconds(switch.UpdateTime)
        level = switch.FaultLevel
        faults.append(ReportedFault("NodeUnhealthy", "switch", "", level, since_s, takes_out=True))
    return faults


def _fault(kind: str, part: str, code: str, level: str, since_s: float | None) -> ReportedFault:
    # A fault of the node itself may have no level.
    takes_out = kind == "NodeUnhealthy" and not level
    if level in LEVELS:
        takes_out = BY_LEVEL[LEVELS[level]] is ChipAnswer.SEPARATE
    elif level:
        _log.warning("MindCluster's level %r of %s is not known here", level, part or "the node")
    return ReportedFault(kind, part, code, level, since_s, takes_out)


def _stamp(text: str, where: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        _log.warning("MindCluster's time %r of %s cannot be read", text, where)
        return None


def _names(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]


def _seconds(time: int) -> float | None:
    if time <= 0:
        return None
    return time / 1000 if time >= _MILLISECONDS_FROM else float(time)


def _read(form: TypeAdapter[_Read], text: str, where: str) -> _Read | None:
    try:
        return form.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        problem = f"{field}: {first['msg']}" if field else first["msg"]
        _log.warning("MindCluster's %s cannot be read: %s", where, problem)
        return None
