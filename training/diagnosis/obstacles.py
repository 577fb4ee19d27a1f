"""Things on a machine in the way of a start: shared memory, locks, sockets, ports, devices.

A killed process cleans nothing up, and the next one finds its names taken. The agent says who holds
such a thing now, and whether it is the run's own. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.wire.agent_status import Obstacle, ObstacleKind

SHARED_MEMORY = "/dev/shm"  # noqa: S108 the kernel's name
_LEFT_FILE = r"\.(?:lock|lck|pid|sock|socket)"
_EXISTS = r"(?:[Ff]ile exists|already exists|exists already|is held|is locked)"
_PATH = r"[^\s'\"<>|;,()\[\]]"
# shm_open and Python's shared_memory name an object by a path of a single part.
_FILES = re.compile(
    rf"{_EXISTS}[^\n]{{0,60}}?['\" (](?P<before>/dev/shm/{_PATH}+|/[^/\s'\"]+(?=['\"])"
    rf"|{_PATH}+{_LEFT_FILE}\b)"
    rf"|(?P<after>/dev/shm/{_PATH}+|{_PATH}+{_LEFT_FILE})\b[^\n]{{0,80}}?(?:{_EXISTS}|exists:)"
)
_IN_USE = re.compile(r"EADDRINUSE|(?i:address already in use)|[Pp]ort .{0,20}(?:in use|allocated)")
_PORT = re.compile(
    r"\bport[ :=]{1,3}(\d{2,5})\b|(?<=[\w\]*'\"])(?<!\.cpp)(?<!\.hpp)(?<!\.cc)(?<!\.py):(\d{4,5})\b"
    r"|\(['\"][^'\"]*['\"], ?([\d_]{2,6})\)"
)
_SOCKET = re.compile(rf"{_PATH}+\.(?:sock|socket)\b")
_DEVICE_BUSY = re.compile(
    r"[Dd]evice.{0,60}(?:busy|in use|occupied|unavailable)|(?:busy|in use|occupied).{0,60}[Dd]evice"
    r"|(?:[Oo]pen|[Ss]et|[Aa]cquire) ?[Dd]evice.{0,60}(?:fail|error)"
)
_DEVICE = re.compile(
    r"/dev/(?:davinci|nvidia|accel)\d+|[Dd]evice(?:[ _]?[Ii][Dd])?[ :=#]{1,3}(\d+)"
)
_CONTEXT_LINES = 4  # a traceback quotes the call above the line with the error
# Classes that a line about something in the way may have by its words or type alone.
_BY_WORDS = frozenset(
    {
        FaultClass.COLLECTIVE_TIMEOUT,
        FaultClass.LAUNCH_MISCONFIGURED,
        FaultClass.STORAGE_ERROR,
        FaultClass.UNKNOWN,
        FaultClass.USER_CODE_ERROR,
    }
)


def find_obstacles(text: str) -> list[tuple[ObstacleKind, str]]:
    """Find what an output says to be taken: the paths of files, ports, devices.

    A path may be relative to the folder of the program; a device without a path is its number.
    """
    things: list[tuple[ObstacleKind, str]] = []
    lines = text.splitlines()
    for index, line in enumerate(lines):
        near = lines[max(0, index - _CONTEXT_LINES) : index + 1]
        things += ((ObstacleKind.FILE, path) for path in find_files(line))
        if is_in_use(line):
            things += ((ObstacleKind.PORT, port) for port in _find_ports(near))
            things += ((ObstacleKind.FILE, m[0]) for m in _SOCKET.finditer("\n".join(near)))
        if _DEVICE_BUSY.search(line):
            things += ((ObstacleKind.DEVICE, m[1] or m[0]) for m in _DEVICE.finditer(line))
    return list(dict.fromkeys(things))


def find_files(line: str) -> list[str]:
    """Find the files that a line says to exist already, where a process left them behind."""
    paths = (match["before"] or match["after"] for match in _FILES.finditer(line))
    return [f"{SHARED_MEMORY}{path}" if path.rfind("/") == 0 else path for path in paths]


def is_in_use(text: str) -> bool:
    """Whether a text says that an address, a port or a socket, is taken."""
    return _IN_USE.search(text) is not None


def _find_ports(lines: Sequence[str]) -> Iterator[str]:
    """Find the ports of the nearest line that has any."""
    for line in reversed(lines):
        ports = [next(filter(None, match.groups())) for match in _PORT.finditer(line)]
        if ports:
            yield from (str(int(port)) for port in ports)
            return


def judge_obstacles(fault: Fault, obstacles: Iterable[Obstacle], *, is_first: bool) -> Fault:
    """Judge a fault by what the nodes say about the things that its output names.

    Args:
        fault: by its output.
        obstacles: found by the agents when the attempt had ended.
        is_first: whether nothing of the run has run before, so that nothing of it can be left.
    """
    named = [o for o in obstacles if _concerns(o, fault)]
    if not named:
        return fault
    is_left = any(o.kind is not ObstacleKind.DEVICE for o in named)
    if is_left and not is_first and fault.fault_class in _BY_WORDS:
        fault = fault.of_class(FaultClass.LEFTOVER)
    # The next start reads the paths from the evidence.
    unnamed = [o.name for o in named if o.is_of_run and o.name not in find_files(fault.evidence)]
    if unnamed and fault.fault_class is FaultClass.LEFTOVER:
        fault = replace(fault, evidence=f"{fault.evidence} ({unnamed[0]} already exists)")
    texts = (f"{o.text[:1].upper()}{o.text[1:]}." for o in named)
    return replace(fault, explanation=" ".join((*texts, fault.explanation)).strip())


def _concerns(obstacle: Obstacle, fault: Fault) -> bool:
    """Whether a fault's line is about such a thing."""
    if fault.fault_class is FaultClass.LEFTOVER:
        return True
    match obstacle.kind:
        case ObstacleKind.FILE:
            files = find_files(fault.evidence)
            is_named = any(f"/{obstacle.name}".endswith(f"/{path}") for path in files)
            return is_named or is_in_use(fault.evidence)
        case ObstacleKind.PORT:
            return is_in_use(fault.evidence)
        case ObstacleKind.DEVICE:
            return _DEVICE_BUSY.search(fault.evidence) is not None
