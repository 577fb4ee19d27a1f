"""Whether training went on after a line: by the steps and epochs that the output counts.

Many ranks may print one step more after one of them has failed; a run that survived an error
counts on. Values are sampled near the ends of each piece of output, not read everywhere.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping

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
_LOSS = re.compile(r"(?:\b(?:loss|ppl|perplexity|acc)|\u635f\u5931)\w*['\"]?\s?[:=\uff1a]?\s?\d")
_DONE = re.compile(
    r"train_runtime|[Tt]raining (?:is )?(?:completed?|finished|done)\b|[Ff]inished training"
    r"|[Mm]odel (?:was )?saved\b"
)
_NAMES_RANK = re.compile(r"\b[rR]ank[ =:]?\d+|\[rank\d+\]|\[default\d+\]")


class Progress:
    """The counts of one source, in the order of its output."""

    def __init__(self) -> None:
        self._offsets: dict[str, list[int]] = {}
        self._values: dict[str, list[float]] = {}
        self._highest: dict[str, list[float]] = {}  # up to each sample
        self._num_losses = 0

    def read(self, text: str, offset: int) -> None:
        """Take over every count in a piece of output that begins at `offset`."""
        for line in text.split("\n"):
            if not line.lstrip().startswith(("wandb:", "swanlab:")):
                counted = _count(line)
                if counted is not None:
                    self._add(*counted, offset)
                is_told = counted is not None and counted[0] != "bar"
                if not is_told and _LOSS.search(line) and not _NAMES_RANK.search(line):
                    self._num_losses += 1
                    self._add("loss", float(self._num_losses), offset)
            offset += len(line.encode("utf-8", "replace")) + 1

    def _add(self, kind: str, value: float, offset: int) -> None:
        highest = self._highest.setdefault(kind, [])
        self._offsets.setdefault(kind, []).append(offset)
        self._values.setdefault(kind, []).append(value)
        highest.append(max(value, highest[-1]) if highest else value)

    def goes_on_after(self, offset: int) -> bool:
        """Whether a count moved on by more than other ranks' last words would."""
        for kind, margin in MARGINS.items():
            offsets = self._offsets.get(kind, [])
            cut = bisect_right(offsets, offset)
            if cut == len(offsets):
                continue
            before = self._highest[kind][cut - 1] if cut else self._values[kind][cut]
            if kind == "done" or self._highest[kind][-1] >= before + margin:
                return True
        return False

    def began_before(self, offset: int) -> bool:
        """Whether training counted anything before the line at `offset`, or in it.

        A process that crashes behind its progress bar leaves both on one line.
        """
        kinds = ("step", "epoch", "loss")
        return any(kind in self._offsets and self._offsets[kind][0] <= offset for kind in kinds)


def _count(line: str) -> tuple[str, float] | None:
    if _DONE.search(line):
        return "done", 1.0
    if found := _STEP.search(line):
        return "step", float(next(group for group in found.groups() if group))
    if (found := _BAR.search(line)) and int(found[2]) >= _MIN_BAR:
        return "bar", float(found[1])
    if found := _EPOCH.search(line):
        return "epoch", float(found[1])
    return None
