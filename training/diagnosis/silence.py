"""The answer where no line names a failure: a proof of a good end, else the most suspicious line.

A log that shows no failure proves nothing: a process that is killed writes nothing about it. A
line is suspicious that is rare in its log and near the end of it. Pure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from perdure.training.diagnosis.counts import find_counts
from perdure.training.diagnosis.lines import is_progress, origin_of, split_lines
from perdure.training.diagnosis.recognise import Finding
from perdure.training.diagnosis.rules import Role
from perdure.training.diagnosis.series import states_done, states_failure
from perdure.training.diagnosis.stated_end import EndReason, find_stated_end
from perdure.training.recovery.faults import FaultClass

SUSPECT_RULE = "suspect"
_MAX_LINES = 2000
_PROOF_LINES = 200  # at the end, in which a good end is stated
_EXIT_0 = re.compile(
    r"(?i)\bexit(?:ed)?(?: with)?(?: (?:code|status))?\s?[:=]?\s?0\b|\brc\s?[:=]\s?0\b"
    r"|\b(?:exited normally|job (?:succeeded|completed|finished)|succeeded\b)"
)
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_FAILURE_WORDS = re.compile(
    r"(?i)\b(?:err(?:or)?s?|fail\w*|abort\w*|kill\w*|fatal|panic|crash\w*|exception|refus\w+"
    r"|den(?:ied|y)|cannot|could not|can't|unable|lost|drop(?:ped)?|missing|invalid|corrupt\w*"
    r"|time[ds]?[ -]?out|unreachable|unexpected\w*|giving up|stopped|stopping|interrupted)\b"
)
_WORDS = re.compile(r"[^\W\d_]{2}")
WHY = (
    "No line names a failure, and none shows that the training came to a good end. This line is "
    "the most unusual one near the end."
)


@dataclass(frozen=True, slots=True)
class Suspect:
    """The most suspicious line of a log; the higher the score, the more suspicious."""

    finding: Finding
    score: float


def has_ended_well(text: str) -> bool:
    """Whether the end of a log shows that the program came to its end without a failure.

    Args:
        text: the end of the log.
    """
    lines = split_lines(text)[-_PROOF_LINES:]
    states = [
        (number, states_done(line) or bool(_EXIT_0.search(line)))
        for number, line in enumerate(lines)
        if states_failure(line) or states_done(line) or _EXIT_0.search(line)
    ]
    if states:
        return states[-1][1] and not states_failure(lines[states[-1][0]])
    stated = find_stated_end(text)
    if stated is not None:
        return stated.reason is EndReason.GOAL
    counts = [count for count in find_counts(text) if count.is_of_steps]
    return bool(counts) and all(count.step >= count.target for count in counts)


def find_suspect(text: str, *, year: int) -> Suspect | None:
    """Find the line that is rarest and nearest to the end; None in a log without words.

    Args:
        text: the end of the log.
        year: of times that have none.
    """
    lines = [line for line in text.splitlines()[-_MAX_LINES:] if _WORDS.search(line)]
    if not text.endswith("\n") and any(line.startswith(lines[-1]) for line in lines[:-1]):
        lines.pop()  # cut off in the middle: as usual as the lines that it is the beginning of
    shapes = Counter(_NUMBERS.sub("0", line) for line in lines)
    scored = [
        (_score(line, number, lines, shapes), number)
        for number, line in enumerate(lines)
        if not is_progress(line)
    ]
    if not scored:
        return None
    score, number = max(scored)
    line = lines[number]
    finding = Finding(
        rule=SUSPECT_RULE,
        fault_class=FaultClass.UNKNOWN,
        role=Role.HINT,
        line=line,
        offset=max(0, text.rfind(line)),
        origin=origin_of(line, year=year),
        why=WHY,
    )
    return Suspect(finding, score)


def _score(line: str, number: int, lines: Sequence[str], shapes: Counter[str]) -> float:
    """Rate a line: its rarity and nearness to the end, each from 0 to 1, and words of failure."""
    if len(lines) == 1:
        return 1.0
    rarity = log(len(lines) / shapes[_NUMBERS.sub("0", line)]) / log(len(lines))
    return rarity + number / (len(lines) - 1) + bool(_FAILURE_WORDS.search(line))
