"""Findings that several lines of a source show together, and the steps that its output counts.

The end of a source shows a loss that jumped, a run that prints but does not train, and the stacks
of a process that does not move. Counts of steps and epochs show whether training continued after
a line. Losses and norms are in the units of the program, times are seconds.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from perdure.training.diagnosis.lines import is_progress, origin_of, time_of
from perdure.training.diagnosis.recognise import Finding
from perdure.training.diagnosis.rules import Role
from perdure.training.recovery.faults import FaultClass, RecoverableBy

_NUMBER = r"(nan|[-+]?inf|[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)"
_LOSS = re.compile(rf"\b(?:lm |train[_ ])?loss['\"]?\s*[:=]\s*{_NUMBER}", re.IGNORECASE)
_NORM = re.compile(rf"\bgrad(?:ient)?[ _]?norm['\"]?\s*[:=]\s*{_NUMBER}", re.IGNORECASE)
_STEP_S = re.compile(r"elapsed time per iteration \((m?)s\):\s*(\d+(?:\.\d+)?)")

_DIVERGED = (
    "Go back to a checkpoint before it; then change the data order, the learning rate or the "
    "clipping."
)
_MIN_HISTORY = 3
_HISTORY = 50
_LOSS_JUMP_RATIO = 1.5
_LOSS_JUMP = 0.5
_NORM_JUMP_RATIO = 10.0
_RECOVERED_RATIO = 1.15
_FALLING_STEPS = 3
_STAYING_STEPS = 3
_RISING_STEPS = 4
_END_CHARS = 4000
_STALL_S = 1800.0
_STALL_STEPS = 10
MAX_LINES = 40_000
# How far a count must have moved on before an earlier error counts as survived.
MARGINS: Mapping[str, float] = {"step": 3, "epoch": 1, "bar": 5, "loss": 40, "done": 1}
_MIN_BAR = 20  # shorter bars load files and the like
_STEP = re.compile(
    r"\biteration\s{1,8}(\d{1,12})\s?/"
    r"|(?:\b|_)(?:global_)?[sS]teps?['\"]?\s?[=:]?\s?\[?\s?(\d{1,12})\b"
    r"|\b[iI]ter(?:ation)?['\"]?\s?[=:]?\s?\[?\s?(\d{1,12})\b"
)
_EPOCH = re.compile(r"\b[eE]poch['\"]?\s?[=:#]?\s?\[?\s?(\d{1,7}(?:\.\d+)?)")
_BAR = re.compile(r"\b(\d{1,12})/(\d{1,12}) \[\d[\d:]*<")
_NAMED_BAR = re.compile(r"^\W*(?i:train(?:ing)?|(?:global.)?steps?|iter\w*)\b[^|%]{0,20}\d%\|")
_SHOWS_LOSS = re.compile(
    r"(?:\b(?:loss|ppl|perplexity|acc)|\u635f\u5931)\w*['\"]?\s?[:=\uff1a]?\s?\d"
)
_DONE = re.compile(
    r"train_runtime|[Tt]raining (?:is )?(?:completed?|finished|done)\b"
    r"|[Ff]inished training|[Mm]odel (?:was )?saved\b"
)
# A platform or a launcher that states the end of all: what a script printed before it is void.
_FAILED = re.compile(
    r"(?i)\b(?:job|task|run|training|process|worker|pod|step|command|script|launch\w*)s?\b"
    r"[^,;.]{0,30}?\b(?:has |have |had |was )?(?:failed|crashed|aborted|was killed)\b"
    r"|\bexit(?:ed|s)?(?: with)?(?: (?:code|status))?\s?[:=]?\s?-?[1-9]\d{0,2}\b"
)
_NO_FAILURE = re.compile(r"(?i)\b(?:0|no|none|zero|without|not|if|when) [\w ]{0,20}fail")
_NAMES_RANK = re.compile(r"\b[rR]ank[ =:]?\d+|\[rank\d+\]|\[default\d+\]")
# py-spy: `Thread 1439102 (idle): "MainThread"` and `    wait (threading.py:306)`
_PY_SPY_THREAD = re.compile(r'^\s*Thread (?:0x)?[0-9A-Fa-f]+ \((?:idle|active)[^)]*\)(?:: "(.+)")?')
_PY_SPY_FRAME = re.compile(r"^\s+[\w<>.]+ \(([^():\n]+\.pyx?):\d+\)")
# faulthandler: `Current thread 0x00007f (most recent call first):` and `  File "x.py", line 3 in f`
_FAULTHANDLER_THREAD = re.compile(r"^(?:Current t|T)hread 0x[0-9a-f]+.*\(most recent call first\)")
_FAULTHANDLER_FRAME = re.compile(r'^\s+File "([^"\n]+)", line \d+ in [\w<]')

_STANDARD = re.compile(
    r"(?:^|/lib/python3\.\d+/)(?:threading|queue|selectors|socket|ssl|subprocess|signal|concurrent"
    r"/futures/\w+|multiprocessing/\w+|asyncio/\w+|contextlib|runpy)\.py$"
)


@dataclass(frozen=True, slots=True)
class _Measurement:
    """A line of metrics; norm is None where the program prints none."""

    line: str
    loss: float
    norm: float | None


def find_jump(text: str, *, year: int) -> Finding | None:
    """Find the line at which the loss left its course.

    The loss must exceed `_LOSS_JUMP_RATIO` times the median before it. The gradient norm, where
    it is printed, must confirm that, or the losses before it, which rose one after the other;
    otherwise the loss must stay up.
    """
    series = _read_measurements(text)
    losses = [measurement.loss for measurement in series]
    for index in range(_MIN_HISTORY, len(series)):
        begin = max(0, index - _HISTORY)
        if losses[index] <= _LOSS_JUMP_RATIO * min(losses[begin:index]):
            continue  # not above any median of them either
        history = series[begin:index]
        if not _has_jumped(series[index], history) or not _is_confirmed(series, index, history):
            continue
        usual = median(m.loss for m in history)
        recovered = _has_recovered(losses[index:], usual)
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


def _read_measurements(text: str) -> list[_Measurement]:
    measurements = []
    for line in text.splitlines()[-MAX_LINES:]:
        loss = _LOSS.search(line) if "oss" in line else None
        if loss is None:
            continue
        norm = _NORM.search(line)
        # A norm of zero was not computed.
        value = float(norm[1]) if norm and float(norm[1]) else None
        measurements.append(_Measurement(line.rstrip(), float(loss[1]), value))
    return measurements


def _has_jumped(now: _Measurement, history: Sequence[_Measurement]) -> bool:
    usual = median(m.loss for m in history)
    if not math.isfinite(usual) or usual <= 0 or not math.isfinite(now.loss):
        return False
    spread = median(abs(m.loss - usual) for m in history)
    return now.loss > usual * _LOSS_JUMP_RATIO and now.loss > usual + max(_LOSS_JUMP, 8 * spread)


def _is_confirmed(
    series: Sequence[_Measurement], index: int, history: Sequence[_Measurement]
) -> bool:
    now = series[index]
    norms = [m.norm for m in history if m.norm is not None and math.isfinite(m.norm)]
    last = [m.loss for m in series[index - _RISING_STEPS : index + 1]]
    rises = len(last) > _RISING_STEPS and all(a < b for a, b in pairwise(last))
    # The step that overflowed is skipped; Megatron prints the norm of the one before again.
    norm = now.norm if now.norm != series[index - 1].norm else None
    if norm is not None and norms:
        return rises or not math.isfinite(norm) or norm > _NORM_JUMP_RATIO * median(norms)
    following = [m.loss for m in series[index + 1 : index + 1 + _STAYING_STEPS]]
    usual = median(m.loss for m in history)
    stays = len(following) == _STAYING_STEPS and min(following) > usual * _LOSS_JUMP_RATIO
    return rises or stays


def find_stall(text: str, *, year: int) -> Finding | None:
    """Find the last line of a source that goes on printing long after the last step.

    Half an hour without a step, and ten steps' time, is a stall; a log that just ends is none.
    """
    lines = [line for line in text.splitlines()[-MAX_LINES:] if line.strip()]
    last = next((i for i in range(len(lines) - 1, -1, -1) if is_progress(lines[i])), None)
    if last is None:
        return None
    following = lines[last + 1 :]
    times = [(stamp, line) for line in following if (stamp := time_of(line, year=year)) is not None]
    began_s = time_of(lines[last], year=year)
    if not times:
        return None
    silent_s = times[-1][0] - (began_s if began_s is not None else times[0][0])
    if silent_s < max(_STALL_S, _STALL_STEPS * _step_duration_s(lines[last])):
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


# Steps of a start-up that are waited for without output: a log that ends with one hangs there.
_WAITS = re.compile(
    r"as PyTorch extensions root\.\.\.\s*$|All distributed processes registered\. Starting with"
    r"|Initializing TorchBackend in DeepSpeed with backend|Added key: store_based_barrier_key"
)


def find_wait(text: str, *, year: int) -> Finding | None:
    """Find the last line of a source that ends while it waits for a lock or other processes."""
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


def _has_recovered(losses: Sequence[float], usual: float) -> bool:
    """Whether the loss came back after a jump, or has come down steadily since its peak."""
    if not all(math.isfinite(loss) for loss in losses):
        return False
    since = losses[losses.index(max(losses)) :]
    falls = len(since) > _FALLING_STEPS and all(a > b for a, b in pairwise(since))
    return falls or losses[-1] <= usual * _RECOVERED_RATIO


def _step_duration_s(line: str) -> float:
    match = _STEP_S.search(line)
    if match is None:
        return 0.0
    return float(match[2]) / (1000.0 if match[1] else 1.0)


def states_done(line: str) -> bool:
    """Whether a line says that the training is done."""
    return _DONE.search(line) is not None


def states_failure(line: str) -> bool:
    """Whether a line says that the job, or a process of it, has failed."""
    return _FAILED.search(line) is not None and _NO_FAILURE.search(line) is None


class StepCounts:
    """The steps and epochs that a source counts, in the order of its output.

    Many ranks may print one step more after one of them has failed; a run that survived an error
    counts on. Values are sampled near the ends of each piece of output, not read everywhere.
    """

    def __init__(self) -> None:
        self._offsets: dict[str, list[int]] = {}
        self._values: dict[str, list[float]] = {}
        self._highest: dict[str, list[float]] = {}  # up to each sample
        self._num_losses = 0

    def read(self, text: str, offset: int) -> None:
        """Take every count from a piece of output that begins at `offset`."""
        for line in text.split("\n"):
            if not line.lstrip().startswith(("wandb:", "swanlab:")):
                counted = _read_count(line)
                if "done" in self._offsets and states_failure(line):
                    del self._offsets["done"], self._values["done"], self._highest["done"]
                if counted is not None:
                    self._add(*counted, offset)
                is_counted = counted is not None and counted[0] != "bar"
                if not is_counted and _SHOWS_LOSS.search(line) and not _NAMES_RANK.search(line):
                    self._num_losses += 1
                    self._add("loss", float(self._num_losses), offset)
            offset += len(line.encode("utf-8", "replace")) + 1

    def _add(self, kind: str, value: float, offset: int) -> None:
        highest = self._highest.setdefault(kind, [])
        self._offsets.setdefault(kind, []).append(offset)
        self._values.setdefault(kind, []).append(value)
        highest.append(max(value, highest[-1]) if highest else value)

    @property
    def has_any(self) -> bool:
        """Whether anything of a training was counted; a script may print that it is done."""
        return any(kind != "done" for kind in self._offsets)

    def goes_on_after(self, offset: int, *, kinds: Collection[str] = MARGINS) -> bool:
        """Whether a count moved on by more than the last lines of other ranks would.

        Args:
            offset: of the line after which.
            kinds: of counts that show it.
        """
        for kind, margin in MARGINS.items():
            if kind not in kinds:
                continue
            offsets = self._offsets.get(kind, [])
            cut = bisect_right(offsets, offset)
            if cut == len(offsets):
                continue
            reached = self._highest[kind][cut - 1] if cut else self._values[kind][cut]
            if kind == "done" or self._highest[kind][-1] >= reached + margin:
                return True
        return False

    def began_before(self, offset: int) -> bool:
        """Whether training counted anything before the line at `offset`, or in it.

        A process that crashes behind its progress bar leaves both on one line.
        """
        kinds = ("step", "epoch", "loss")
        return any(kind in self._offsets and self._offsets[kind][0] <= offset for kind in kinds)


def _read_count(line: str) -> tuple[str, float] | None:
    if _DONE.search(line):
        return "done", 1.0
    if match := _STEP.search(line):
        return "step", float(next(group for group in match.groups() if group))
    if (match := _BAR.search(line)) and int(match[2]) >= _MIN_BAR:
        return "step" if _NAMED_BAR.search(line) else "bar", float(match[1])
    if match := _EPOCH.search(line):
        return "epoch", float(match[1])
    return None


def find_stacks(text: str, *, year: int) -> Finding | None:
    """Find the frame where the main thread of a dump is; None without a dump."""
    lines = text.splitlines()
    heads = [(i, m) for i, line in enumerate(lines) if (m := _PY_SPY_THREAD.match(line))]
    main = next((i for i, m in heads if m[1] == "MainThread"), heads[0][0] if heads else None)
    if main is not None:
        return _finding_of_stack(lines, main, _PY_SPY_FRAME, text, year)
    current = [i for i, line in enumerate(lines) if _FAULTHANDLER_THREAD.match(line)]
    if current:
        return _finding_of_stack(lines, current[-1], _FAULTHANDLER_FRAME, text, year)
    return None


def _finding_of_stack(
    lines: list[str], head: int, frame: re.Pattern[str], text: str, year: int
) -> Finding | None:
    frames = []
    for line in lines[head + 1 :]:
        if not line[:1].isspace() or _PY_SPY_THREAD.match(line):
            break
        if match := frame.match(line):  # else a native frame, or variables
            frames.append((line, match[1]))
    if not frames:
        return None
    inner = next((line for line, path in frames if not _STANDARD.search(path)), frames[0][0])
    return Finding(
        rule="stack-dump",
        fault_class=FaultClass.HANG,
        role=Role.SYMPTOM,
        line=inner,
        offset=text.find(inner),
        origin=origin_of(inner, year=year),
        why="The stacks of a process that did not move were taken; the main thread is here.",
    )
