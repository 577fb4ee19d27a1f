"""What a node knows about a failure beside its workers' output: device logs and device health.

CANN writes its own log per process (plog) into a folder that the agent chose; the tools of the
driver say how a device is. Both are read after an attempt failed, never while it runs: they are
evidence for the diagnosis, which does not depend on them. Sizes are bytes, times seconds.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from training.agent.protocol import NodeText

MAX_DEVICE_LOGS = 4
COMMAND_TIMEOUT_S = 10.0
NO_ANSWER = "the driver's tool gives no answer"
# Words of npu-smi's reference: the table with the health of every chip, then each chip's own
# error codes. hccn_tool tells about the RoCE port of a device.
TABLE_COMMANDS: Sequence[tuple[str, ...]] = (("npu-smi", "info"),)
DEVICE_COMMANDS: Sequence[tuple[str, ...]] = (
    ("npu-smi", "info", "-t", "health", "-i", "{device}"),
    ("hccn_tool", "-i", "{device}", "-link", "-g"),
    ("hccn_tool", "-i", "{device}", "-net_health", "-g"),
)


def ascend_folder(log_folder: Path, rank: int) -> Path:
    """Where CANN writes the logs of a rank (ASCEND_PROCESS_LOG_PATH)."""
    return log_folder / f"rank-{rank:05d}.ascend"


def device_logs(log_folder: Path, ranks: Sequence[int], tail_bytes: int) -> Iterator[NodeText]:
    """The ends of the newest device logs of each rank."""
    for rank in ranks:
        files = [p for p in ascend_folder(log_folder, rank).rglob("*.log") if p.is_file()]
        files.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in sorted(files[:MAX_DEVICE_LOGS]):
            yield NodeText(name=str(path), rank=rank, text=tail(path, tail_bytes))


def device_health(devices: Sequence[int]) -> Iterator[NodeText]:
    """What the driver's tools say, where they are installed; one that hangs ends the asking."""
    commands: list[tuple[Sequence[str], int | None]] = [(c, None) for c in TABLE_COMMANDS]
    for number in devices:
        filled = [[part.format(device=number) for part in c] for c in DEVICE_COMMANDS]
        commands += [(command, number) for command in filled]
    for command, device in commands:
        if shutil.which(command[0]) is None:
            continue
        said = _ask(command, device)
        yield said
        if said.text.startswith(NO_ANSWER):
            return


def _ask(command: Sequence[str], device: int | None) -> NodeText:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        text = done.stdout.decode(errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        text = f"{NO_ANSWER}: {error}"
    return NodeText(name=" ".join(command), device=device, text=text)


def tail(path: Path, tail_bytes: int) -> str:
    """The end of a file, bytes that are no text replaced."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - tail_bytes))
        return file.read().decode(errors="replace")
