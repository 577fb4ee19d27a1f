"""The holders of what is in the way of a start, and the removal of what the run itself left.

Times are seconds since the epoch.
"""

from __future__ import annotations

import logging
import os
import pwd
import re
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from perdure.training.diagnosis.obstacles import SHARED_MEMORY, find_obstacles, is_in_use
from perdure.training.wire.agent_status import Obstacle, ObstacleKind

MAX_OBSTACLES = 4
MAX_NAME_CHARS = 120
_DEVICE_FILES = ("/dev/davinci{}", "/dev/nvidia{}", "/dev/accel{}")
# Names that libraries choose at random: no later process can ask for them, and they name no owner.
_RANDOM = re.compile(
    r"psm_[0-9a-f]{8}|wnsm_[0-9a-f]{8}|sem\.(?:mp-|loky-)\S+|nccl-\w+|cuda\.shm\.\S+"
    r"|(?:vader|sm)_segment\.\S+"
)
# Their inodes never change (linux/proc_ns.h).
_FIRST_PIDS, _FIRST_IPC = "pid:[4026531836]", "ipc:[4026531839]"
_NETWORK_DISKS = ("nfs", "lustre", "gpfs", "ceph", "cifs", "smb", "beegfs", "fuse.")
_LOCAL_FUSE = "fuse.fuse-overlayfs"
MAX_PID_FILE_BYTES = 32
_NUMBER = re.compile(r"\d+")
_log = logging.getLogger("perdure.agent")


def describe_obstacles(texts: Iterable[str], *, cwd: Path, since_s: float) -> tuple[Obstacle, ...]:
    """Describe what the output of an attempt says to be taken, and who holds it now.

    Args:
        texts: the ends of the output of processes that failed.
        cwd: folder of the program.
        since_s: when the run was created.
    """
    things: dict[tuple[ObstacleKind, str], None] = {}
    for text in texts:
        named = [
            (kind, str(cwd / name) if kind is ObstacleKind.FILE else name)
            for kind, name in find_obstacles(text)
        ]
        present = [o for o in named if o[0] is not ObstacleKind.FILE or os.path.lexists(o[1])]
        if not present and is_in_use(text):
            present = [(ObstacleKind.FILE, str(path)) for path in _dead_sockets(cwd, since_s)]
        things.update(dict.fromkeys(present))
    return tuple(_describe(kind, name, since_s) for kind, name in [*things][:MAX_OBSTACLES])


def _dead_sockets(folder: Path, since_s: float) -> list[Path]:
    """List the sockets of a folder that processes of this run left behind.

    The error of a Unix socket does not name its path.
    """
    with suppress(OSError):
        sockets = [path for path in folder.glob("*.sock*") if path.is_socket()]
        return [path for path in sockets if _why_not_the_runs(path, since_s) is None]
    return []


def remove_leftovers(paths: Iterable[str], *, since_s: float) -> None:
    """Remove files that the run left behind; those of others stay, and are named in the log."""
    for path in paths:
        why_not = _why_not_the_runs(Path(path), since_s)
        if why_not is None:
            _remove(Path(path))
        elif os.path.lexists(path):
            _log.warning(f"{path} is in the way and stays: {why_not}")


class SharedMemoryNames:
    """The names in /dev/shm before an attempt, to find what it leaves there.

    Args:
        folder: in place of /dev/shm.
    """

    def __init__(self, folder: Path = Path(SHARED_MEMORY)) -> None:
        self._folder = folder
        self._before = frozenset(self._list())

    def remove_new(self, pids: Collection[int]) -> None:
        """Remove what processes of an attempt that are gone left under names of their own.

        A name without a pid stays: data that is unpacked for later lives has such a name.

        Args:
            pids: processes of the attempt, none of which lives.
        """
        new = [name for name in self._list() if name not in self._before]
        for name in new:
            is_random = _RANDOM.fullmatch(name) is not None and _sees_all_holders()
            if (is_random or _has_pid(name, new, pids)) and _why_not_the_runs(
                self._folder / name, 0.0
            ) is None:
                _remove(self._folder / name)

    def _list(self) -> list[str]:
        try:
            return sorted(path.name for path in self._folder.iterdir())
        except OSError:
            return []


def _has_pid(name: str, names: Iterable[str], pids: Collection[int]) -> bool:
    """Whether each name of the same form has the number of a process; else they are counted."""
    form = _NUMBER.sub("#", name)
    alike = (other for other in names if _NUMBER.sub("#", other) == form)
    return all(any(int(n) in pids for n in _NUMBER.findall(other)) for other in alike)


def _sees_all_holders() -> bool:
    """Whether no process that this one cannot see may have the same /dev/shm."""
    try:
        pids, ipc = (str(Path(f"/proc/self/ns/{name}").readlink()) for name in ("pid", "ipc"))
    except OSError:
        return False
    return pids == _FIRST_PIDS or ipc != _FIRST_IPC


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        _log.warning(f"{path}, which a killed process left, cannot be removed: {error}")
        return
    _log.info(f"{path} is removed: a killed process left it")


def _why_not_the_runs(path: Path, since_s: float) -> str | None:
    """Explain why a file may not be removed; None: it is the run's, and nobody holds it."""
    try:
        status = path.lstat()
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if stat.S_ISDIR(status.st_mode) or stat.S_ISLNK(status.st_mode):
        return "it is no file"
    if status.st_uid != os.geteuid():
        return f"it belongs to {_user_name(status.st_uid)}"
    if status.st_ctime < since_s:
        return "it was there before the run"
    if _is_on_network(path):
        return "other machines see it, too"
    pid = _pid_in(path, status)
    holder = next(_holders_of_file(path, status), None) or pid
    return f"it is held by {_name(holder)}" if holder is not None else None


def _is_on_network(path: Path) -> bool:
    """Whether a file is on a file system that processes of other machines may use."""
    partitions = [p for p in psutil.disk_partitions(all=True) if path.is_relative_to(p.mountpoint)]
    kind = max(partitions, key=lambda p: len(p.mountpoint)).fstype if partitions else ""
    return kind.startswith(_NETWORK_DISKS) and kind != _LOCAL_FUSE


def _pid_in(path: Path, status: os.stat_result) -> psutil.Process | None:
    """Find the living process that a pid or lock file names: it need not be open."""
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_PID_FILE_BYTES:
        return None
    with suppress(OSError, ValueError, IndexError, psutil.Error):
        return psutil.Process(int(path.read_text().split()[0]))
    return None


def _describe(kind: ObstacleKind, name: str, since_s: float) -> Obstacle:
    if kind is ObstacleKind.FILE:
        return _describe_file(name, since_s)
    if kind is ObstacleKind.PORT:
        where, holders = f"port {name}", list(_holders_of_port(int(name)))
    else:
        paths = [name] if name.startswith("/") else [form.format(name) for form in _DEVICE_FILES]
        present = [Path(path) for path in paths if Path(path).exists()]
        where = str(present[0]) if present else f"device {name}"
        holders = [h for path in present for h in _holders_of_file(path, path.stat())]
    names = " and ".join(map(_name, holders[:2]))
    text = (
        f"{where} is held by {names}" if names else f"no process that can be seen holds {where} now"
    )
    return Obstacle(kind=kind, name=name, text=text)


def _describe_file(name: str, since_s: float) -> Obstacle:
    why_not = _why_not_the_runs(Path(name), since_s)
    removal = "a process of this run left it, and it is removed before the next start"
    text = f"{name} is in the way: {why_not or removal}"
    return Obstacle(kind=ObstacleKind.FILE, name=name, is_of_run=why_not is None, text=text)


def _holders_of_port(port: int) -> Iterator[psutil.Process]:
    with suppress(psutil.Error):
        for connection in psutil.net_connections(kind="inet"):
            is_bound = connection.laddr and connection.laddr.port == port
            if is_bound and connection.status == psutil.CONN_LISTEN and connection.pid:
                with suppress(psutil.Error):
                    yield psutil.Process(connection.pid)


def _holders_of_file(path: Path, status: os.stat_result) -> Iterator[psutil.Process]:
    """Find processes that have a file open, mapped or, for a socket, bound."""
    bound = set(_inodes_of_socket(path)) if stat.S_ISSOCK(status.st_mode) else set()
    for process in psutil.process_iter():
        if _holds(process.pid, path, status, bound):
            yield process


def _inodes_of_socket(path: Path) -> Iterator[str]:
    with suppress(OSError):
        for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]:
            columns = line.split(maxsplit=7)
            if columns[7:] == [str(path)]:
                yield f"socket:[{columns[6]}]"


def _holds(pid: int, path: Path, status: os.stat_result, bound: Collection[str]) -> bool:
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if bound:
                    if str(link.readlink()) in bound:
                        return True
                elif os.path.samestat(link.stat(), status):
                    return True
    with suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        # By inode: glibc maps a semaphore under a first name and then gives it its own.
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
        place = f" {device} {status.st_ino} "
        return any(place in line or line.endswith(f" {path}") for line in maps.splitlines())
    return False


def _name(process: psutil.Process) -> str:
    """Name a process by its command line, pid and user."""
    try:
        words = " ".join(process.cmdline()) or process.name()
        return f"{words[:MAX_NAME_CHARS]} (pid {process.pid}, user {process.username()})"
    except psutil.Error:
        return f"pid {process.pid}"


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
