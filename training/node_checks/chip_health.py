"""Inspection and reset of a node's chips between two attempts in place.

Written for npu-smi 23.0 to 26.0; for other devices NVML reports where it is installed, and nothing
is reset. Nothing here was run on an Ascend chip. Times are seconds.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from perdure.training.node_checks.devices import check_history, judge_devices
from perdure.training.recovery.healing import RESET_COMMAND_LIMIT_S, HealPlan, is_still_there
from perdure.training.telemetry import npu_smi
from perdure.training.telemetry.sampling import NPU_SMI, Sampler, reset_command
from perdure.training.telemetry.vendor_tools import Ask, NoAnswer, find_tool, run_tool
from perdure.training.wire.node import CheckOutcome

# Words of a tool that refused a reset; the check after it shows whether a reset helped.
_REFUSED = re.compile(r"fail|error|not support|invalid|denied|permission", re.IGNORECASE)
_MAX_TEXT_CHARS = 200


class _AskWithAnswers(Protocol):
    """A function that runs a tool and answers its questions; see `vendor_tools.run_tool`."""

    def __call__(self, command: Sequence[str], *, timeout_s: float, answers: str) -> str:
        """Return the tool's output."""
        ...


@dataclass(frozen=True, slots=True)
class ChipInspection:
    """The state of chips as their driver reports it.

    Attributes:
        is_good: whether it reports no fault.
        codes: fault codes of the chips.
    """

    is_good: bool
    codes: tuple[str, ...]
    text: str


def inspect_chips(
    plan: HealPlan, slots: int, folder: Path, *, suspects: Collection[int], ask_tool: Ask = run_tool
) -> ChipInspection:
    """Inspect the health and the error counters of the chips by their driver.

    Args:
        plan: holds the code that the chips must no longer report.
        slots: number of devices that the job uses, from 0 on; all must be there.
        folder: the container's own; the sample has its disk.
        suspects: indices of the devices that were at fault.
        ask_tool: runs a tool.
    """
    sample = Sampler(folder, slots, detailed_devices=suspects, ask_tool=ask_tool).take_sample()
    health = judge_devices(sample, slots)
    codes = tuple(dict.fromkeys(code for device in sample.devices for code in device.error_codes))
    if health.outcome is CheckOutcome.FAILED:
        return ChipInspection(is_good=False, codes=codes, text=health.seen)
    if is_still_there(plan, codes):
        return ChipInspection(
            is_good=False, codes=codes, text=f"code {plan.code} is still reported"
        )
    if find_tool(NPU_SMI) is not None:
        history = check_history(slots, devices=suspects, ask_tool=ask_tool)
        if history.outcome is CheckOutcome.FAILED:
            return ChipInspection(is_good=False, codes=codes, text=history.seen)
    return ChipInspection(is_good=True, codes=codes, text=health.seen)


def reset_chips(
    devices: Collection[int],
    *,
    ask_tool: Ask = run_tool,
    command: _AskWithAnswers = run_tool,
) -> tuple[bool, str]:
    """Reset chips by the driver's own tool. Return whether it did so, and its words.

    No chip is reset while a process uses any chip of the node: on some servers a reset resets all
    chips (npu-smi warns of it), and would cost another job its chips.
    """
    if find_tool(NPU_SMI) is None:
        return False, f"not possible, {NPU_SMI} is not installed"
    try:
        table = ask_tool((NPU_SMI, "info"))
        if num_busy := npu_smi.parse_processes(table):
            return False, f"not done, {num_busy} processes use chips of the node"
        chips = [chip for n, chip in enumerate(npu_smi.parse_table(table)) if n in devices]
        answers = [
            command(reset_command(chip), timeout_s=RESET_COMMAND_LIMIT_S, answers="y\n")
            for chip in chips
        ]
    except NoAnswer as error:
        return False, f"no answer: {error}"
    if not answers:
        return False, "not possible, the device is not in the driver's table"
    refused = next((text for text in answers if _REFUSED.search(text)), None)
    if refused is not None:
        return False, f"refused: {' '.join(refused.split())[:_MAX_TEXT_CHARS]}"
    names = ", ".join(f"{chip.npu}.{chip.chip}" for chip in chips)
    return True, f"chip {names} by {NPU_SMI}"
