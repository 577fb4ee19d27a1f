"""What an agent reports of a process beside step and phase: its heartbeat and its activity."""

from __future__ import annotations

import time

from perdure.training.agent.activity import SessionActivity
from perdure.training.agent.command import RankReading
from perdure.training.health.heartbeat import Heartbeat
from perdure.training.wire.agent import Pulse, RankStatus


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


def status_of_rank(one: RankReading) -> RankStatus:
    """Of a rank that a command has started."""
    beat = one.beat
    idle = Pulse(entered=0, left=0, process_state=one.state)
    return RankStatus(
        rank=one.rank,
        local_rank=one.local_rank,
        pid=one.pid,
        step=beat.step if beat is not None else None,
        phase=beat.phase.name.lower() if beat is not None else None,
        generation=beat.generation if beat is not None else None,
        pulse=pulse_of(beat, one.state) if beat is not None else idle,
    )
