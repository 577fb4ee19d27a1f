"""The agent's check of its workers: do they make progress?

Session workers, and programs that write a heartbeat of their own, are judged by it; commands
without one by the steps that their output shows, and by what their processes do. Times are seconds
of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import psutil

from perdure.training.agent.processors import available_cores, waited_for_processor_s
from perdure.training.agent.worker_output import STREAMS, tail
from perdure.training.agent.worker_process import SessionActivity, read_session_activity
from perdure.training.agent.workers import WorkerGroup
from perdure.training.diagnosis.ending import shows_steps
from perdure.training.liveness.culprit import STOPPED
from perdure.training.liveness.hang_limits import (
    QUIET_FIELD,
    ActivityDetector,
    HangDetector,
    ProcessorUse,
    ProgramActivity,
    SilenceLimits,
)
from perdure.training.liveness.heartbeat import Heartbeat, Phase
from perdure.training.processes import container_processes, process_state
from perdure.training.wire.agent import AgentConfig
from perdure.training.wire.agent_status import HangReport
from perdure.training.wire.node import NodeSample

READINGS_IN_QUIET_TIME = 60.0
MAX_PERIOD_S = 30.0
COMMAND = "command"
# After its last step is saved, a program has this long without any sign of life.
DONE_QUIET_S = 120.0
TAIL_BYTES = 64 * 1024
_AWAITING = frozenset({Phase.START, Phase.RECOVER})


@dataclass(slots=True)
class HangCheck:
    """Check of the workers of one attempt.

    Attributes:
        is_command: whether the workers are commands, which need not write heartbeats.
        marker: mark of the container's processes.
        start_factor: times the limits before the first step.
        ends_slow_start: whether a hang before the first step ends the attempt; else the supervisor
            decides, who knows all nodes.
    """

    config: AgentConfig
    is_command: bool
    marker: str
    start_factor: float = 1.0
    ends_slow_start: bool = True
    _beat_detector: HangDetector = field(init=False)
    _step_detector: HangDetector = field(init=False)
    _activity_detector: ActivityDetector = field(init=False)
    _done_detector: ActivityDetector = field(init=False)
    _starts: dict[int, tuple[int, float, SessionActivity]] = field(default_factory=dict)
    _polled_s: float = 0.0
    _done_polled_s: float = 0.0
    _stopped: dict[tuple[int, int], float] = field(default_factory=dict)  # by key and process
    _awaits_coordinator: bool = False
    _command_hang: HangReport | None = None

    def __post_init__(self) -> None:
        """Create detectors that have learned nothing yet."""
        config = self.config
        limits = SilenceLimits(
            start_s=config.start_timeout_s,
            step_s=config.hang_timeout_s,
            save_s=config.save_timeout_s,
            restore_s=config.restore_timeout_s,
            evaluate_s=config.evaluate_timeout_s,
            start_factor=self.start_factor,
        )
        self._beat_detector = HangDetector(limits)
        # Output does not show the phase: a long silence may be a save.
        floor_s = max(config.start_timeout_s, config.save_timeout_s or 0.0)
        self._step_detector = HangDetector(replace(limits, floor_s=floor_s))
        self._activity_detector = ActivityDetector(config.command_quiet_s)
        self._done_detector = ActivityDetector(min(DONE_QUIET_S, config.command_quiet_s))

    @property
    def awaits_coordinator(self) -> bool:
        """Whether a rank of this node may wait for the coordinator, by its last heartbeat."""
        return self._awaits_coordinator

    @property
    def stopped_limit_s(self) -> float:
        """How long a process may be stopped by a signal."""
        return self._beat_detector.stopped_limit_s

    @property
    def shown_steps_limit_s(self) -> float | None:
        """A long time between two steps of a command's output; None: it shows none."""
        return self._step_detector.learned_s

    def check(self, group: WorkerGroup, *, sample: NodeSample | None = None) -> HangReport | None:
        """Report the worst silence beyond its limit; None when all workers make progress."""
        beats = group.heartbeats()
        now_s = time.monotonic()
        self._awaits_coordinator = any(beat.phase in _AWAITING for beat in beats.values())
        if not self.is_command:
            group.activity = _read_activity_before_steps(group, beats)
            self._note_starts(group, beats, now_s=now_s)
        verdict = self._beat_detector.judge(
            beats,
            mute=group.mute_ranks(),
            now_s=now_s,
            since_s=group.started_s,
            stopped=self._stopped_ranks(group, now_s=now_s),
        )
        if verdict is None:
            if not self.is_command or beats:
                return None
            return (
                self._judge_steps(group, now_s)
                or self._judge_done(group, sample)
                or self._judge_command(group, sample)
            )
        is_start = verdict.is_slow_start
        use = self._use_of_starts(group, now_s=now_s) if is_start else None
        return HangReport(
            rank=group.rank_of(verdict.local_rank),
            silent_s=verdict.silent_s,
            limit_s=verdict.limit_s,
            phase=verdict.phase.name.lower(),
            step=verdict.step,
            why=f"no step since its start, {use.text}" if use is not None else "",
            stopped=tuple(group.stopped_processes()),
            ends_attempt=self._ends_attempt(is_start=is_start),
            field=verdict.field,
            is_slow_start=is_start,
            is_busy=use.is_busy if use is not None else None,
        )

    def _ends_attempt(self, *, is_start: bool) -> bool:
        return self.config.hangs_end_attempt and (self.ends_slow_start or not is_start)

    def _note_starts(
        self, group: WorkerGroup, beats: Mapping[int, Heartbeat], *, now_s: float
    ) -> None:
        """Note the activity of the processes without a step, as it was at their newest beats."""
        starts, self._starts = self._starts, {}
        for local_rank, pid in group.pids().items():
            activity, beat = group.activity.get(pid), beats.get(local_rank)
            if activity is not None:
                beat_ns = beat.beat_ns if beat is not None else 0
                previous = starts.get(local_rank)
                is_same = previous is not None and previous[0] == beat_ns
                start = (beat_ns, now_s, activity)
                self._starts[local_rank] = previous if previous and is_same else start

    def _use_of_starts(self, group: WorkerGroup, *, now_s: float) -> ProcessorUse | None:
        """Measure what the busiest rank without a step has computed while it was silent.

        The others may wait for it in their first collective.
        """
        cores, pids, uses = available_cores(), group.pids(), []
        for local_rank, (_, since_s, start) in self._starts.items():
            activity, span_s = group.activity.get(pids.get(local_rank, 0)), now_s - since_s
            if activity is not None and span_s > 0:
                used_s = activity.cpu_s - start.cpu_s
                waited_s = activity.waited_s - start.waited_s
                uses.append(ProcessorUse(used_s / span_s, waited_s / span_s, cores))
        return max(uses, key=lambda use: use.cores + use.waited, default=None)

    def _stopped_ranks(self, group: WorkerGroup, *, now_s: float) -> dict[int, float]:
        """List ranks that a signal has stopped, by their keys in `heartbeats()`, and since when."""
        if group.order.is_launcher:
            return {}  # it may stop what it likes
        pids = group.pids()
        if self.is_command:
            beating = _working_pids(group)
            processes = (beating.get(local_rank, pid) for local_rank, pid in pids.items())
            pids = {pid: pid for pid in processes}
        stopped = [item for item in pids.items() if process_state(item[1]) in STOPPED]
        self._stopped = {item: self._stopped.get(item, now_s) for item in stopped}
        return {key: since_s for (key, _), since_s in self._stopped.items()}

    def _judge_steps(self, group: WorkerGroup, now_s: float) -> HangReport | None:
        """Report a command that shows steps but has shown no further one for too long."""
        beat = group.step_follower.beat() if group.step_follower is not None else None
        if beat is None:
            return None
        verdict = self._step_detector.judge({0: beat}, now_s=now_s, since_s=group.started_s)
        if verdict is None:
            return None
        return HangReport(
            rank=None,
            silent_s=verdict.silent_s,
            limit_s=verdict.limit_s,
            phase=COMMAND,
            step=verdict.step,
            why=f"no step after {verdict.step} in its output",
            stopped=tuple(group.stopped_processes()),
            ends_attempt=self.config.hangs_end_attempt,
            field=verdict.field,
        )

    def _judge_done(self, group: WorkerGroup, sample: NodeSample | None) -> HangReport | None:
        """Report a command that lives on, idle, once its last step is done and saved."""
        beat = group.step_follower.beat() if group.step_follower is not None else None
        saves = group.checkpoint_watcher.newest if group.checkpoint_watcher is not None else ()
        is_saved = beat is not None and any(save.step >= beat.step for save in saves)
        if beat is None or beat.phase is not Phase.DONE or not is_saved:
            return None
        quiet_s = self._done_detector.quiet_s
        now_s = time.monotonic()
        if now_s - self._done_polled_s < quiet_s / READINGS_IN_QUIET_TIME:
            return None
        self._done_polled_s = now_s
        inactivity = self._done_detector.judge(_read_activity(group, self.marker, sample))
        if inactivity is None:
            return None
        # Even use of a processor may be an export.
        if ProcessorUse(inactivity.cores, inactivity.waited, available_cores()).is_busy:
            return None
        return HangReport(
            rank=None,
            silent_s=inactivity.silent_s,
            limit_s=quiet_s,
            phase=COMMAND,
            step=beat.step,
            why="its last step is done and saved, and since then it shows no sign of life",
            stopped=tuple(group.stopped_processes()),
            ends_attempt=self.config.hangs_end_attempt,
        )

    def _judge_command(self, group: WorkerGroup, sample: NodeSample | None) -> HangReport | None:
        quiet_s = self.config.command_quiet_s
        period_s = min(MAX_PERIOD_S, quiet_s / READINGS_IN_QUIET_TIME)
        if time.monotonic() - self._polled_s < period_s:
            return self._command_hang
        self._polled_s = time.monotonic()
        steps = group.step_follower.beat() if group.step_follower is not None else None
        is_start = steps is None
        if is_start:
            quiet_s *= self.start_factor
        self._activity_detector.quiet_s = quiet_s
        inactivity = self._activity_detector.judge(_read_activity(group, self.marker, sample))
        self._command_hang = None
        if inactivity is not None:
            use = ProcessorUse(inactivity.cores, inactivity.waited, available_cores())
            has_printed = group.output.size_bytes(group.ranks) > 0
            is_start = is_start and not _shows_steps(group)
            since = "" if has_printed else ", nothing printed since its start"
            self._command_hang = HangReport(
                rank=None,
                silent_s=inactivity.silent_s,
                limit_s=quiet_s,
                phase=COMMAND,
                step=steps.step if steps is not None else -1,
                why=f"neither output nor I/O{since}, {use.text}",
                stopped=tuple(group.stopped_processes()),
                ends_attempt=self._ends_attempt(is_start=is_start),
                field=QUIET_FIELD,
                is_slow_start=is_start,
                is_busy=use.is_busy,
            )
        return self._command_hang


def _working_pids(group: WorkerGroup) -> Mapping[int, int]:
    """Map local ranks of a command to the processes that do their work, maybe below a shell.

    The process that writes the heartbeat does it; without a heartbeat, the one that was started.
    """
    ranks = group.command_statuses()
    return {rank.local_rank: rank.pid for rank in ranks if rank.local_rank is not None}


def _shows_steps(group: WorkerGroup) -> bool:
    """Whether the end of the output has a step, where the job does not say how to read it."""
    if group.step_follower is not None:
        return False
    paths = [group.output.path(rank, stream) for rank in group.ranks for stream in STREAMS]
    return any(shows_steps(tail(path, TAIL_BYTES)) for path in paths if path.exists())


def _read_activity_before_steps(
    group: WorkerGroup, beats: Mapping[int, Heartbeat]
) -> Mapping[int, SessionActivity]:
    """Read the activity of processes that the supervisor compares with their peers, by pid."""
    pids = []
    for local_rank, pid in group.pids().items():
        beat = beats.get(local_rank)
        if beat is None or beat.stepped_ns == 0 or beat.phase is Phase.RECOVER:
            pids.append(pid)
    return read_session_activity(pids) if pids else {}


def _read_activity(group: WorkerGroup, marker: str, sample: NodeSample | None) -> ProgramActivity:
    io_bytes, cpu_s, waited_s = 0, 0.0, 0.0
    for process in container_processes(marker, spare=group.spare):
        waited_s += waited_for_processor_s(process.pid)
        with contextlib.suppress(psutil.Error):
            with process.oneshot():
                times, counters = process.cpu_times(), process.io_counters()
            cpu_s += times.user + times.system
            io_bytes += counters.read_chars + counters.write_chars
    uses = [d.utilisation_percent for d in sample.devices] if sample is not None else []
    utilisations = [use for use in uses if use is not None]
    return ProgramActivity(
        at_s=time.monotonic(),
        log_bytes=group.output.size_bytes(group.ranks),
        io_bytes=io_bytes,
        cpu_s=cpu_s,
        utilisation_percent=sum(utilisations) / len(utilisations) if utilisations else None,
        waited_s=waited_s,
    )
