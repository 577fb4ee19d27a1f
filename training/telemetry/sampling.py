"""Samples of a node: its devices, by the tools that are installed, and its host, by psutil.

A tool that is missing or gives no answer is a gap of the sample, never an error. In a container
the processors and the memory are those of the machine, not the container's share. Times are
seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import psutil

from perdure.training.telemetry import npu_smi, nvml
from perdure.training.telemetry import npu_smi as hccn
from perdure.training.telemetry.mounted_files import reset_codes
from perdure.training.telemetry.vendor_tools import Ask, NoAnswer, find_tool, run_tool
from perdure.training.wire.node import DeviceSample, HostSample, NodeSample

NPU_SMI, HCCN_TOOL = "npu-smi", "hccn_tool"
SAMPLE_LIMIT_S = 20.0  # of all tools together; the devices after that are a gap


class Sampler:
    """Samples of a node: its devices and its host.

    Args:
        folder: the sample has its file system.
        num_devices: devices of the sample, from 0 on.
        detailed_devices: indices of the devices that the tools report on one by one; None for all.
        now: wall clock.
        clock: monotonic clock.
        ask_tool: runs a tool.
    """

    def __init__(
        self,
        folder: Path,
        num_devices: int,
        *,
        detailed_devices: Collection[int] | None = None,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        ask_tool: Ask = run_tool,
    ) -> None:
        self._host = _HostSource(folder)
        self._num_devices = num_devices
        self._detailed_devices = (
            range(num_devices) if detailed_devices is None else detailed_devices
        )
        self._now = now
        self._clock = clock
        self._ask = ask_tool

    def take_sample(self) -> NodeSample:
        """Take a sample; takes as long as the tools take."""
        gaps: list[str] = []
        try:
            host = self._host.read()
        except OSError as error:
            host = HostSample()
            gaps.append(f"host: {error}")
        unanswered: list[str] = []
        devices = self._add_platform_codes(self._sample_devices(gaps, unanswered), unanswered)
        return NodeSample(
            at_s=self._now(),
            devices=devices,
            host=host,
            gaps=(*gaps, *unanswered),
            is_complete=not unanswered,
        )

    def _add_platform_codes(
        self, devices: tuple[DeviceSample, ...], unanswered: list[str]
    ) -> tuple[DeviceSample, ...]:
        """Add the codes in MindCluster's reset.json, where it is mounted."""
        try:
            codes = reset_codes(self._num_devices)
        except ValueError as error:
            unanswered.append(str(error))
            return devices
        if codes and not devices:  # no tool shows them
            devices = tuple(DeviceSample(index=index) for index in range(self._num_devices))
        return tuple(
            device.model_copy(update={"platform_codes": codes.get(device.index, ())})
            for device in devices
        )

    def _sample_devices(self, gaps: list[str], unanswered: list[str]) -> tuple[DeviceSample, ...]:
        if find_tool(NPU_SMI) is not None:
            has_hccn = find_tool(HCCN_TOOL) is not None
            if not has_hccn:
                gaps.append(f"{HCCN_TOOL}: not installed")
            return self._sample_npus(unanswered, has_hccn=has_hccn)
        gaps.append(f"{NPU_SMI}: not installed")
        try:
            return nvml.read_devices(self._num_devices)
        except nvml.NoNvml as error:
            gaps.append(f"nvml: {error}")
            return ()

    def _sample_npus(self, unanswered: list[str], *, has_hccn: bool) -> tuple[DeviceSample, ...]:
        """Sample the NPUs; a tool that hangs would hang for the next device, too."""
        until_s = self._clock() + SAMPLE_LIMIT_S
        samples: list[DeviceSample] = []
        try:
            chips = npu_smi.parse_table(self._ask((NPU_SMI, "info")))[: self._num_devices]
            if not chips:
                unanswered.append(f"{NPU_SMI}: no table of devices")
            for index, chip in enumerate(chips):
                samples.append(device_of(index, chip))
            for index, chip in enumerate(chips):
                if index not in self._detailed_devices:
                    continue
                if self._clock() > until_s:
                    unanswered.append(
                        f"devices {index} on: not asked, {SAMPLE_LIMIT_S:g} s are over"
                    )
                    break
                samples[index] = self._read_details(index, chip, has_hccn=has_hccn)
        except NoAnswer as error:
            unanswered.append(f"no answer: {error}")
        return tuple(samples)

    def _read_details(self, index: int, chip: npu_smi.Chip, *, has_hccn: bool) -> DeviceSample:
        """Add to a device the readings that only its own commands show."""
        health = npu_smi.parse_health(self._ask(health_command(chip)))
        if chip.utilisation_percent is None:
            usages = npu_smi.parse_usages(self._ask(_usages_command(chip)))
            chip = npu_smi.fill_usage(chip, usages[chip.chip]) if chip.chip < len(usages) else chip
        more: dict[str, object] = {
            "health": health.word or chip.health,
            "error_codes": health.error_codes,
        }
        if has_hccn:
            link, net = (self._ask(command) for command in link_commands(chip))
            more |= {"link_is_up": hccn.parse_link(link), "net_health": hccn.parse_net_health(net)}
        return device_of(index, chip).model_copy(update=more)


def device_of(index: int, chip: npu_smi.Chip) -> DeviceSample:
    """Build a sample of a device from its rows of the table alone."""
    return DeviceSample(
        index=index,
        name=chip.name,
        health=chip.health,
        utilisation_percent=chip.utilisation_percent,
        memory_percent=chip.memory_percent,
        memory_total_bytes=chip.memory_total_bytes or None,
        temperature_c=chip.temperature_c,
        power_w=chip.power_w,
    )


def health_command(chip: npu_smi.Chip) -> tuple[str, ...]:
    """Build the command; without `-c` the answer may be that of the card's controller."""
    return (NPU_SMI, "info", "-t", "health", "-i", str(chip.npu), "-c", str(chip.chip))


def reset_command(chip: npu_smi.Chip) -> tuple[str, ...]:
    """Build the command that resets a chip, on some servers all chips; it asks for a `y`."""
    return (NPU_SMI, "set", "-t", "reset", "-i", str(chip.npu), "-c", str(chip.chip))


def _usages_command(chip: npu_smi.Chip) -> tuple[str, ...]:
    """Build the command for memory and cores of every chip of a card."""
    return (NPU_SMI, "info", "-t", "usages", "-i", str(chip.npu))


def link_commands(chip: npu_smi.Chip) -> Iterator[tuple[str, ...]]:
    """Yield the commands for the state of a device's port, and for the way to its peers."""
    yield (HCCN_TOOL, "-i", str(chip.physical), "-link", "-g")
    yield (HCCN_TOOL, "-i", str(chip.physical), "-net_health", "-g")


class _HostSource:
    """Readings of the host.

    Args:
        folder: the readings have its file system.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        psutil.cpu_percent()  # the use of processors is measured since the call before

    def read(self) -> HostSample:
        """Read the host; the processors' use counts from the last call."""
        disk = psutil.disk_usage(str(self._folder))
        return HostSample(
            cpu_percent=psutil.cpu_percent(),
            memory_percent=psutil.virtual_memory().percent,
            disk_free_percent=100.0 * disk.free / disk.total if disk.total else None,
            disk_free_bytes=disk.free,
        )
