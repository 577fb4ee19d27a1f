"""One worker process of an attempt, as its agent sees it.

What a program leaves about its end in the file of torch elastic's `record`.

What an agent reports of a process beside step and phase: its heartbeat and its activity.

What processes have done so far, read from /proc: one pass for all ranks of a node.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perdure.training.agent.fork_server import ForkedProcess
from perdure.training.commands.ranks import RankReading
from perdure.training.liveness.heartbeat import Heartbeat, HeartbeatReader
from perdure.training.processes import process_state
from perdure.training.wire.agent_status import Pulse, RankStatus


@dataclass(slots=True)
class Worker:
    """The process of a rank, or a launcher with several of them.

    Attributes:
        started_s: CLOCK_MONOTONIC.
        ended_s: seconds since the epoch, None while it runs.
        stopped_by_agent: its end is no fault of its own.
        awaits_answer: its end is the coordinator's to answer.
        next_generation: generation of the process that is to take its place.
    """

    rank: int
    local_rank: int
    process: subprocess.Popen[bytes] | ForkedProcess
    error_file: Path
    heartbeat: HeartbeatReader
    started_s: float = field(default_factory=time.monotonic)
    ended_s: float | None = None
    stopped_by_agent: bool = False
    awaits_answer: bool = False
    next_generation: int | None = None

    def beat(self) -> Heartbeat | None:
        """Its newest heartbeat; of a new process none that the one before it has left."""
        beat = self.heartbeat.read()
        return beat if beat is not None and beat.pid == self.process.pid else None

    def pulse(self, activity: SessionActivity, *, is_command: bool) -> Pulse | None:
        """None of a command without heartbeat, whose processes may write none."""
        state = process_state(self.process.pid) if self.ended_s is None else ""
        beat = self.beat()
        if beat is not None:
            return pulse_of(beat, state, activity=activity)
        return None if is_command else mute_pulse(self.started_s, state, activity=activity)


def read_error(path: Path) -> dict[str, Any]:
    """What torch elastic's `record` wrote: the exception's first line, and when."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))["message"]
        if isinstance(document, str):
            return {"message": _first_line(document)}
        at_s = document.get("extraInfo", {}).get("timestamp")
        return {
            "message": _first_line(str(document.get("message", ""))),
            "at_s": float(at_s) if at_s is not None else None,
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # the program may have written anything there


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")


def pulse_of(beat: Heartbeat, state: str, *, activity: SessionActivity | None = None) -> Pulse:
    """Of a process with a heartbeat."""
    now_ns = time.monotonic_ns()
    done = activity or SessionActivity()
    return Pulse(
        entered=beat.entered,
        left=beat.left,
        operation=beat.operation,
        waited_s=beat.waited_ns / 1e9,
        data_s=beat.data_ns / 1e9,
        latency_s=beat.latency_ns / 1e9,
        beat_s=max(0.0, (now_ns - beat.beat_ns) / 1e9),
        step_age_s=max(0.0, (now_ns - beat.stepped_ns) / 1e9) if beat.stepped_ns else None,
        process_state=state,
        cpu_s=done.cpu_s,
        io_bytes=done.io_bytes,
    )


def mute_pulse(started_s: float, state: str, *, activity: SessionActivity) -> Pulse:
    """Of a process that has written no heartbeat since it was started (CLOCK_MONOTONIC)."""
    return Pulse(
        entered=0,
        left=0,
        beat_s=max(0.0, time.monotonic() - started_s),
        process_state=state,
        cpu_s=activity.cpu_s,
        io_bytes=activity.io_bytes,
    )


def status_of_rank(reading: RankReading) -> RankStatus:
    """Of a rank that a command has started."""
    beat = reading.beat
    idle = Pulse(entered=0, left=0, process_state=reading.state)
    return RankStatus(
        rank=reading.rank,
        local_rank=reading.local_rank,
        pid=reading.pid,
        step=beat.step if beat is not None else None,
        phase=beat.phase.name.lower() if beat is not None else None,
        generation=beat.generation if beat is not None else None,
        pulse=pulse_of(beat, reading.state) if beat is not None else idle,
    )


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


def read_session_activity(leaders: Collection[int]) -> dict[int, SessionActivity]:
    """What each session has done so far, by the pid of its leader."""
    activities = dict.fromkeys(leaders, SessionActivity())
    for name in os.listdir("/proc"):  # noqa: PTH208 the names alone, and fast
        fields = _stat(name) if name.isdigit() else None
        leader = int(fields[_SESSION]) if fields is not None else 0
        if fields is None or leader not in activities:
            continue
        ticks = sum(int(text) for text in fields[_TIMES])
        previous = activities[leader]
        cpu_s, io_bytes = previous.cpu_s + ticks / _TICKS_PER_S, previous.io_bytes + _io(name)
        activities[leader] = SessionActivity(cpu_s, io_bytes)
    return activities


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
