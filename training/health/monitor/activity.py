"""When a program without a heartbeat hangs: nothing written, and processors used evenly.

ModelArts' rule for training jobs: if the I/O of the processes has not changed for some time,
processor and device use are sampled for a while, and if they do not change either, the job
hangs (product documentation of ModelArts, "Detecting a suspended training job";
MA_HANG_DETECT_TIME gives the time). A program that computes for that long without a word is
taken for one that hangs, there as here. Pure: readings in, verdict out. Times are seconds of
CLOCK_MONOTONIC.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

EVEN_SHARE = 6  # the last sixth of the time has to be even
MIN_READINGS = 4
EVEN_CORES = 0.1
EVEN_PERCENT = 5.0


@dataclass(frozen=True, slots=True)
class Activity:
    """One reading of all processes of a program on a node.

    Attributes:
        at_s: when.
        log_bytes: length of its output so far.
        io_bytes: read and written by its processes so far, through files, pipes and terminals.
        cpu_s: processor time of its processes so far.
        utilisation_percent: mean of the devices, None where it is not known.
    """

    at_s: float
    log_bytes: int
    io_bytes: int
    cpu_s: float
    utilisation_percent: float | None = None


@dataclass(frozen=True, slots=True)
class Standstill:
    """A verdict.

    Attributes:
        silent_s: since output or I/O last grew.
        cores: processors in use meanwhile.
    """

    silent_s: float
    cores: float


@dataclass(slots=True)
class ActivityDetector:
    """Judges a program by what its processes do.

    Attributes:
        quiet_s: how long neither output nor I/O may stay the same.
    """

    quiet_s: float
    _readings: deque[Activity] = field(default_factory=deque)
    _changed_s: float | None = None

    def judge(self, now: Activity) -> Standstill | None:
        """Take in a reading; None while the program shows a sign of life."""
        last = self._readings[-1] if self._readings else None
        if last is None or self._changed_s is None or _moved(last, now):
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
        uses = [r.utilisation_percent for r in self._readings if r.utilisation_percent is not None]
        if _spread(cores) > EVEN_CORES or _spread(uses) > EVEN_PERCENT:
            return None
        return Standstill(silent_s, sum(cores) / len(cores))


def _moved(before: Activity, now: Activity) -> bool:
    return (before.log_bytes, before.io_bytes) != (now.log_bytes, now.io_bytes)


def _cores(readings: deque[Activity]) -> list[float]:
    """Processors in use between each two readings."""
    pairs = zip(list(readings)[:-1], list(readings)[1:], strict=True)
    return [(b.cpu_s - a.cpu_s) / (b.at_s - a.at_s) for a, b in pairs if b.at_s > a.at_s] or [0.0]


def _spread(values: list[float]) -> float:
    return max(values) - min(values) if values else 0.0
