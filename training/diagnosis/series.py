"""Faults that no single line shows: a loss that jumped, a run that prints but does not train.

Read from the end of a source. Losses and norms are what the program prints, times are seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from training.diagnosis.lines import is_progress, origin_of, time_of
from training.diagnosis.recognise import Finding
from training.diagnosis.rules import Role
from training.recovery.faults import FaultClass, RecoverableBy

_NUMBER = r"(nan|[-+]?inf|[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)"
_LOSS = re.compile(rf"\b(?:lm |train[_ ])?loss['\"]?\s*[:=]\s*{_NUMBER}", re.IGNORECASE)
_NORM = re.compile(rf"\bgrad(?:ient)?[ _]?norm['\"]?\s*[:=]\s*{_NUMBER}", re.IGNORECASE)
_STEP_S = re.compile(r"elapsed time per iteration \((m?)s\):\s*(\d+(?:\.\d+)?)")

_DIVERGED = (
    "Go back to a checkpoint before it; then change the data order, the learning rate or the "
    "clipping."
)
MIN_HISTORY = 3
HISTORY = 50
LOSS_JUMP_RATIO = 1.5
LOSS_JUMP = 0.5
NORM_JUMP_RATIO = 10.0
RECOVERED_RATIO = 1.15
FALLING_STEPS = 3
STAYING_STEPS = 3
RISING_STEPS = 4
_END_CHARS = 4000
STALL_S = 1800.0
STALL_STEPS = 10
MAX_LINES = 40_000


@dataclass(frozen=True, slots=True)
class Measurement:
    """One line of metrics; norm is None where the program prints none."""

    line: str
    loss: float
    norm: float | None


def find_jump(text: str, *, year: int) -> Finding | None:
    """The line at which the loss left its course, if it did.

    The loss must exceed `LOSS_JUMP_RATIO` times the median before it. The gradient norm, where
    it is printed, must confirm that, or the losses before it, which rose one after the other;
    otherwise the loss must stay up.
    """
    series = _measurements(text)
    losses = [measurement.loss for measurement in series]
    for index in range(MIN_HISTORY, len(series)):
        begin = max(0, index - HISTORY)
        if losses[index] <= LOSS_JUMP_RATIO * min(losses[begin:index]):
            continue  # not above any median of them either
        history = series[begin:index]
        if not _jumps(series[index], history) or not _confirmed(series, index, history):
            continue
        usual = median(m.loss for m in history)
        recovered = _recovers(losses[index:], usual)
        origin = origin_of(series[index].line, year=year)
        return Finding(
            rule="loss-jump",
            fault_class=FaultClass.NUMERIC_ANOMALY,
            role=Role.ROOT,
            line=series[index].line,
            offset=text.find(series[index].line),
            origin=origin,
            seen_s=origin.at_s,
            recoverable_by=RecoverableBy.RETRY if recovered else RecoverableBy.USER_FIX,
            why=f"The loss jumped from about {usual:.3g} to {series[index].loss:.3g}"
            + (" and came back by itself." if recovered else " and did not come back."),
            action="" if recovered else _DIVERGED,
        )
    return None


def _measurements(text: str) -> list[Measurement]:
    found = []
    for line in text.splitlines()[-MAX_LINES:]:
        loss = _LOSS.search(line) if "oss" in line else None
        if loss is None:
            continue
        norm = _NORM.search(line)
        # A norm of zero was not computed.
        told = float(norm[1]) if norm and float(norm[1]) else None
        found.append(Measurement(line.rstrip(), float(loss[1]), told))
    return found


def _jumps(now: Measurement, history: Sequence[Measurement]) -> bool:
    usual = median(m.loss for m in history)
    if not math.isfinite(usual) or usual <= 0 or not math.isfinite(now.loss):
        return False
    spread = median(abs(m.loss - usual) for m in history)
    return now.loss > usual * LOSS_JUMP_RATIO and now.loss > usual + max(LOSS_JUMP, 8 * spread)


def _confirmed(series: Sequence[Measurement], index: int, history: Sequence[Measurement]) -> bool:
    now = series[index]
    norms = [m.norm for m in history if m.norm is not None and math.isfinite(m.norm)]
    last = [m.loss for m in series[index - RISING_STEPS : index + 1]]
    rises = len(last) > RISING_STEPS and all(a < b for a, b in pairwise(last))
    # The step that overflowed is skipped; Megatron prints the norm of the one before again.
    norm = now.norm if now.norm != series[index - 1].norm else None
    if norm is not None and norms:
        return rises or not math.isfinite(norm) or norm > NORM_JUMP_RATIO * median(norms)
    following = [m.loss for m in series[index + 1 : index + 1 + STAYING_STEPS]]
    usual = median(m.loss for m in history)
    stays = len(following) == STAYING_STEPS and min(following) > usual * LOSS_JUMP_RATIO
    return rises or stays


def find_stall(text: str, *, year: int) -> Finding | None:
    """The last line of a source that goes on printing long after the last step.

    Half an hour without a step, and ten steps' time, is a stall; a log that just ends is none.
    """
    lines = [line for line in text.splitlines()[-MAX_LINES:] if line.strip()]
    last = next((i for i in range(len(lines) - 1, -1, -1) if is_progress(lines[i])), None)
    if last is None:
        return None
    after = lines[last + 1 :]
    times = [(stamp, line) for line in after if (stamp := time_of(line, year=year)) is not None]
    began_s = time_of(lines[last], year=year)
    if not times:
        return None
    silent_s = times[-1][0] - (began_s if began_s is not None else times[0][0])
    if silent_s < max(STALL_S, STALL_STEPS * _step_duration_s(lines[last])):
        return None
    return Finding(
        rule="stall",
        fault_class=FaultClass.HANG,
        role=Role.SYMPTOM,
        line=times[-1][1],
        offset=text.rfind(times[-1][1]),
        origin=origin_of(times[-1][1], year=year),
        seen_s=times[-1][0],
        why=f"Lines go on for {silent_s:.0f} s after the last step, but no step follows.",
    )


# Steps of a start-up that are waited for without a word: a log that ends with one hangs there.
_WAITS = re.compile(
    r"as PyTorch extensions root\.\.\.\s*$|All distributed processes registered\. Starting with"
    r"|Initializing TorchBackend in DeepSpeed with backend|Added key: store_based_barrier_key"
)


def find_wait(text: str, *, year: int) -> Finding | None:
    """The last line of a source that ends while it waits for a lock or for other processes."""
    lines = [line for line in text[-_END_CHARS:].splitlines() if line.strip(" -\t")]
    if not lines or not _WAITS.search(lines[-1]):
        return None
    return Finding(
        rule="wait",
        fault_class=FaultClass.HANG,
        role=Role.CASCADE,
        line=lines[-1],
        offset=text.rfind(lines[-1]),
        origin=origin_of(lines[-1], year=year),
        recoverable_by=RecoverableBy.USER_FIX if "extensions" in lines[-1] else None,
        why="The output ends where the program waits for a lock or for other processes.",
    )


def _recovers(losses: Sequence[float], usual: float) -> bool:
    """Whether the loss came back after a jump, or has come down steadily since its peak."""
    if not all(math.isfinite(loss) for loss in losses):
        return False
    since = losses[losses.index(max(losses)) :]
    falls = len(since) > FALLING_STEPS and all(a > b for a, b in pairwise(since))
    return falls or losses[-1] <= usual * RECOVERED_RATIO


def _step_duration_s(line: str) -> float:
    found = _STEP_S.search(line)
    if found is None:
        return 0.0
    return float(found[2]) / (1000.0 if found[1] else 1.0)
