"""The victims of a drill among the processes of a container.

A process is recognized by the marker in its environment, its name and its command line. The
processes of a container search for each other and kill each other, so that drills work wherever a
container is: nothing outside could reach into a pod.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from perdure.training.config.drill import Victim
from perdure.training.processes import MARKER, signal_all

# A worker sends it to the agent of its container to lose the node, in a drill. The kernel drops a
# SIGKILL to a pod's first process that comes from within the pod.
NODE_LOSS = signal.SIGUSR2
KILLED = 128 + signal.SIGKILL  # exit code of a killed process, as a shell reports it

Belongs = Callable[[str], bool]  # whether a container is meant, by its marker


def processes_of(belongs: Belongs) -> list[psutil.Process]:
    """List the living processes of containers."""
    return [process for process, _ in _environments(belongs)]


def workers_of(rank: int, belongs: Belongs) -> list[psutil.Process]:
    """Find the worker process of a rank; its helpers inherit the rank but lead no session."""
    # A forked worker shows the environment of its fork server, and has the rank in its name.
    return [
        process
        for process, environ in _environments(belongs)
        if str(rank) in (environ.get("RANK"), _name(process).removeprefix("rank-"))
        and _leads_session(process)
    ]


def parts_of(part: Victim, belongs: Belongs) -> list[psutil.Process]:
    """List the processes of a kind that run beside the workers."""
    return [process for process in processes_of(belongs) if _part_of(process) is part]


def kill(processes: Sequence[psutil.Process]) -> list[int]:
    """SIGKILL processes. Returns their pids."""
    signal_all(processes, signal.SIGKILL)
    return [process.pid for process in processes]


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
    # A child of a fork server has the server's command line and a different name.
    if name.startswith("python"):
        modules["perdure.training.agent.fork_server"] = Victim.FORK_SERVER
    return next((part for module, part in modules.items() if module in command), None)


def _leads_session(process: psutil.Process) -> bool:
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return int(fields.rpartition(")")[2].split()[3]) == process.pid
