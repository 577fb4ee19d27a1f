"""The reason that a program itself states for its end: a signal, a limit, its goal, no sample.

An exit with 0 short of the target is judged by it. A sentence counts if training did not go on
after it: programs also announce at their start what may end them. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from perdure.training.diagnosis.lines import split_lines
from perdure.training.diagnosis.series import MARGINS, StepCounts

MAX_LINE_CHARS = 200
_STEPS = frozenset(MARGINS) - {"done", "loss"}
_LAST_LINES = 60  # a save may print a lot between the sentence and the end


class EndReason(StrEnum):
    """Why a program ended, by its own words.

    Attributes:
        SIGNAL: a signal from outside asked it to end.
        NO_SAMPLE: its data had no sample left.
        GOAL: a rule of the training was met, such as early stopping.
        LIMIT: a limit of time or of steps for one start, set by the user.
    """

    SIGNAL = "signal"
    NO_SAMPLE = "no_sample"
    GOAL = "goal"
    LIMIT = "limit"


_SIGNAL = (
    r"(?i:sig(?:term|usr[12]|int|hup|xcpu)|signal (?:number )?\(?(?:1|2|10|12|15|24)"
    r"|signal (?:term|usr[12]))\b"
)
_MAX_TIME = r"max(?:imum)?[ _](?:run.?time|wall.?(?:time|clock)|training[ _]time|duration|time)\b"
_PATTERNS: Mapping[EndReason, re.Pattern[str]] = {
    EndReason.SIGNAL: re.compile(
        r"(?i:\b(?:received|receiving|caught|got|trapped|handling|(?:interrupted|stopped)(?: by)?"
        rf"|due to|because of))\W.{{0,40}}{_SIGNAL}"
        rf"|{_SIGNAL}\W{{0,3}}(?i:(?:was |has been )?(?:received|caught|detected|trapped)"
        r"|handler (?:was )?(?:called|invoked|triggered)"
        r"|(?:saving|stopping|exiting|quitting|shutting|leaving|checkpointing|requeue))"
        r"|(?i:\b(?:termination|preemption|shutdown|interrupt|eviction) "
        r"(?:(?:signal|notice|request) )?(?:was |has been )?(?:requested|received|caught|detected))"
        r"|(?i:\b(?:received|reached) (?:a |the )?"
        r"(?:termination|preemption|shutdown|interrupt|eviction|stop signal)\b)"
        r"|(?i:\bauto-?requeue signal\b)"
        r"|(?i:\b(?:KeyboardInterrupt|ctrl[-+]c)\b.{0,10}\b(?:caught|pressed|received|detected)\b)"
        r"|(?i:\bnode (?:is|was) (?:being )?drain(?:ed|ing)\b)"
        # Chinese: received, or caught, a signal
        r"|\u6536\u5230.{0,10}(?:SIG[A-Z]{2}|\u4fe1\u53f7)|\u6355\u83b7.{0,10}\u4fe1\u53f7"
        r"|(?i:\b(?:was|has been|is being|got) (?:preempted|evicted)\b)"
        r"|(?i:\bpreempted\b.{0,40}\b(?:saving|checkpoint|exit|stop))"
    ),
    EndReason.NO_SAMPLE: re.compile(
        r"\bsingle sample in your epoch_iterator"
        r"|(?i:\bno (?:more )?(?:samples?|data|batch(?:es)?|documents?)\b.{0,12}"
        r"\b(?:left|remain\w*|available|to (?:train|consume))\b)"
        r"|(?i:\bno more (?:samples?|data|batch(?:es)?|documents?|items)\W*$)"
        r"|(?i:\b(?:data ?(?:set|loader|iterator|stream)?|stream|iterator) "
        r"(?:(?:is|was) empty|(?:(?:is|was|has been) )?(?:fully )?"
        r"(?:exhausted|depleted|consumed))\b)"
        r"|(?i:\b(?:reached |hit )?(?:the )?end of (?:the )?data ?(?:set|stream)?(?: reached)?\W*$)"
        r"|\u6570\u636e\u96c6?\u5df2?(?:\u7528\u5b8c|\u8017\u5c3d|\u8bfb\u5b8c)"  # data used up
        r"|(?i:\b(?:ran|running) out of (?:data|samples|batches|documents)\b)"
    ),
    EndReason.GOAL: re.compile(
        r"(?i:\bearly.?(?:stopping|stopped)\b)"
        r"|(?i:\bearly.?stop (?:since|because|at|after|triggered)\b)"
        r"|(?i:\b(?:stopping|stopped) (?:the )?(?:training )?early\b)"
        r"|(?i:\bplateau\w*\b.{0,60}\b(?:stop|end|exit)(?:s|ping|ing)\b)"
        r"|(?i:\b(?:stopping|convergence) criteri(?:on|a) (?:is |was |has been )?"
        r"(?:met|satisfied|reached)\b)"
        r"|\bStopping training due to lr: |\bStopping\. Best iteration\b"  # fairseq, XGBoost
        r"|(?:\u89e6\u53d1|\u6ee1\u8db3)\u65e9\u505c"  # early stopping was triggered
        r"|(?i:\bdid(?: not|n't) improve\b.{0,80}\b(?:last \d+|stop))"
        r"|(?i:\bno improvement (?:for|in|over) (?:the last )?\d+)"
        r"|(?i:\bpatience\b.{0,40}\b(?:exceeded|exhausted|reached|ran out)\b)"
        r"|(?i:\b(?:reached|hit|achieved|met) (?:the |its )?(?:target|desired|goal)\b)"
        r"|(?i:\b(?:target|desired|goal)\b.{0,60}\b(?:reached|met|achieved|hit)\b)"
        r"|(?i:\b(?:training|loss|model) (?:has )?converged\b)"
        r"|`Trainer\.fit` stopped: `max_(?:steps|epochs)=\S+` reached"  # Lightning
    ),
    EndReason.LIMIT: re.compile(
        r"\bexiting program (?:at|after)\b"  # Megatron: --exit-interval, --exit-duration-in-mins
        r"|(?i:\b(?:time|duration|wall.?clock|wall.?time) (?:limit|budget)\b.{0,40}"
        r"\b(?:reached|exceeded|expired|hit)\b)"
        r"|(?i:\b(?:reached|exceeded|hit)\b.{0,20}\b(?:time|duration|wall.?clock|wall.?time) "
        r"(?:limit|budget)\b)"
        r"|(?i:\b(?:time (?:limit|budget)|wall.?clock|wall.?time)\b.{0,20}"
        r"\b(?:exhausted|used up)\b)"
        r"|(?i:\bapproaching (?:the |its )?(?:\w+ )?(?:time|wall.?time|wall.?clock) ?limit\b)"
        r"|(?i:\bnot enough (?:wall.?)?time (?:left|remaining)\b)"
        rf"|(?i:\b{_MAX_TIME}.{{0,30}}\b(?:exceeded|reached|hit|expired)\b)"
        rf"|(?i:\b(?:exceeded|reached|hit) (?:the )?{_MAX_TIME})"
        r"|\bJob has timed out\b|\bstop_time_hours: "  # submitit, fairseq
        r"|`Trainer\.fit` stopped: `max_time=.{1,60}` reached"
    ),
}
# A program announces what it would do, counts what is not there yet, or prints its settings.
_ANNOUNCED = re.compile(
    r"(?i)\b(?:if|when|whenever|upon|until|in case|waiting for|registers?|registered|registering"
    r"|install\w*|listen\w*|enabled?|disabled?|counter|not (?:yet )?(?:reached|met|triggered))\b"
    r"|\bpatience\s?[=:]|[=:]\s?(?:true|false|none)\b"
)


@dataclass(frozen=True, slots=True)
class StatedEnd:
    """The sentence of a program about its end."""

    reason: EndReason
    line: str


def find_stated_end(text: str, *, is_short: bool = False) -> StatedEnd | None:
    """Find the last sentence about the end of a program; None: it stated no reason.

    Args:
        text: the end of its output.
        is_short: whether it ended before its target. A signal then counts even if the program
            went on to the end of an epoch after it.
    """
    lines = split_lines(text)
    counts = StepCounts()
    for number, line in enumerate(lines):
        counts.read(line, number)
    stated = [(number, reason) for number, line in enumerate(lines) if (reason := _reason_of(line))]
    for number, reason in reversed(stated):
        goes_on = counts.goes_on_after(number, kinds=_STEPS)
        is_last = not goes_on and number >= len(lines) - _LAST_LINES
        if is_last or (is_short and reason is EndReason.SIGNAL):
            return StatedEnd(reason, lines[number].strip()[:MAX_LINE_CHARS])
    return None


def choose_stated_end(texts: Iterable[str], *, is_short: bool = False) -> StatedEnd | None:
    """Choose the sentence of a program with several streams; that of a signal goes first.

    Each stream is read alone: a bar on stderr does not show what followed a line of stdout.
    """
    stated = [find_stated_end(text, is_short=is_short) for text in texts]
    reasons = [end for end in stated if end is not None]
    return min(reasons, key=lambda end: end.reason is not EndReason.SIGNAL, default=None)


def _reason_of(line: str) -> EndReason | None:
    reason = next((reason for reason, words in _PATTERNS.items() if words.search(line)), None)
    is_plain = reason in (None, EndReason.NO_SAMPLE)
    return reason if is_plain or not _ANNOUNCED.search(line) else None
