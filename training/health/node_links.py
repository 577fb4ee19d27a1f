"""All devices of one node in one all-reduce, by CANN's own program for it.

The gang's check is torch's view of the same links; this one has no torch in it, so the two together
say whether a failure is the software's or the links'. HCCL, "HCCL Performance Tester": built by the
user below `$ASCEND_HOME_PATH/tools/hccl_test`, started by an mpirun of MPICH or Open MPI.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from perdure.training.health.sources.vendor_tools import NoAnswer, ask, find_tool
from perdure.training.wire.node import Check, CheckOutcome

NAME = "hccl_test"
MPIRUN = "mpirun"
HOME = "ASCEND_HOME_PATH"
_PROGRAM = Path("tools/hccl_test/bin/all_reduce_test")
# Open MPI refuses root without these two, and a container's user is root; MPICH ignores them.
_AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")
# Powers of two from 8 KiB to 64 MiB, as HCCL's own page on the program has them.
_SIZES = ("-b", "8K", "-e", "64M", "-f", "2")
_ROW = re.compile(r"^\s*(\d+)\s*\|\s*([\d.]+)\s*\|\s*([\d.]+)\s*\|\s*(\w+)", re.MULTILINE)
_ERROR = re.compile(r"^.*interface return err.*retcode: *-?\d+", re.MULTILINE)


class Ask(Protocol):
    """How a tool is run."""

    def __call__(self, command: Sequence[str], *, timeout_s: float) -> str:
        """What it prints."""


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """A line of the program's table; `result` is success, failed or NULL (not checked)."""

    size_bytes: int
    bandwidth_gb_s: float
    result: str


def parse_rows(text: str) -> tuple[LinkMeasurement, ...]:
    """The table: size (bytes), time (us), bandwidth (GB/s), result of the comparison."""
    return tuple(
        LinkMeasurement(int(size), float(bandwidth), result)
        for size, _, bandwidth, result in _ROW.findall(text)
    )


def check_links(
    slots: int, environment: Mapping[str, str], *, timeout_s: float, ask_tool: Ask = ask
) -> tuple[Check, ...]:
    """Run it on all slots of this node; nothing where there is no CANN, or a single device.

    Args:
        slots: devices of the node that the job uses.
        environment: of the node.
        timeout_s: after which a collective hangs.
        ask_tool: runs a tool.
    """
    home = environment.get(HOME)
    if not home or slots < 2:
        return ()
    program = Path(home) / _PROGRAM
    if not program.is_file():
        return (_check(CheckOutcome.SKIPPED, f"not built: there is no {program}"),)
    if find_tool(MPIRUN) is None:
        return (_check(CheckOutcome.SKIPPED, f"{MPIRUN} is not in PATH"),)
    count = str(slots)
    command = ("env", *_AS_ROOT, MPIRUN, "-n", count, str(program), *_SIZES)
    try:
        text = ask_tool((*command, "-d", "fp32", "-o", "sum", "-p", count), timeout_s=timeout_s)
    except NoAnswer:
        seen = f"{slots} devices: no result within {timeout_s:g} s"
        return (_check(CheckOutcome.FAILED, seen),)
    return (judge(text, slots),)


def judge(text: str, slots: int) -> Check:
    """What its output says: a wrong sum and an error of HCCL fail, a program in trouble warns."""
    rows = parse_rows(text)
    wrong = [f"{row.size_bytes} B" for row in rows if row.result == "failed"]
    error = _ERROR.search(text)
    if wrong:
        return _check(CheckOutcome.FAILED, f"wrong sums over {slots} devices of {', '.join(wrong)}")
    if error is not None:
        return _check(CheckOutcome.FAILED, error.group().strip())
    if not rows:
        # mpirun and the program may not fit each other: that says nothing of the devices.
        last = (text.strip().splitlines() or ["nothing was printed"])[-1]
        return _check(CheckOutcome.WARNING, f"no result: {last[:300]}")
    best = max(row.bandwidth_gb_s for row in rows)
    seen = f"{slots} devices, {best:.1f} GB/s for up to {rows[-1].size_bytes >> 20} MiB"
    check = _check(CheckOutcome.OK, seen)
    return check.model_copy(update={"figures": {"algorithm_bandwidth_gb_s": best}})


def _check(outcome: CheckOutcome, seen: str) -> Check:
    return Check(name=NAME, outcome=outcome, seen=seen, allowed="every sum right")
