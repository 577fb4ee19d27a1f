"""What a node knows about a failure beside its workers' output: device logs and device health.

CANN writes its own log per process (plog) into a folder that the agent chose; the tools of the
driver say how a device is. Both are read after an attempt failed, never while it runs: they are
evidence for the diagnosis, which does not depend on them. Sizes are bytes, times seconds.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from training.health.monitor.sources import vendor_tools
from training.health.monitor.sources.npu_smi import Chip, parse_table
from training.health.monitor.sources.sampling import (
    HCCN_TOOL,
    NPU_SMI,
    health_command,
    link_commands,
)
from training.health.monitor.sources.vendor_tools import NoAnswer, find_tool
from training.wire.agent import NodeText

MAX_DEVICE_LOGS = 4
COMMAND_TIMEOUT_S = 10.0
HEALTH_DEADLINE_S = 20.0
NO_ANSWER = "the driver's tool gives no answer"


def ascend_folder(log_folder: Path, rank: int) -> Path:
    """Where CANN writes the logs of a rank (ASCEND_PROCESS_LOG_PATH)."""
    return log_folder / f"rank-{rank:05d}.ascend"


def device_logs(log_folder: Path, ranks: Sequence[int], tail_bytes: int) -> Iterator[NodeText]:
    """The ends of the newest device logs of each rank; links are not followed."""
    for rank in ranks:
        newest = sorted(_dated(ascend_folder(log_folder, rank)), reverse=True)[:MAX_DEVICE_LOGS]
        for path in sorted(path for _, path in newest):
            try:
                text = tail(path, tail_bytes)
            except OSError:
                continue  # rotated away meanwhile
            yield NodeText(name=str(path), rank=rank, text=text)


def _dated(folder: Path) -> Iterator[tuple[float, Path]]:
    for path in folder.rglob("*.log"):
        try:
            status = path.lstat()
        except OSError:
            continue  # rotated away meanwhile
        if stat.S_ISREG(status.st_mode):
            yield status.st_mtime, path


def device_health(devices: Sequence[int]) -> Iterator[NodeText]:
    """What the driver's tools say, where they are installed: the table, then of each device.

    One that hangs ends the asking, and so does `HEALTH_DEADLINE_S` for all of them together.

    Args:
        devices: as workers count them, places in the table: a card may have more than one chip.
    """
    if find_tool(NPU_SMI) is None:
        return
    table = ask((NPU_SMI, "info"), None)
    yield table
    if table.text.startswith(NO_ANSWER):
        return
    deadline_s = time.monotonic() + HEALTH_DEADLINE_S
    chips = dict(enumerate(parse_table(table.text)))
    for device in devices:
        for command in _commands(chips[device]) if device in chips else ():
            said = ask(command, device)
            yield said
            if said.text.startswith(NO_ANSWER) or time.monotonic() > deadline_s:
                return


def _commands(chip: Chip) -> Iterator[Sequence[str]]:
    yield health_command(chip)
    if find_tool(HCCN_TOOL) is not None:
        yield from link_commands(chip)


def ask(command: Sequence[str], device: int | None, *, timeout_s: float | None = None) -> NodeText:
    """What a program prints, or that it gives no answer in time (`COMMAND_TIMEOUT_S`)."""
    try:
        text = vendor_tools.ask(command, timeout_s=timeout_s or COMMAND_TIMEOUT_S)
    except NoAnswer as error:
        text = f"{NO_ANSWER}: {error}"
    return NodeText(name=" ".join(command), device=device, text=text)


def tail(path: Path, tail_bytes: int) -> str:
    """The end of a file, bytes that are no text replaced."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - tail_bytes))
        return file.read(tail_bytes).decode(errors="replace")
