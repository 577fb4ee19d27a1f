"""When silence is a hang: limits learned from the run.

Pure: heartbeats in, verdict out. Times are seconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median

from training.monitor.heartbeat import Heartbeat, Phase

MIN_LIMIT_S = 60.0
MEDIANS = 10.0
WINDOW = 50

# A save or a restore may move terabytes: it gets the start-up limit, not the step's.
_SLOW_PHASES = frozenset({Phase.START, Phase.RESTORE, Phase.SAVE, Phase.RECOVER})
_STILL_PHASES = frozenset({Phase.DONE, Phase.STOPPED, Phase.PAUSED})


@dataclass(frozen=True, slots=True)
class Hang:
    """A verdict: which local rank is silent, for how long, and what it was doing."""

    local_rank: int
    silent_s: float
    limit_s: float
    phase: Phase
    step: int


@dataclass(slots=True)
class HangDetector:
    """Learns the step time of the local ranks and judges their silence.

    Attributes:
        start_timeout_s: limit from the start of the processes to the first step, and for saves.
        fixed_limit_s: limit given by the job; None: max(60 s, 10 x median step).
    """

    start_timeout_s: float
    fixed_limit_s: float | None = None
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _last: dict[int, tuple[int, float]] = field(default_factory=dict)

    @property
    def limit_s(self) -> float:
        """Silence allowed within a step."""
        if self.fixed_limit_s is not None:
            return self.fixed_limit_s
        if not self._steps_s:
            return self.start_timeout_s
        return max(MIN_LIMIT_S, MEDIANS * median(self._steps_s))

    def judge(
        self,
        beats: Mapping[int, Heartbeat],
        *,
        now_s: float,
        since_s: float,
        mute: Collection[int] = (),
    ) -> Hang | None:
        """The rank that has been silent longest beyond its limit, or None.

        Args:
            beats: newest heartbeat of every local rank that still runs and takes part.
            now_s: the time.
            since_s: when the processes were started.
            mute: local ranks that run but have never written a heartbeat.
        """
        worst: Hang | None = None
        if mute and now_s - since_s > self.start_timeout_s:
            worst = Hang(min(mute), now_s - since_s, self.start_timeout_s, Phase.START, -1)
        for local_rank, beat in beats.items():
            self._learn(local_rank, beat)
            if beat.phase in _STILL_PHASES:
                continue
            # The beat, not the step: a worker that saves beats when the phase changes.
            last_s = max(since_s, beat.stepped_ns / 1e9, beat.beat_ns / 1e9)
            slow = beat.phase in _SLOW_PHASES or beat.stepped_ns == 0
            limit_s = max(self.limit_s, self.start_timeout_s) if slow else self.limit_s
            silent_s = now_s - last_s
            if silent_s > limit_s and (worst is None or silent_s > worst.silent_s):
                worst = Hang(local_rank, silent_s, limit_s, beat.phase, beat.step)
        return worst

    def _learn(self, local_rank: int, beat: Heartbeat) -> None:
        stepped_s = beat.stepped_ns / 1e9
        step, before_s = self._last.get(local_rank, (beat.step, stepped_s))
        if beat.step > step and before_s > 0:
            self._steps_s.append((stepped_s - before_s) / (beat.step - step))
        self._last[local_rank] = (beat.step, stepped_s)
