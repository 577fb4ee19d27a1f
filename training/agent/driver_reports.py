"""The reports of the NPU driver's tools, stored with the logs of an attempt that has failed.

They are for whoever helps: `npu-smi` lists the chips and their common readings, msnpureport exports
the logs that the chips themselves keep. Times are seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from perdure.training.telemetry import vendor_tools
from perdure.training.telemetry.npu_smi import parse_table
from perdure.training.telemetry.sampling import NPU_SMI
from perdure.training.telemetry.vendor_tools import NoAnswer, find_tool

MSNPUREPORT = "msnpureport"
REPORT_FILE = "npu-smi.txt"
EXPORT_TIMEOUT_S = 30.0
TABLES_LIMIT_S = 5.0


def write_driver_reports(folder: Path) -> Iterator[Path]:
    """Write what the tools report into a folder; tools that are not installed are left out.

    Args:
        folder: of the attempt; the export of msnpureport goes into a folder below it.

    Raises:
        OSError: the folder cannot be written.
    """
    if find_tool(NPU_SMI) is not None:
        report = folder / REPORT_FILE
        report.write_text("".join(_tables()), encoding="utf-8")
        yield report
    if find_tool(MSNPUREPORT) is not None:
        export = folder / MSNPUREPORT
        export.mkdir(exist_ok=True)
        output = folder / f"{MSNPUREPORT}.txt"
        text = _answer((MSNPUREPORT,), folder=export, timeout_s=EXPORT_TIMEOUT_S)
        output.write_text(text, encoding="utf-8")
        yield output


def _tables() -> Iterator[str]:
    deadline_s = time.monotonic() + TABLES_LIMIT_S
    table = _answer((NPU_SMI, "info"))
    yield table
    for card in dict.fromkeys(chip.npu for chip in parse_table(table)):
        if time.monotonic() > deadline_s:  # a tool that hangs does so for every card
            return
        yield _answer((NPU_SMI, "info", "-t", "common", "-i", str(card)))


def _answer(
    command: tuple[str, ...],
    *,
    folder: Path | None = None,
    timeout_s: float = vendor_tools.COMMAND_TIMEOUT_S,
) -> str:
    try:
        text = vendor_tools.run_tool(command, folder=folder, timeout_s=timeout_s)
    except NoAnswer as error:
        text = f"no answer: {error}\n"
    return f"$ {' '.join(command)}\n{text}\n"
