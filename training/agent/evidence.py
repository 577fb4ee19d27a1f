"""What a node knows about a failure beside its workers' output: device logs, health, stacks.

CANN writes its own log per process (plog) into a folder that the agent chose; the tools of the
driver report how a device is. Both are read after an attempt failed, never while it runs: they are
evidence for the diagnosis, which does not depend on them. Sizes are bytes, times seconds.
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

from perdure.training.masking import mask_text
from perdure.training.processes import StacksTarget, process_state
from perdure.training.telemetry import vendor_tools
from perdure.training.telemetry.npu_smi import Chip, parse_table
from perdure.training.telemetry.sampling import (
    HCCN_TOOL,
    NPU_SMI,
    health_command,
    link_commands,
)
from perdure.training.telemetry.vendor_tools import NoAnswer, find_tool
from perdure.training.wire.agent import NodeLog

ASCEND_PATH = "ASCEND_PROCESS_LOG_PATH"
MAX_DEVICE_LOGS = 4
COMMAND_TIMEOUT_S = 10.0
HEALTH_DEADLINE_S = 20.0
NO_ANSWER = "the driver's tool gives no answer"


def without_secrets(texts: Iterable[NodeLog], secrets: Collection[str]) -> tuple[NodeLog, ...]:
    """The same texts, with every occurrence of a secret replaced."""
    return tuple(log.model_copy(update={"text": mask_text(log.text, secrets)}) for log in texts)


def ascend_folder(
    log_folder: Path, log_name: str, *, base: str | None = None, of: str = ""
) -> Path:
    """Where CANN writes the logs of a rank or command (ASCEND_PROCESS_LOG_PATH).

    Args:
        log_folder: of the attempt.
        log_name: how the logs of the rank begin.
        base: what the job or the container sets instead; the logs lie below it.
        of: run, node and attempt, so that below it no rank's logs are taken for another's.
    """
    return Path(base, of, log_name) if base else log_folder / f"{log_name}.ascend"


def read_device_logs(folders: Mapping[Path, int | None], tail_bytes: int) -> Iterator[NodeLog]:
    """The ends of the newest device logs of each rank; links are not followed.

    Args:
        folders: of the ranks' logs; a command has one for all of its ranks, None.
        tail_bytes: of each.
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
    """What the driver's tools report, where they are installed: the table, then each device.

    One that hangs ends the queries, and so does `HEALTH_DEADLINE_S` for all of them together.

    Args:
        devices: as workers count them, places in the table: a card may have more than one chip.
    """
    if find_tool(NPU_SMI) is None:
        return
    table = output_of((NPU_SMI, "info"), None)
    yield table
    if table.text.startswith(NO_ANSWER):
        return
    deadline_s = time.monotonic() + HEALTH_DEADLINE_S
    chips = dict(enumerate(parse_table(table.text)))
    for device in devices:
        for command in _commands(chips[device]) if device in chips else ():
            output = output_of(command, device)
            yield output
            if output.text.startswith(NO_ANSWER) or time.monotonic() > deadline_s:
                return


def _commands(chip: Chip) -> Iterator[Sequence[str]]:
    yield health_command(chip)
    if find_tool(HCCN_TOOL) is not None:
        yield from link_commands(chip)


def output_of(
    command: Sequence[str], device: int | None, *, timeout_s: float | None = None
) -> NodeLog:
    """What a program prints, or that it gives no answer in time (`COMMAND_TIMEOUT_S`)."""
    try:
        text = vendor_tools.run_tool(command, timeout_s=timeout_s or COMMAND_TIMEOUT_S)
    except NoAnswer as error:
        text = f"{NO_ANSWER}: {error}"
    return NodeLog(name=" ".join(command), device=device, text=text)


def tail(path: Path, tail_bytes: int) -> str:
    """The end of a file, bytes that are no text replaced."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - tail_bytes))
        return file.read(tail_bytes).decode(errors="replace")


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


def read_stacks(targets: Sequence[StacksTarget]) -> Sequence[NodeLog]:
    """The stacks of each process, as far as there is an answer before the deadline."""
    deadline_s = time.monotonic() + DEADLINE_S
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        return list(pool.map(lambda target: _stacks(target, deadline_s), targets))


def _stacks(target: StacksTarget, deadline_s: float) -> NodeLog:
    state = process_state(target.pid)
    text = _spied(target, is_stopped=state in "Tt", deadline_s=deadline_s)
    if text is None:
        text = _own(target) if state not in "TtZ" else None
    stacks = text if text is not None else NO_STACKS
    return NodeLog(
        name=target.name or f"stacks of rank {target.rank}",
        rank=target.rank,
        device=target.device,
        text=f"process {target.pid} is {_STATES.get(state, state)}\n{stacks}",
    )


def _spied(worker: StacksTarget, *, is_stopped: bool, deadline_s: float) -> str | None:
    """What py-spy prints; native frames need the process to be stopped for a moment."""
    program = _py_spy()
    if program is None:
        return None
    dump = [program, "dump", "--pid", str(worker.pid)]
    # Letting go of a process that was stopped before might set it going.
    tries = [([*dump, "--nonblocking"], PLAIN_TIMEOUT_S)]
    if not is_stopped:
        tries = [([*dump, "--native"], NATIVE_TIMEOUT_S), (dump, PLAIN_TIMEOUT_S), *tries]
    for command, timeout_s in tries:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return None
        output = output_of(command, worker.device, timeout_s=min(timeout_s, left_s))
        if "Thread" in output.text:
            return output.text
    return None


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _own(worker: StacksTarget) -> str | None:
    """What the process prints itself."""
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
