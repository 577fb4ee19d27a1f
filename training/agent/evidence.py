"""Evidence on a node beside its workers' output: device logs, device health, stacks.

CANN writes a log of its own per process (plog) into a folder that the agent chose; the tools of the
driver report how a device is. Both are read after an attempt has failed, never while it runs, and
the diagnosis does not depend on them. Sizes are bytes, times seconds.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from perdure.training.agent.worker_output import tail
from perdure.training.agent.workers import WorkerGroup
from perdure.training.masking import mask_text
from perdure.training.processes import StacksTarget, process_state
from perdure.training.telemetry import vendor_tools
from perdure.training.telemetry.mounted_files import RESET_FILE, reset_codes
from perdure.training.telemetry.npu_smi import Chip, parse_table
from perdure.training.telemetry.sampling import (
    HCCN_TOOL,
    NPU_SMI,
    health_command,
    link_commands,
)
from perdure.training.telemetry.vendor_tools import NoAnswer, find_tool
from perdure.training.wire.agent import NodeLog

MAX_DEVICE_LOGS = 4
COMMAND_TIMEOUT_S = 10.0
HEALTH_DEADLINE_S = 20.0
NO_ANSWER = "the driver's tool gives no answer"
NATIVE_TIMEOUT_S = 8.0
PLAIN_TIMEOUT_S = 5.0
DEADLINE_S = 25.0
SIGNAL_WAIT_S = 1.0
AT_ONCE = 4
NO_STACKS = "no stacks: not a Python process, or it does not answer"
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped",
    "t": "traced",
    "Z": "ended",
}


def read_evidence(group: WorkerGroup, tail_bytes: int) -> tuple[NodeLog, ...]:
    """Read device logs and the output of the driver's tools, one tool after the other.

    Args:
        group: processes of the newest attempt.
        tail_bytes: length of the end of each log that is read.
    """
    # A launcher has one folder with the logs of all its ranks.
    has_ranks = not group.order.is_launcher
    folders = {group.output.device_folder(r): r if has_ranks else None for r in group.ranks}
    devices = range(group.order.slots_per_node)
    texts = (
        *read_device_logs(folders, tail_bytes),
        *read_device_health(devices),
        *read_reset_codes(len(devices)),
    )
    return _without_secrets(texts, group.output.secrets)


def read_worker_stacks(group: WorkerGroup) -> tuple[NodeLog, ...]:
    """Read the stacks of all threads of the workers; runs other programs."""
    # They show the command lines of the processes.
    return _without_secrets(read_stacks(group.stacks_targets()), group.output.secrets)


def _without_secrets(texts: Iterable[NodeLog], secrets: Collection[str]) -> tuple[NodeLog, ...]:
    return tuple(log.model_copy(update={"text": mask_text(log.text, secrets)}) for log in texts)


def read_device_logs(folders: Mapping[Path, int | None], tail_bytes: int) -> Iterator[NodeLog]:
    """Read the ends of the newest device logs of each rank; links are not followed.

    Args:
        folders: folders of the logs by rank; a command has one folder for all its ranks, None.
        tail_bytes: length of the end of each log that is read.
    """
    for folder, rank in folders.items():
        newest = sorted(_dated(folder), reverse=True)[:MAX_DEVICE_LOGS]
        for path in sorted(path for _, path in newest):
            try:
                text = tail(path, tail_bytes)
            except OSError:
                continue  # rotated away meanwhile
            yield NodeLog(name=str(path), rank=rank, text=text)


def _dated(folder: Path) -> Iterator[tuple[float, Path]]:
    for path in folder.rglob("*.log"):
        try:
            status = path.lstat()
        except OSError:
            continue  # rotated away meanwhile
        if stat.S_ISREG(status.st_mode):
            yield status.st_mtime, path


def read_device_health(devices: Sequence[int]) -> Iterator[NodeLog]:
    """Read what the driver's tools report, if installed: the table, then each device.

    A tool that hangs ends the queries; all of them together end after `HEALTH_DEADLINE_S`.

    Args:
        devices: indexes as workers count them, in the table: a card may have several chips.
    """
    if find_tool(NPU_SMI) is None:
        return
    table = run_tool((NPU_SMI, "info"), None)
    yield table
    if table.text.startswith(NO_ANSWER):
        return
    deadline_s = time.monotonic() + HEALTH_DEADLINE_S
    chips = dict(enumerate(parse_table(table.text)))
    for device in devices:
        for command in _commands(chips[device]) if device in chips else ():
            output = run_tool(command, device)
            yield output
            if output.text.startswith(NO_ANSWER) or time.monotonic() > deadline_s:
                return


def read_reset_codes(num_devices: int) -> Iterator[NodeLog]:
    """Read the codes of this node's chips in MindCluster's reset.json, where it is mounted."""
    try:
        codes = reset_codes(num_devices)
    except ValueError:
        return  # the samples of the node have the gap
    for device, chip_codes in codes.items():
        for code in chip_codes:
            level = f", level {code.level}" if code.level is not None else ""
            text = f"device {device}: fault_code: {code.code}{level}"
            yield NodeLog(name=RESET_FILE.name, device=device, text=text)


def _commands(chip: Chip) -> Iterator[Sequence[str]]:
    yield health_command(chip)
    if find_tool(HCCN_TOOL) is not None:
        yield from link_commands(chip)


def run_tool(
    command: Sequence[str], device: int | None, *, timeout_s: float | None = None
) -> NodeLog:
    """Run a program for what it prints, or note that it gives no answer in time."""
    try:
        text = vendor_tools.run_tool(command, timeout_s=timeout_s or COMMAND_TIMEOUT_S)
    except NoAnswer as error:
        text = f"{NO_ANSWER}: {error}"
    return NodeLog(name=" ".join(command), device=device, text=text)


def read_stacks(targets: Sequence[StacksTarget]) -> Sequence[NodeLog]:
    """Read the stacks of each process, if it answers before the deadline."""
    deadline_s = time.monotonic() + DEADLINE_S
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        return list(pool.map(lambda target: _stacks(target, deadline_s), targets))


def _stacks(target: StacksTarget, deadline_s: float) -> NodeLog:
    state = process_state(target.pid)
    text = _py_spy_stacks(target, is_stopped=state in "Tt", deadline_s=deadline_s)
    if text is None:
        text = _signalled_stacks(target) if state not in "TtZ" else None
    stacks = text if text is not None else NO_STACKS
    return NodeLog(
        name=target.name or f"stacks of rank {target.rank}",
        rank=target.rank,
        device=target.device,
        text=f"process {target.pid} is {_STATES.get(state, state)}\n{stacks}",
    )


def _py_spy_stacks(worker: StacksTarget, *, is_stopped: bool, deadline_s: float) -> str | None:
    """Ask py-spy; native frames need the process to be stopped for a moment."""
    program = _py_spy()
    if program is None:
        return None
    dump = [program, "dump", "--pid", str(worker.pid)]
    # Detaching from a process that was stopped already might set it going.
    tries = [([*dump, "--nonblocking"], PLAIN_TIMEOUT_S)]
    if not is_stopped:
        tries = [([*dump, "--native"], NATIVE_TIMEOUT_S), (dump, PLAIN_TIMEOUT_S), *tries]
    for command, timeout_s in tries:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return None
        output = run_tool(command, worker.device, timeout_s=min(timeout_s, left_s))
        if "Thread" in output.text:
            return output.text
    return None


def dump_stacks(pid: int) -> str | None:
    """Read the stacks of a Python process without stopping it; None where it gives none."""
    program = _py_spy()
    if program is None:
        return None
    dump = [program, "dump", "--nonblocking", "--pid", str(pid)]
    text = run_tool(dump, None, timeout_s=PLAIN_TIMEOUT_S).text
    return text if "Thread" in text else None


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _signalled_stacks(worker: StacksTarget) -> str | None:
    """Signal the process to print its stacks itself."""
    file = worker.own_file
    if file is None or not file.exists():
        return None
    size_before = file.stat().st_size
    try:
        os.kill(worker.pid, signal.SIGUSR2)
    except ProcessLookupError:
        return None
    until_s, size = time.monotonic() + SIGNAL_WAIT_S, size_before
    while time.monotonic() < until_s:
        time.sleep(0.05)
        size, last = file.stat().st_size, size
        if size > size_before and size == last:
            break
    return file.read_text(encoding="utf-8", errors="replace")[size_before:] or None
