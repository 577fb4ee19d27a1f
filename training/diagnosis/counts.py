"""How far a program came toward its target, by its own count: iterations, steps, a bar, epochs.

The end of its output is read. A bar may be one of an evaluation or of a download: the bar of the
training shows losses, or it never begins anew while the others come and go. Pure; steps are
completed optimizer steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from perdure.training.diagnosis.lines import split_lines

ITERATION, STEP, BAR, EPOCH = "iteration", "step", "bar", "epoch"
_OF_STEPS = (ITERATION, STEP, BAR)
_OF = r"\s{0,8}(?:/|\bof\b)\s{0,8}"
_ITERATION = re.compile(rf"\biteration\s{{1,8}}(\d{{1,12}}){_OF}(\d{{1,12}})\b")  # Megatron
_STEP = re.compile(
    r"(?:\b|_)(?:[sS]teps?|STEP|[iI]ter(?:ation)?s?|[uU]pdates?)['\"]?\s?[:=#]?\s?\[?\s{0,8}"
    rf"(\d{{1,12}}){_OF}(\d{{1,12}})\b"
)
_BARE_STEP = re.compile(
    r"(?:\b|_)(?:[sS]tep|[iI]ter(?:ation)?)['\"]?\s{0,2}[:=#]?\s{0,2}\[?\s{0,8}(\d{1,12})\b()"
)
_SETTING = re.compile(
    r"(?i)\b(?:max|total|num|train|training)[-_. ](?:train(?:ing)?[-_. ])?(?:optimi[sz]ation )?"
    r"(?:steps|iters|iterations)['\"]?(?:\s?[=:]\s?|\s?\.{2,}\s?|\s)(\d[\d,]{0,14})\b"
)
_EPOCH = re.compile(rf"\b[eE]pochs?['\"]?\s?[:=#]?\s?\[?\s{{0,4}}(\d{{1,7}}){_OF}(\d{{1,7}})\b")
_BAR = re.compile(r"^([^|%]{0,60}?)\s{0,8}\d{1,3}%\|[^|]{0,200}\|\s{0,8}(\d{1,12})/(\d{1,12}) \[")
# The bar of a training has no name, or one of these.
_TRAINING = re.compile(r"(?i)^\W*(?:$|train|(?:global.?)?steps?\b|iter|optimi|updates?\b|progress)")
_OTHER = re.compile(
    r"(?i)\b(?:eval|valid|test|predict|infer|generation|generating|load|download|warm.?up"
    r"|sanity|save|saving|upload|map\b)"
)
_LOSS = re.compile(r"(?i)(?<!val )(?<!test )\bloss\b")
_MIN_BAR = 10  # shorter bars load files and the like


@dataclass(frozen=True, slots=True)
class Count:
    """The progress of a program toward its target, by its own count.

    Attributes:
        step: the last step in the output.
        target: the step where the program should end.
        stride: steps between two counts in the output.
        name: the program's word for a step.
    """

    step: int
    target: int
    stride: int
    name: str = STEP

    @property
    def is_short(self) -> bool:
        """Whether the target was not reached, even if the next count to be shown is missing."""
        return self.step + self.stride < self.target

    @property
    def is_of_steps(self) -> bool:
        """Whether it counts optimizer steps, as `steps` of the job does."""
        return self.name in _OF_STEPS

    @property
    def text(self) -> str:
        """The end that it shows, for people."""
        word = f"{self.name} " if self.name in (ITERATION, EPOCH) else ""
        return f"ended at {word}{self.step} of {self.target}"


def find_target(text: str) -> int | None:
    """Read the target from settings, such as `--max-steps 300` or `train_iters ..... 300`."""
    targets = [int(match[1].replace(",", "")) for match in _SETTING.finditer(text)]
    return next((target for target in reversed(targets) if target > 0), None)


def find_counts(text: str, *, setting: int | None = None) -> list[Count]:
    """Read the last count of each kind in a program's output.

    Args:
        text: the end of the output.
        setting: target in the settings of the program, for steps that are printed without one.
    """
    lines = split_lines(text)
    counts = [
        _last_count(ITERATION, _read(lines, _ITERATION)),
        _last_count(STEP, _read([line for line in lines if not _ITERATION.search(line)], _STEP)),
        _last_bar(lines),
        _last_count(EPOCH, _read(lines, _EPOCH)),
    ]
    readings = [count for count in counts if count is not None]
    if not any(count.is_of_steps for count in readings):
        target = find_target(text) or setting
        bare = ((step, target or 0) for step, _ in _read(lines, _BARE_STEP))
        plain = _last_count(STEP, bare)
        return [*([plain] if plain is not None else []), *readings]
    return readings


def farthest_counts(counts: Iterable[Count]) -> list[Count]:
    """Keep the farthest count of each kind: not all nodes print, and not all the same."""
    farthest: dict[str, Count] = {}
    for count in counts:
        previous = farthest.get(count.name)
        if previous is None or count.step > previous.step:
            farthest[count.name] = count
    return list(farthest.values())


def _read(lines: Iterable[str], pattern: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    for line in lines:
        match = pattern.search(line)
        if match is not None and not _OTHER.search(line, 0, match.start()):
            yield int(match[1]), int(match[2] or 0)


def _last_count(name: str, readings: Iterable[tuple[int, int]]) -> Count | None:
    steps = list(readings)
    if not steps or steps[-1][1] <= 0:
        return None
    step, target = steps[-1]
    if name == STEP and len(steps) > 1 and {shown for shown, _ in steps} == {step}:
        return None  # the first step of each epoch, and no other, is printed
    earlier = next((other for other, _ in reversed(steps) if other < step), 0)
    return Count(step, target, step - earlier, name)


def _last_bar(lines: Iterable[str]) -> Count | None:
    """Choose the bar of the training among those without another name."""
    bars: dict[int, list[int]] = {}  # in the order in which they were drawn last
    with_losses: set[int] = set()
    total = 0
    for line in lines:
        match = _BAR.search(line)
        if match is not None:
            total = int(match[3]) if _TRAINING.search(match[1]) else 0
        if total < _MIN_BAR:
            continue
        if match is not None:
            bars[total] = [*bars.pop(total, ()), int(match[2])]
        if _LOSS.search(line) and not _OTHER.search(line):
            with_losses.add(total)
    whole = {total: steps for total, steps in bars.items() if not _begins_anew(steps)}
    trained = {total: steps for total, steps in whole.items() if total in with_losses}
    chosen = trained or _unfinished(whole) or whole or bars
    if not chosen:
        return None
    total = list(chosen)[-1]
    return _last_count(BAR, ((step, total) for step in chosen[total]))


def _begins_anew(steps: Sequence[int]) -> bool:
    return any(later < earlier for earlier, later in pairwise(steps))


def _unfinished(bars: Mapping[int, list[int]]) -> dict[int, list[int]]:
    return {total: steps for total, steps in bars.items() if steps[-1] < total}
