"""What is killed from outside, found and hit in the container that it runs in.

Processes are known by the marker in their environment, their name and their command line. A
container's own processes do this to each other, so that it works wherever a container is; nobody
but them could reach into a pod. Times are seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import psutil

from perdure.training.config.drill import Victim
from perdure.training.processes import MARKER, signal_all

# To an agent of a drill, from a worker of its container: the node is to be lost now. The kernel
# drops a SIGKILL to a pod's first process that comes from within the pod.
NODE_LOSS = signal.SIGUSR2
LOSS_S = 30.0
KILLED = 128 + signal.SIGKILL  # exit code of what SIGKILL has ended, as a shell has it

Belongs = Callable[[str], bool]  # whether the container with a marker is meant


def processes_of(belongs: Belongs) -> list[psutil.Process]:
    """The living processes of containers."""
    return [process for process, _ in _environments(belongs)]


def workers_of(rank: int, belongs: Belongs) -> list[psutil.Process]:
    """The worker process of a rank; its helpers inherit the rank but not the session."""
    # A forked one shows the environment of its fork server, and has the rank in its name.
    return [
        process
        for process, environ in _environments(belongs)
        if str(rank) in (environ.get("RANK"), _name(process).removeprefix("rank-"))
        and _leads_session(process)
    ]


def parts_of(part: Victim, belongs: Belongs) -> list[psutil.Process]:
    """The processes of a kind that run beside the workers."""
    return [process for process in processes_of(belongs) if _part_of(process) is part]


def kill(processes: Sequence[psutil.Process]) -> list[int]:
    """SIGKILL processes. Returns their pids."""
    signal_all(processes, signal.SIGKILL)
    return [process.pid for process in processes]


def lose_this_node(marker: str) -> NoReturn:
    """Have the agent of this process's container lose the whole node, this process with it.

    Raises:
        RuntimeError: it did not, and so there was no fault.
    """
    agents = parts_of(Victim.AGENT, lambda candidate: candidate == marker)
    signal_all(agents, NODE_LOSS)
    time.sleep(LOSS_S)
    raise RuntimeError(f"the node was not lost: {len(agents)} agents were told to")


def become_lost_node(marker: str) -> NoReturn:
    """As an agent: be gone at once, and with it everything in its container.

    The process becomes a program (`lost_node.py`) that does the rest: no thread of the agent sees
    any of it, none of its connections stays open.
    """
    os.execv(  # noqa: S606 no shell is wanted
        sys.executable, [sys.executable, "-m", "perdure.training.injection.lost_node", marker]
    )


def _environments(belongs: Belongs) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    for process in psutil.process_iter():
        try:
            environ = process.environ() if process.status() != psutil.STATUS_ZOMBIE else {}
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if MARKER in environ and belongs(environ[MARKER]):
            yield process, environ


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _part_of(process: psutil.Process) -> Victim | None:
    try:
        name, command = process.name(), process.cmdline()
    except psutil.NoSuchProcess:
        return None
    if name == Victim.COORDINATOR:
        return Victim.COORDINATOR
    modules = {
        "perdure.training.agent": Victim.AGENT,
        "perdure.training.agent.checkpoint_server": Victim.CHECKPOINT_SERVER,
    }
    # What is forked from a fork server has its command line, and a name of its own.
    if name.startswith("python"):
        modules["perdure.training.agent.fork_server"] = Victim.FORK_SERVER
    return next((part for module, part in modules.items() if module in command), None)


def _leads_session(process: psutil.Process) -> bool:
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return int(fields.rpartition(")")[2].split()[3]) == process.pid
