"""What processes have done so far, read from /proc: one pass for all ranks of a node."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Of /proc/PID/stat after the name: session, then processor times, own and of ended children.
_SESSION = 3
_TIMES = slice(11, 15)
_IO = ("rchar:", "wchar:")


@dataclass(frozen=True, slots=True)
class SessionActivity:
    """Of all processes of one session.

    Attributes:
        cpu_s: processor time.
        io_bytes: read and written, through files and pipes.
    """

    cpu_s: float = 0.0
    io_bytes: int = 0


def activity_of(leaders: Collection[int]) -> dict[int, SessionActivity]:
    """What each session has done so far, by the pid of its leader."""
    found = dict.fromkeys(leaders, SessionActivity())
    for name in os.listdir("/proc"):  # noqa: PTH208 the names alone, and fast
        fields = _stat(name) if name.isdigit() else None
        leader = int(fields[_SESSION]) if fields is not None else 0
        if fields is None or leader not in found:
            continue
        ticks = sum(int(one) for one in fields[_TIMES])
        before = found[leader]
        cpu_s, io_bytes = before.cpu_s + ticks / _TICKS_PER_S, before.io_bytes + _io(name)
        found[leader] = SessionActivity(cpu_s, io_bytes)
    return found


def _stat(pid: str) -> list[str] | None:
    """The fields after the name of the program, which may itself hold anything."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123 procfs
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None  # it has just ended


def _io(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:  # noqa: PTH123 procfs
            return sum(int(line.split()[1]) for line in file if line.startswith(_IO))
    except OSError:
        return 0  # it has just ended, or belongs to another user
