"""The agent's check of its workers: do they make progress?

Session workers, and programs that write a heartbeat of their own, are judged by it; commands
without one by what their processes do. Times are seconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field

import psutil

from training.agent.workers import WorkerGroup
from training.health.hang import Activity, ActivityDetector, HangDetector, SilenceLimits
from training.processes import container_processes
from training.wire.agent import AgentConfig, HangReport
from training.wire.node import NodeSample

READINGS_IN_QUIET_TIME = 60.0
MAX_PERIOD_S = 30.0
COMMAND = "command"


@dataclass(slots=True)
class HangCheck:
    """Judges the workers of one attempt.

    Attributes:
        config: of the agent.
        is_command: whether a command is run, which may write no heartbeat.
        marker: of the container's processes.
    """

    config: AgentConfig
    is_command: bool
    marker: str
    _detector: HangDetector = field(init=False)
    _activity: ActivityDetector = field(init=False)
    _read_s: float = 0.0

    def __post_init__(self) -> None:
        """Have detectors that know nothing yet."""
        config = self.config
        self._detector = HangDetector(
            SilenceLimits(
                start_s=config.start_timeout_s,
                step_s=config.hang_timeout_s,
                save_s=config.save_timeout_s,
                restore_s=config.restore_timeout_s,
                evaluate_s=config.evaluate_timeout_s,
            )
        )
        self._activity = ActivityDetector(config.command_quiet_s)

    def check(self, group: WorkerGroup, *, sample: NodeSample | None = None) -> HangReport | None:
        """The worst silence beyond its limit, None when all make progress."""
        beats = group.heartbeats()
        if self.is_command and not beats:
            return self._look_at_command(group, sample)
        verdict = self._detector.judge(
            beats,
            mute=group.mute_ranks(),
            now_s=time.monotonic(),
            since_s=group.started_s,
        )
        if verdict is None:
            return None
        return HangReport(
            rank=group.rank_of(verdict.local_rank),
            silent_s=verdict.silent_s,
            limit_s=verdict.limit_s,
            phase=verdict.phase.name.lower(),
            step=verdict.step,
            stopped=tuple(group.stopped_processes()),
        )

    def _look_at_command(self, group: WorkerGroup, sample: NodeSample | None) -> HangReport | None:
        quiet_s = self.config.command_quiet_s
        period_s = min(MAX_PERIOD_S, quiet_s / READINGS_IN_QUIET_TIME)
        if time.monotonic() - self._read_s < period_s:
            return None
        self._read_s = time.monotonic()
        found = self._activity.judge(_activity(group, self.marker, sample))
        if found is None:
            return None
        return HangReport(
            rank=None,
            silent_s=found.silent_s,
            limit_s=quiet_s,
            phase=COMMAND,
            step=-1,
            why=f"neither output nor I/O, {found.cores:.2f} cores in use all the while",
            stopped=tuple(group.stopped_processes()),
        )


def _activity(group: WorkerGroup, marker: str, sample: NodeSample | None) -> Activity:
    io_bytes, cpu_s = 0, 0.0
    for process in container_processes(marker, spare=group.spare):
        with contextlib.suppress(psutil.Error):
            with process.oneshot():
                times, counters = process.cpu_times(), process.io_counters()
            cpu_s += times.user + times.system
            io_bytes += counters.read_chars + counters.write_chars
    uses = [d.utilisation_percent for d in sample.devices] if sample is not None else []
    known = [use for use in uses if use is not None]
    return Activity(
        at_s=time.monotonic(),
        log_bytes=group.log_bytes(),
        io_bytes=io_bytes,
        cpu_s=cpu_s,
        utilisation_percent=sum(known) / len(known) if known else None,
    )
