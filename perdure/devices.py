"""`perdure preflight --device`: the devices of this machine, tried and drilled, in one report."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import typer

from perdure.console import EXIT_FAILED, make_console, make_table, print_json, warn
from perdure.drills import run_drills
from perdure.training.config.model import ParallelKind
from perdure.training.drill.device_report import (
    DeviceReport,
    count_devices,
    try_devices,
    with_drills,
)
from perdure.training.drill.runner import DrillRunner, why_not
from perdure.training.drill.table import DRILLS
from perdure.training.errors import InputError
from perdure.training.wire.node import CheckOutcome

REPORT_FILE = "perdure-device-report.json"


def check_devices(report_file: Path, *, as_json: bool) -> None:
    """Try every device, drill them where there are enough, and write the report.

    Raises:
        InputError: there is no device.
        Exit: something failed.
    """
    count = count_devices()
    if count == 0:
        raise InputError("--device", "torch sees no NPU and no GPU here")
    warn(f"{count} devices: each is tried in a process of its own")
    report = _drilled(try_devices(count), count)
    report.write(report_file)
    if as_json:
        print_json(report.model_dump(mode="json"), indent=None)
    else:
        _show(report)
    warn(f"the report: {report_file}")
    if not report.is_fine:
        raise typer.Exit(EXIT_FAILED)


def _drilled(report: DeviceReport, count: int) -> DeviceReport:
    reasons = {drill.name: why_not(drill, None, num_devices=count) for drill in DRILLS}
    left_out = {name: reason for name, reason in reasons.items() if reason}
    drills = [drill for drill in DRILLS if drill.name not in left_out]
    if not drills or not report.is_fine:
        return with_drills(report, (), left_out)
    home = Path(tempfile.mkdtemp(prefix="perdure-device-")).resolve()
    report = with_drills(report, run_drills(DrillRunner(home, ParallelKind.DDP), drills), left_out)
    if report.is_fine:
        shutil.rmtree(home, ignore_errors=True)
    else:
        warn(f"logs and ledgers of the drills: {home}")
    return report


def _show(report: DeviceReport) -> None:
    console = make_console()
    table = make_table("device", "check", "outcome", "seen")
    for device, check in report.checks:
        if check.outcome is not CheckOutcome.SKIPPED:
            seen = check.seen.strip().splitlines()
            table.add_row(device, check.name, check.outcome, seen[-1] if seen else "")
    console.print(table)
    for name, reason in report.left_out.items():
        console.print(f"{name} is left out: {reason}")
    if report.drills:
        wrong = [drill["name"] for drill in report.drills if not drill["as_expected"]]
        told = f"not as expected: {', '.join(wrong)}" if wrong else "all as expected"
        console.print(f"{len(report.drills)} drills: {told}")
