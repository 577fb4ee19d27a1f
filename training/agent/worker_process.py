"""One worker process of an attempt, as its agent sees it."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from perdure.training.agent.activity import SessionActivity
from perdure.training.agent.evidence import process_state
from perdure.training.agent.fork_server import ForkedProcess
from perdure.training.agent.pulse import mute_pulse, pulse_of
from perdure.training.health.heartbeat import Heartbeat, HeartbeatReader
from perdure.training.wire.agent import Pulse


@dataclass(slots=True)
class Worker:
    """The process of a rank, or a launcher with several of them.

    Attributes:
        started_s: CLOCK_MONOTONIC.
        ended_s: seconds since the epoch, None while it runs.
        stopped_by_agent: its end is no fault of its own.
        is_held: its end is the coordinator's to answer.
        awaited: generation of the process that is to take its place.
    """

    rank: int
    local_rank: int
    process: subprocess.Popen[bytes] | ForkedProcess
    error_file: Path
    heartbeat: HeartbeatReader
    started_s: float = field(default_factory=time.monotonic)
    ended_s: float | None = None
    stopped_by_agent: bool = False
    is_held: bool = False
    awaited: int | None = None

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
