"""A process that an agent has started for an attempt: its heartbeat, its activity, its error.

Activity is read from /proc, in one pass for all ranks of a node.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from perdure.training.agent.fork_server import KILL_WAIT_S, ForkedProcess
from perdure.training.agent.processors import waited_for_processor_s
from perdure.training.commands.arguments import argument_variables, fill_in
from perdure.training.liveness.heartbeat import Heartbeat, HeartbeatReader, stacks_file
from perdure.training.processes import StacksTarget, process_state
from perdure.training.wire.agent_status import Pulse, WorkerStatus


@dataclass(slots=True)
class Worker:
    """The process of a rank, or a launcher with several of them.

    Attributes:
        started_s: CLOCK_MONOTONIC.
        ended_s: seconds since the epoch, None while it runs.
        stopped_by_agent: whether the agent ended it, so that its end is no failure.
        awaits_answer: whether the coordinator decides what follows its end.
        next_generation: generation of the process that is to replace it.
        raised: the exception that had ended its program when the agent ended the process.
        has_left_failure: whether it exited with 0, and a rank failed that it had left running.
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
    raised: str | None = None
    has_left_failure: bool = False

    @property
    def exit_code(self) -> int | None:
        """Exit code; of a process that lived on after an exception, the one it was to have."""
        if self.has_left_failure and self.process.returncode == 0:
            return 1
        return 1 if self.raised is not None and self.process.returncode else self.process.returncode

    def kill(self) -> None:
        """SIGKILL the process and wait for its end, but not for ever: a driver may hold it."""
        self.process.kill()
        if isinstance(self.process, subprocess.Popen):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(KILL_WAIT_S)

    def beat(self) -> Heartbeat | None:
        """Read its newest heartbeat, ignoring those of the process that it replaces."""
        beat = self.heartbeat.read()
        return beat if beat is not None and beat.pid == self.process.pid else None

    def stacks_target(self, folder: Path) -> StacksTarget:
        """Describe the process for a reader of stacks; its heartbeats lie in `folder`."""
        own_file = stacks_file(folder, self.local_rank)
        return StacksTarget(self.rank, self.local_rank, self.process.pid, own_file=own_file)

    def to_status(
        self,
        error: Mapping[str, Any],
        activity: SessionActivity,
        *,
        is_command: bool,
        is_early: bool,
    ) -> WorkerStatus:
        """Describe the process for a supervisor.

        Args:
            error: what its program recorded about its end, without secrets.
            activity: what its session has done.
            is_command: whether it is a command, which need not write a heartbeat.
            is_early: whether it exited with 0 before its target.
        """
        beat = self.beat()
        return WorkerStatus(
            rank=self.rank,
            local_rank=self.local_rank,
            pid=self.process.pid,
            exit_code=None if self.awaits_answer else self.exit_code,
            ended_s=None if self.awaits_answer else self.ended_s,
            error=error.get("message"),
            error_s=error.get("at_s"),
            step=beat.step if beat is not None else None,
            phase=beat.phase.name.lower() if beat is not None else None,
            stopped_by_agent=self.stopped_by_agent,
            ended_early=is_early,
            is_recovering=self.awaits_answer,
            generation=beat.generation if beat is not None else None,
            pulse=self._pulse(beat, activity, is_command=is_command),
        )

    def _pulse(
        self, beat: Heartbeat | None, activity: SessionActivity, *, is_command: bool
    ) -> Pulse | None:
        state = process_state(self.process.pid) if self.ended_s is None else ""
        if beat is not None:
            return beat.to_pulse(state, cpu_s=activity.cpu_s, io_bytes=activity.io_bytes)
        if is_command:
            return None
        return Pulse(
            entered=0,
            left=0,
            beat_s=max(0.0, time.monotonic() - self.started_s),
            process_state=state,
            cpu_s=activity.cpu_s,
            io_bytes=activity.io_bytes,
        )


def start_command(
    command: Sequence[str], cwd: str, variables: Mapping[str, str], *, stdout: Path, stderr: Path
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own; what cannot start exits with 127, as in a shell."""
    with stdout.open("ab") as out, stderr.open("ab") as err:
        try:
            return subprocess.Popen(
                fill_in(command, argument_variables(variables)),
                cwd=cwd,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            err.write(f"perdure: cannot start {command[0]!r}: {why}\n".encode())
            # A process that exits as a shell would keeps one path for failures.
            return subprocess.Popen(["/bin/sh", "-c", "exit 127"], stdout=out, stderr=err)


def read_error(path: Path) -> dict[str, Any]:
    """Read the file of torch elastic's `record`: the exception's first line, and its time."""
    try:
        document = from_json(path.read_text(encoding="utf-8"))["message"]
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


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat after the name: session; processor times, with ended children.
_SESSION = 3
_TIMES = slice(11, 15)
_IO = ("rchar:", "wchar:")


@dataclass(frozen=True, slots=True)
class SessionActivity:
    """Work of all processes of a session so far.

    Attributes:
        cpu_s: processor time.
        io_bytes: read and written, through files and pipes.
        waited_s: time that threads were ready to run and waited for a processor.
    """

    cpu_s: float = 0.0
    io_bytes: int = 0
    waited_s: float = 0.0


def read_session_activity(leaders: Collection[int]) -> dict[int, SessionActivity]:
    """Read what each session has done so far, by the pid of its leader."""
    activities = dict.fromkeys(leaders, SessionActivity())
    for name in os.listdir("/proc"):  # noqa: PTH208 the names alone, and fast
        fields = _stat(name) if name.isdigit() else None
        leader = int(fields[_SESSION]) if fields is not None else 0
        if fields is None or leader not in activities:
            continue
        ticks = sum(int(text) for text in fields[_TIMES])
        previous = activities[leader]
        activities[leader] = SessionActivity(
            previous.cpu_s + ticks / _TICKS_PER_S,
            previous.io_bytes + _io(name),
            previous.waited_s + waited_for_processor_s(int(name)),
        )
    return activities


def _stat(pid: str) -> list[str] | None:
    """Read the fields after the name of the program, which may itself hold anything."""
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
