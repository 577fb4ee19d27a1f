"""Checks of a node's devices by the driver's tools: all there, healthy, with their links up."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from perdure.training.telemetry import npu_smi
from perdure.training.telemetry import npu_smi as hccn
from perdure.training.telemetry.sampling import HCCN_TOOL, NPU_SMI, Sampler
from perdure.training.telemetry.vendor_tools import Ask, NoAnswer, find_tool, run_tool
from perdure.training.wire.node import Check, CheckOutcome, DeviceSample, NodeSample, worst


def check_devices(folder: Path, slots: int) -> tuple[Check, ...]:
    """Take one sample, and judge it."""
    sample = Sampler(folder, slots).take_sample()
    if find_tool(NPU_SMI) is None:
        return (judge_devices(sample, slots),)
    return judge_devices(sample, slots), check_history(slots)


def judge_devices(sample: NodeSample, slots: int) -> Check:
    """Judge whether the devices that the ranks will use are there and healthy."""
    allowed = f"{slots} healthy devices"
    if not sample.devices and not _has_driver(sample):
        why = "; ".join(sample.gaps)
        return Check(name="devices", outcome=CheckOutcome.SKIPPED, seen=f"no devices known: {why}")
    sick = [_complaint(device) for device in sample.devices if not device.is_healthy]
    missing = slots - len(sample.devices)
    wrong = [*sick, *([f"{missing} of {slots} devices are missing"] if missing > 0 else [])]
    if wrong:
        gaps = [*wrong, *sample.gaps]
        return Check(
            name="devices", outcome=CheckOutcome.FAILED, seen="; ".join(gaps), allowed=allowed
        )
    doubtful = [_complaint(device) for device in sample.devices if _is_doubtful(device)]
    # A missing tool is no news; a tool that failed is.
    doubtful += [gap for gap in sample.gaps if not gap.endswith("not installed")]
    name = sample.devices[0].name
    return Check(
        name="devices",
        outcome=CheckOutcome.WARNING if doubtful else CheckOutcome.OK,
        seen="; ".join(doubtful) or f"{len(sample.devices)} x {name}, healthy",
        allowed=allowed,
    )


def _has_driver(sample: NodeSample) -> bool:
    """Whether a driver is there, which then has to show its devices."""
    return f"{NPU_SMI}: not installed" not in sample.gaps


def _complaint(device: DeviceSample) -> str:
    codes = f" ({' '.join(device.error_codes)})" if device.error_codes else ""
    link = "" if device.link_is_up is not False else ", its link is down"
    net = f", network health {device.net_health}" if device.net_health else ""
    return f"device {device.index}: {device.health}{codes}{link}{net}"


def _is_doubtful(device: DeviceSample) -> bool:
    """Whether a healthy device is in doubt; a network is Init until its detector has a setting."""
    is_fine = device.health in (None, "OK") and not device.error_codes
    return not is_fine or device.net_health not in (None, "Success", "Init")


def check_history(
    slots: int, *, devices: Collection[int] | None = None, ask_tool: Ask = run_tool
) -> Check:
    """Check memory errors, link losses and packet errors of NPUs since their driver loaded.

    Args:
        slots: number of devices that the job uses, from 0 on.
        devices: indices of the devices to check; None for all.
        ask_tool: runs a tool.
    """
    wanted = range(slots) if devices is None else devices
    try:
        every = npu_smi.parse_table(ask_tool((NPU_SMI, "info")))[:slots]
        chips = [chip for index, chip in enumerate(every) if index in wanted]
        events = [line for chip in chips for line in _read_history(chip, ask_tool)]
    except NoAnswer as error:
        return Check(
            name="device_history", outcome=CheckOutcome.WARNING, seen=f"no answer: {error}"
        )
    return Check(
        name="device_history",
        outcome=worst([outcome for outcome, _ in events] or [CheckOutcome.OK]),
        seen="; ".join(line for _, line in events) or "no memory errors, no losses of link",
        allowed=f"fewer than {_PAGES_LIMIT} isolated pages, no uncorrected memory errors",
    )


# npu-smi's reference: up to 64 pages of HBM can be isolated, then the device has to be replaced.
_PAGES_LIMIT = 64


def _read_history(chip: npu_smi.Chip, ask_tool: Ask) -> Iterator[tuple[CheckOutcome, str]]:
    name = f"device {chip.physical}"
    ecc = npu_smi.parse_ecc(ask_tool((NPU_SMI, "info", "-t", "ecc", "-i", str(chip.npu))))
    if ecc is not None and ecc.isolated_pages >= _PAGES_LIMIT:
        yield CheckOutcome.FAILED, f"{name}: {ecc.isolated_pages} pages isolated"
    elif ecc is not None and (ecc.double_bit or ecc.isolated_pages):
        yield (
            CheckOutcome.WARNING,
            f"{name}: {ecc.double_bit} double-bit errors, {ecc.isolated_pages} pages isolated",
        )
    if find_tool(HCCN_TOOL) is None:
        return
    port = (HCCN_TOOL, "-i", str(chip.physical))
    history = hccn.parse_link_history(ask_tool((*port, "-link_stat", "-g")))
    if history is not None and history.num_losses:
        newest = next(when for when, came_up in history.changes if not came_up)
        yield CheckOutcome.WARNING, f"{name}: link lost {history.num_losses} times, last {newest}"
    counters = hccn.parse_counters(ask_tool((*port, "-stat", "-g")))
    wrong = [f"{n}={counters[n]}" for n in hccn.ERROR_COUNTERS if counters.get(n)]
    if wrong:
        yield CheckOutcome.WARNING, f"{name}: {', '.join(wrong)}"
