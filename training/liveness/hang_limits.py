"""Limits of silence: when a rank, a program, or the output of all nodes is taken for a hang.

Pure: heartbeats, activity and lengths of output in, verdicts out. Times are seconds of
CLOCK_MONOTONIC.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from perdure.training.liveness.heartbeat import Heartbeat, Phase

EVEN_SHARE = 6  # the last sixth of the time has to be even
MIN_READINGS = 4
EVEN_CORES = 0.1
EVEN_PERCENT = 5.0
MIN_LIMIT_S = 60.0
MEDIANS = 10.0
WINDOW = 50
BUSY_SHARE = 0.5  # of one processor, or of what the node has, where that is less

STEP_FIELD = "restart.hang_timeout_s"
START_FIELD = "restart.start_timeout_s"
QUIET_FIELD = "watch.command_quiet_s"
OUTPUT_FIELD = "watch.output_quiet_s"
RESTORE_FIELD = "watch.restore_timeout_s"
_FIELDS = {
    Phase.RESTORE: RESTORE_FIELD,
    Phase.SAVE: "watch.save_timeout_s",
    Phase.EVALUATE: "watch.evaluate_timeout_s",
    Phase.DONE: "watch.evaluate_timeout_s",
    Phase.STOPPED: "watch.evaluate_timeout_s",
}

_ENDING = frozenset({Phase.DONE, Phase.STOPPED})


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    """Silence allowed in each phase; None stands for the limit of a start.

    Attributes:
        start_s: from the start of the processes to the first step, and in a recovery.
        step_s: in a step, while it waits for data, and where ranks agree on a save; None:
            max(60 s, 10 x median step).
        floor_s: least limit that is learned from the steps.
        start_factor: times the limits before the first step of a process.
    """

    start_s: float
    step_s: float | None = None
    save_s: float | None = None
    restore_s: float | None = None
    evaluate_s: float | None = None
    floor_s: float = MIN_LIMIT_S
    start_factor: float = 1.0

    def limit_of(self, phase: Phase, *, has_stepped: bool, step_s: float) -> float:
        """Return the limit of a phase.

        Args:
            phase: phase of the worker.
            has_stepped: whether it has completed a step; the first step compiles and connects.
            step_s: limit of a step.
        """
        limit_s = max(self._limit_of_phase(phase, has_stepped=has_stepped), step_s)
        return limit_s if has_stepped else limit_s * self.start_factor

    def _limit_of_phase(self, phase: Phase, *, has_stepped: bool) -> float:
        if phase in _ENDING:
            # A program may do anything after its loop, such as evaluate.
            return max(self.start_s, self.save_s or 0.0, self.evaluate_s or 0.0)
        limit_s = {
            Phase.START: self.start_s,
            Phase.RECOVER: self.start_s,
            Phase.RESTORE: self.restore_s or self.start_s,
            Phase.SAVE: self.save_s or self.start_s,
            Phase.EVALUATE: self.evaluate_s or self.start_s,
        }.get(phase)
        if limit_s is None:
            limit_s = 0.0 if has_stepped else self.start_s
        return limit_s

    def field_of(self, phase: Phase, *, has_stepped: bool, step_s: float) -> str:
        """Return the field of the job that raises the limit of a phase."""
        if self._limit_of_phase(phase, has_stepped=has_stepped) >= step_s:
            return _FIELDS.get(phase, START_FIELD)
        return START_FIELD if step_s == self.start_s else STEP_FIELD


@dataclass(frozen=True, slots=True)
class Hang:
    """A local rank that is silent beyond its limit, with the phase that it was in.

    Attributes:
        field: of the job, which raises the limit.
        is_slow_start: whether its process has completed no step, and is not stopped by a signal.
    """

    local_rank: int
    silent_s: float
    limit_s: float
    phase: Phase
    step: int
    field: str
    is_slow_start: bool


@dataclass(slots=True)
class HangDetector:
    """Detector of silent local ranks, which learns their step time."""

    limits: SilenceLimits
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _last: dict[int, tuple[int, float]] = field(default_factory=dict)

    @property
    def limit_s(self) -> float:
        """Silence allowed within a step."""
        if self.limits.step_s is not None:
            return self.limits.step_s
        learned_s = self.learned_s
        return self.limits.start_s if learned_s is None else max(self.limits.floor_s, learned_s)

    @property
    def learned_s(self) -> float | None:
        """The limit that follows from the steps alone; None before the second step."""
        return MEDIANS * median(self._steps_s) if self._steps_s else None

    @property
    def stopped_limit_s(self) -> float:
        """How long a process may be stopped by a signal, in any phase.

        A stopped process does nothing, so that no phase needs more time than a step.
        """
        is_known = self.limits.step_s is not None or bool(self._steps_s)
        return self.limit_s if is_known else MIN_LIMIT_S

    def judge(
        self,
        beats: Mapping[int, Heartbeat],
        *,
        now_s: float,
        since_s: float,
        mute: Mapping[int, float] | None = None,
        stopped: Mapping[int, float] | None = None,
    ) -> Hang | None:
        """Return the rank that has been silent longest beyond its limit, or None.

        Args:
            beats: newest heartbeat of every local rank that still runs.
            now_s: the time.
            since_s: when the processes were started.
            mute: start of local ranks that run but have never written a heartbeat.
            stopped: when a signal stopped the processes of local ranks.
        """
        worst = self._longest_stopped(beats, stopped or {}, now_s=now_s)
        start_s = self.limits.start_s * self.limits.start_factor
        for local_rank, began_s in (mute or {}).items():
            silent_s = now_s - began_s
            if silent_s > start_s and (worst is None or silent_s > worst.silent_s):
                worst = Hang(local_rank, silent_s, start_s, Phase.START, -1, START_FIELD, True)
        for local_rank, beat in beats.items():
            self._learn(local_rank, beat)
            if beat.phase is Phase.PAUSED:
                continue
            # The beat, not the step: a worker that saves beats when the phase changes.
            last_s = max(since_s, beat.stepped_ns / 1e9, beat.beat_ns / 1e9)
            hang = self._hang_of(local_rank, beat, silent_s=now_s - last_s)
            if hang is not None and (worst is None or hang.silent_s > worst.silent_s):
                worst = hang
        return worst

    def _hang_of(self, local_rank: int, beat: Heartbeat, *, silent_s: float) -> Hang | None:
        limits, has_stepped, step_s = self.limits, beat.stepped_ns > 0, self.limit_s
        limit_s = limits.limit_of(beat.phase, has_stepped=has_stepped, step_s=step_s)
        if silent_s <= limit_s:
            return None
        name = limits.field_of(beat.phase, has_stepped=has_stepped, step_s=step_s)
        return Hang(local_rank, silent_s, limit_s, beat.phase, beat.step, name, not has_stepped)

    def _longest_stopped(
        self, beats: Mapping[int, Heartbeat], stopped: Mapping[int, float], *, now_s: float
    ) -> Hang | None:
        worst: Hang | None = None
        for local_rank, since_s in stopped.items():
            beat, silent_s = beats.get(local_rank), now_s - since_s
            if beat is not None and beat.phase is Phase.PAUSED:
                continue
            if silent_s > self.stopped_limit_s and (worst is None or silent_s > worst.silent_s):
                phase, step = (beat.phase, beat.step) if beat is not None else (Phase.START, -1)
                worst = Hang(
                    local_rank, silent_s, self.stopped_limit_s, phase, step, STEP_FIELD, False
                )
        return worst

    def _learn(self, local_rank: int, beat: Heartbeat) -> None:
        stepped_s = beat.stepped_ns / 1e9
        step, previous_s = self._last.get(local_rank, (beat.step, stepped_s))
        if beat.step > step and previous_s > 0:
            self._steps_s.append(beat.stride * (stepped_s - previous_s) / (beat.step - step))
        self._last[local_rank] = (beat.step, stepped_s)


@dataclass(frozen=True, slots=True)
class ProgramActivity:
    """A reading of all processes of a program on a node.

    Attributes:
        at_s: time of the reading.
        log_bytes: length of the program's output.
        io_bytes: bytes that its processes have moved through files, pipes and terminals.
        cpu_s: processor time of its processes.
        utilisation_percent: mean of the devices, None where it is not known.
        waited_s: time that its threads were ready to run and waited for a processor.
    """

    at_s: float
    log_bytes: int
    io_bytes: int
    cpu_s: float
    utilisation_percent: float | None = None
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ProcessorUse:
    """Use of processors over some time, beside what the node could give.

    Attributes:
        cores: processors in use.
        waited: processors that threads waited for, ready to run, as on a node with other work.
        available: processors that the node lets the program use.
    """

    cores: float
    waited: float
    available: float

    @property
    def is_busy(self) -> bool:
        """Whether the program computed whenever it got a processor, in one thread at least."""
        return self.cores + self.waited >= BUSY_SHARE * min(1.0, self.available)

    @property
    def text(self) -> str:
        """In words."""
        use = f"{self.cores:.2f} of {self.available:g} cores in use all the while"
        if not self.is_busy:
            return f"processors were idle, {use}"
        is_short = self.waited > self.cores
        return f"processors were busy, {use}{', and the node gave no more' if is_short else ''}"


@dataclass(frozen=True, slots=True)
class Inactivity:
    """A program without output, I/O or a change in its use of processors.

    Attributes:
        silent_s: time since output or I/O last grew.
        cores: processors in use meanwhile.
        waited: processors that its threads waited for meanwhile.
    """

    silent_s: float
    cores: float
    waited: float = 0.0


@dataclass(slots=True)
class ActivityDetector:
    """Detector of hangs by the activity of a program's processes.

    Attributes:
        quiet_s: how long neither output nor I/O may stay the same.
    """

    quiet_s: float
    _readings: deque[ProgramActivity] = field(default_factory=deque)
    _changed_s: float | None = None

    def judge(self, now: ProgramActivity) -> Inactivity | None:
        """Take in a reading. Returns None while the program shows a sign of life."""
        last = self._readings[-1] if self._readings else None
        if last is None or self._changed_s is None or _has_moved(last, now):
            self._changed_s = now.at_s
            self._readings.clear()
        self._readings.append(now)
        window_s = self.quiet_s / EVEN_SHARE
        while self._readings[0].at_s < now.at_s - window_s and len(self._readings) > MIN_READINGS:
            self._readings.popleft()
        silent_s = now.at_s - self._changed_s
        if silent_s <= self.quiet_s or len(self._readings) < MIN_READINGS:
            return None
        cores = _cores(self._readings)
        first, span_s = self._readings[0], now.at_s - self._readings[0].at_s
        uses = [r.utilisation_percent for r in self._readings if r.utilisation_percent is not None]
        if _spread(cores) > EVEN_CORES or _spread(uses) > EVEN_PERCENT:
            return None
        waited = (now.waited_s - first.waited_s) / span_s if span_s > 0 else 0.0
        return Inactivity(silent_s, sum(cores) / len(cores), waited)


def _has_moved(previous: ProgramActivity, now: ProgramActivity) -> bool:
    return (previous.log_bytes, previous.io_bytes) != (now.log_bytes, now.io_bytes)


def _cores(readings: deque[ProgramActivity]) -> list[float]:
    """Return the processors in use between each two readings."""
    pairs = zip(list(readings)[:-1], list(readings)[1:], strict=True)
    return [(b.cpu_s - a.cpu_s) / (b.at_s - a.at_s) for a, b in pairs if b.at_s > a.at_s] or [0.0]


def _spread(values: list[float]) -> float:
    return max(values) - min(values) if values else 0.0


@dataclass(slots=True)
class SilentOutputDetector:
    """Detector of silence in the output of one attempt on all nodes together.

    Many programs print from one rank alone, so that a silent node proves nothing.

    Attributes:
        limit_s: how long no node may print anything.
    """

    limit_s: float
    _sizes: dict[str, int] = field(default_factory=dict)
    _grew_s: float | None = None

    def judge(self, output_bytes: Mapping[str, int], *, now_s: float) -> float | None:
        """Take in the lengths of the output by node; nodes that give no answer are missing.

        Returns for how long no node has printed, once that is beyond the limit.
        """
        has_grown = any(self._sizes.get(node) != size for node, size in output_bytes.items())
        self._sizes.update(output_bytes)
        if has_grown or self._grew_s is None:
            self._grew_s = now_s
        silent_s = now_s - self._grew_s
        return silent_s if silent_s > self.limit_s else None
