"""Processes and ports of this machine.

Every process of a container inherits a marker variable; together with the subreaper flag it lets
no process get away, even one that changes its session and parent: not a data loader, not a
torchrun child in a session of its own. Times are seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import math
import os
import re
import resource
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

MARKER = "PERDURE_CONTAINER"
PRELOAD = "PERDURE_PRELOAD"  # in the environment of a fork server: names of modules
_TRACKER_TIMEOUT_S = 2.0
# Some programs close every number up to the limit.
_MOST_FILES = 1 << 20
RESOLVE_S = 60.0  # for the name of a new container, which may not be known everywhere yet
RESOLVE_PAUSE_S = 2.0
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PDEATHSIG = 1
DIES_WITH_PARENT = "PERDURE_DIES_WITH_PARENT"  # pid of the parent without which a process ends
# Launchers give a rank its number, its place on the node, and the number of all ranks: torchrun
# (accelerate, deepspeed), msrun, Open MPI, MPICH and Intel MPI.
_RANK_NAMES = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("RANK_ID", "DEVICE_ID", "RANK_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    ("MS_NODE_ID", "DEVICE_ID", "MS_WORKER_NUM"),
)
# accelerate 1.15 starts one process without a rank where it is told of no second one.
_ALONE = "ACCELERATE_MIXED_PRECISION"
LAUNCHER = re.compile(
    r"(?<![\w.-])(torchrun|msrun|mpirun|deepspeed|torch\.distributed\.(run|launch)"
    r"|accelerate)(?![\w-])"
)
RANK_VARIABLES = frozenset(rank for rank, _, _ in _RANK_NAMES)
Recorded = tuple[int, float]  # pid and start of a process without the mark
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def become_subreaper() -> None:
    """Adopt orphaned descendants in this process instead of init."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with_parent(parent_pid: int) -> None:
    """Have SIGTERM sent to this process when the thread that started it ends.

    Args:
        parent_pid: of that thread's process, which may have ended already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        raise SystemExit(f"process {parent_pid}, which started this one, has ended")


def reap_adopted(own_pids: Collection[int]) -> dict[int, int]:
    """Collect the exit codes of ended children but those in `own_pids`, whose owners do."""
    codes: dict[int, int] = {}
    # Mostly there is none: one call of the kernel, where looking for them reads all of /proc.
    with contextlib.suppress(ChildProcessError):
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return codes
    for child in psutil.Process().children():
        if child.pid in own_pids:
            continue
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if child.status() == psutil.STATUS_ZOMBIE:
                pid, status = os.waitpid(child.pid, os.WNOHANG)
                if pid:
                    codes[pid] = os.waitstatus_to_exitcode(status)
    return codes


def container_processes(
    marker: str, *, spare: Collection[int] = frozenset(), recorded: Iterable[Recorded] = ()
) -> list[psutil.Process]:
    """List all living processes of a container, but the caller and the pids in `spare`.

    They carry the marker, or descend from such a process or from the caller's own children: a
    program may start others with an environment of its own. Once the agent is dead, only its
    record shows these.
    """
    entry = f"{MARKER}={marker}".encode()
    by_pid: dict[int, psutil.Process] = {}
    for pid, started_s in recorded:
        if is_alive(pid, started_s):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                by_pid |= {member.pid: member for member in (process, *list_descendants(process))}
    for process in psutil.process_iter():
        if process.pid not in by_pid and _carries(process, entry):
            for member in (process, *list_descendants(process)):
                by_pid[member.pid] = member
    return [member for pid, member in by_pid.items() if pid != os.getpid() and pid not in spare]


def list_descendants(process: psutil.Process) -> list[psutil.Process]:
    """List the living descendants of a process."""
    try:
        children = process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [child for child in children if _lives(child)]


def _carries(process: psutil.Process, entry: bytes) -> bool:
    # Read as bytes: psutil's environ() decodes, and a process may hold any bytes.
    try:
        with open(f"/proc/{process.pid}/environ", "rb") as file:  # noqa: PTH123 procfs
            return entry in file.read().split(b"\0") and _lives(process)
    except OSError:
        return False


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def read_rank(environment: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Read the global and the local rank that a launcher put into an environment, or None."""
    if environment.get("MS_ROLE") == "MS_SCHED":
        return None, None  # msrun gives its scheduler the number of the first worker
    for rank, local_rank, _ in _RANK_NAMES:
        number, place = environment.get(rank, ""), environment.get(local_rank, "")
        if number.isdecimal():
            return int(number), int(place) if place.isdecimal() else None
    return None, None


def read_world_size(environment: Mapping[str, str]) -> int | None:
    """Read the number of ranks that a launcher put into a rank's environment; None: no rank."""
    for rank, _, world_size in _RANK_NAMES:
        if environment.get(rank, "").isdecimal():
            text = environment.get(world_size, "")
            return int(text) if text.isdecimal() else None
    return 1 if _ALONE in environment else None


def environment_of(pid: int) -> dict[str, str]:
    """Read the environment with which a process started; empty where it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 procfs
            entries = file.read().split(b"\0")
    except OSError:
        return {}
    pairs = (entry.decode(errors="surrogateescape").partition("=") for entry in entries)
    return {name: value for name, separator, value in pairs if separator}


def signal_all(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to each process that still lives."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def sort_by_start(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Sort processes by their starts: parents before children, also where pids wrap."""
    return sorted(processes, key=_started_s)


def _started_s(process: psutil.Process) -> float:
    try:
        return process.create_time()
    except psutil.NoSuchProcess:
        return math.inf


def kill_container(
    marker: str,
    *,
    spare: Collection[int] = frozenset(),
    recorded: Sequence[Recorded] = (),
    timeout_s: float = 10.0,
) -> bool:
    """SIGKILL everything in a container but the pids in `spare`, until nothing else is left.

    Returns:
        Whether nothing is left; a process in uninterruptible sleep cannot be killed.
    """
    deadline_s = time.monotonic() + timeout_s
    trackers_end_s = time.monotonic() + _TRACKER_TIMEOUT_S
    while processes := container_processes(marker, spare=spare, recorded=recorded):
        if time.monotonic() > deadline_s:
            return False
        killed = [process for process in processes if not is_tracker(process)]
        if time.monotonic() > trackers_end_s:
            killed = processes
        signal_all(sort_by_start(killed), signal.SIGKILL)
        psutil.wait_procs(processes, timeout=0.2)
    return True


def is_tracker(process: psutil.Process) -> bool:
    """Whether it is the resource tracker of Python's multiprocessing.

    It ends by itself when those that it serves have ended, and removes the semaphores and shared
    memory that they left in /dev/shm: a killed rank with four loader workers leaves 11 of them.
    """
    try:
        return any("multiprocessing.resource_tracker" in part for part in process.cmdline())
    except psutil.Error:
        return False


def is_alive(pid: int, process_started_s: float) -> bool:
    """Whether this very process lives; a reused pid does not count."""
    try:
        process = psutil.Process(pid)
        is_same = abs(process.create_time() - process_started_s) < 1.0
    except psutil.NoSuchProcess:
        return False
    return is_same and _lives(process)


def free_port(host: str = "127.0.0.1", *, ports: Iterable[int] = (0,)) -> int:
    """Find a port of the host on which no process listens at this moment.

    Args:
        host: name or address.
        ports: to try, in order; 0 lets the system choose.

    Raises:
        OSError: none of them is free.
    """
    for port in ports:
        with socket.socket() as probe:
            # As servers bind, or a port in TIME_WAIT would look taken.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((host, port))
                return int(probe.getsockname()[1])
    raise OSError(f"{host} has no free port of those that were asked for")


def await_address(
    host: str,
    *,
    timeout_s: float = RESOLVE_S,
    resolve: Callable[[str], object] = lambda name: socket.getaddrinfo(name, None),
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str | None:
    """Wait until a name has an address, as in a container that has just started.

    Returns:
        Why it has none; None: it has one.
    """
    deadline_s = clock() + timeout_s
    while True:
        try:
            resolve(host)
        except OSError as error:
            if clock() >= deadline_s:
                return f"{host!r} has no address after {timeout_s:g} s: {error}"
        else:
            return None
        sleep(RESOLVE_PAUSE_S)


def raise_open_files() -> None:
    """Raise the soft limit of open files to the hard one; children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def address_towards(host: str, port: int) -> str | None:
    """Find the address of this machine on the way to another; None: there is no way.

    No packet is sent.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_of(host: str) -> str | None:
    """Find the network interface of this machine that has the address of a host, or None."""
    with contextlib.suppress(OSError):
        address = ipaddress.ip_address(socket.getaddrinfo(host, None)[0][4][0])
        for name, assigned in psutil.net_if_addrs().items():
            if any(_has(interface.family, interface.address, address) for interface in assigned):
                return name
    return None


def _has(family: int, assigned: str, address: _Address) -> bool:
    if family not in (socket.AF_INET, socket.AF_INET6):
        return False
    assigned_address = ipaddress.ip_address(
        assigned.partition("%")[0]
    )  # a link-local one names its interface
    # All of 127.0.0.0/8 is on the loopback interface, which has only its first address.
    return assigned_address == address or (assigned_address.is_loopback and address.is_loopback)


def oom_kills(
    read: Callable[[Path], str] = lambda path: path.read_text(encoding="ascii"),
) -> int:
    """Count the kernel's kills for memory on this host; 0 where the count is unknown."""
    try:
        lines = read(Path("/proc/vmstat")).splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def process_state(pid: int) -> str:
    """Read the kernel's letter for a process's state: R, S, D, T (stopped), Z (ended)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123 procfs
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "Z"


@dataclass(frozen=True, slots=True)
class StacksTarget:
    """A process whose stacks a diagnosis needs.

    Attributes:
        rank: rank that it is or belongs to; None for no rank.
        own_file: file to which it prints them itself on SIGUSR2; None when it does not.
        name: name of the text; empty for a rank's own process.
    """

    rank: int | None
    device: int | None
    pid: int
    own_file: Path | None
    name: str = ""
