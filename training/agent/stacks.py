"""Where the threads of a worker stand, asked from outside.

py-spy reads the memory of another process, so that it answers for one that is stopped or holds
the interpreter's lock, with native frames where the platform gives them. Where the kernel does
not allow that, a session's process prints its Python stacks itself on SIGUSR2: faulthandler
answers in the signal handler, which needs no lock. Times are seconds.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from training.agent.evidence import NO_ANSWER, ask
from training.wire.agent import NodeText

NATIVE_TIMEOUT_S = 8.0
PLAIN_TIMEOUT_S = 5.0
DEADLINE_S = 25.0
SIGNAL_WAIT_S = 1.0
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped",
    "t": "traced",
    "Z": "ended",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A worker whose stacks are wanted.

    Attributes:
        own_file: where it prints them itself on SIGUSR2; None when it does not.
    """

    rank: int
    device: int
    pid: int
    own_file: Path | None


def stacks_of(workers: Sequence[Asked]) -> Iterator[NodeText]:
    """The stacks of each worker, as far as there is an answer before the deadline."""
    deadline_s = time.monotonic() + DEADLINE_S
    for worker in workers:
        state = process_state(worker.pid)
        text = _spied(worker, is_stopped=state in "Tt", deadline_s=deadline_s)
        if text is None:
            text = _own(worker) if state not in "TtZ" else None
        told = text if text is not None else f"{NO_ANSWER}: no stacks"
        yield NodeText(
            name=f"stacks of rank {worker.rank}",
            rank=worker.rank,
            device=worker.device,
            text=f"process {worker.pid} is {_STATES.get(state, state)}\n{told}",
        )


def process_state(pid: int) -> str:
    """The kernel's letter for the state of a process: R, S, D, T (stopped), Z (ended)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123 procfs
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "Z"


def _spied(worker: Asked, *, is_stopped: bool, deadline_s: float) -> str | None:
    """What py-spy says; native frames need the process to be held for a moment."""
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
        said = ask(command, worker.device, timeout_s=min(timeout_s, left_s))
        if "Thread" in said.text:
            return said.text
    return None


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _own(worker: Asked) -> str | None:
    """What the process prints itself."""
    file = worker.own_file
    if file is None or not file.exists():
        return None
    before = file.stat().st_size
    try:
        os.kill(worker.pid, signal.SIGUSR2)
    except ProcessLookupError:
        return None
    until_s, size = time.monotonic() + SIGNAL_WAIT_S, before
    while time.monotonic() < until_s:
        time.sleep(0.05)
        size, last = file.stat().st_size, size
        if size > before and size == last:
            break
    return file.read_text(encoding="utf-8", errors="replace")[before:] or None
