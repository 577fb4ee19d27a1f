"""The wall time of a run, divided among what it was spent on.

Paint the stretches that are known, a layer for each degree of certainty; what is seen from above
has neither gaps nor overlaps, so that the parts are never negative and add up to the whole.
Times are seconds since the epoch, durations seconds.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from itertools import pairwise

from training.recovery.rungs import RUNGS, Rung

Key = tuple[int, int]


class Owner(StrEnum):
    """What a stretch of the wall time was spent on; recoveries are in `RECOVERY`, by rung."""

    PRODUCTIVE = "productive_step"
    REDONE = "redone_step"
    SAVE = "save_block"
    DETECTION = "detection"
    START_UP = "start_up"
    WAITING = "waiting_for_resources"
    PAUSED = "paused"
    ENDING = "ending"
    COMMAND = "command"
    UNSUPERVISED = "unsupervised"
    UNKNOWN = "unknown"


# Of each rung; stop has none of its own.
RECOVERY: Mapping[Rung, str] = {
    rung: f"recovery_{rung}" if row.spent_on else Owner.ENDING for rung, row in RUNGS.items()
}

# Every owner, in the order in which they are listed.
MEANING: Mapping[str, str] = {
    Owner.PRODUCTIVE: "steps that were kept",
    Owner.REDONE: "steps that were lost and done again, and steps that a fault cut short",
    Owner.SAVE: "training stopped between two steps: saves and snapshots",
    Owner.DETECTION: "from a fault, or the last sign of progress, to its notice",
    **{RECOVERY[rung]: f"recovery: {row.spent_on}" for rung, row in RUNGS.items() if row.spent_on},
    Owner.START_UP: "from a start by hand to the first step: data, placement, processes, restore",
    Owner.WAITING: "no healthy node was free",
    Owner.PAUSED: "every rank was paused on request",
    Owner.ENDING: "from the last step to the end: the last save, processes and containers",
    Owner.COMMAND: "a command ran, whose steps are not known",
    Owner.UNSUPERVISED: "the run had ended, or nothing supervised it and nothing trained",
    Owner.UNKNOWN: "since the last record: the next one will show what it is",
}


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of time with one owner; `attempt` is the newest one begun, (0, 0) before any."""

    from_s: float
    to_s: float
    owner: str
    attempt: Key

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.to_s - self.from_s


@dataclass(frozen=True, slots=True)
class Account:
    """The wall time of a run from its creation to its end, or to now, without gaps."""

    stretches: tuple[Stretch, ...]

    @property
    def wall_s(self) -> float:
        """From the run's creation to its end."""
        return self.stretches[-1].to_s - self.stretches[0].from_s if self.stretches else 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """What every owner has, in the order of owners."""
        found = dict.fromkeys(map(str, MEANING), 0.0)
        for stretch in self.stretches:
            found[stretch.owner] += stretch.seconds
        return found

    @property
    def ettr(self) -> float:
        """Time on steps that were kept over wall time, 0 to 1."""
        return self.seconds[Owner.PRODUCTIVE] / self.wall_s if self.wall_s > 0 else 0.0


class Layer(IntEnum):
    """What is painted over what."""

    NOTHING = 0
    PHASE = 1
    UNSUPERVISED = 2
    WAITING = 3
    AROUND = 4  # a recovery inside the processes
    STEP = 5
    IN_STEP = 6
    PAUSE = 7
    RECOVERY = 8


@dataclass(slots=True)
class Canvas:
    """Paint between two moments; what lies outside is cut off."""

    from_s: float
    to_s: float
    _strokes: list[tuple[float, float, int, str]] = field(default_factory=list)

    def paint(self, layer: Layer, owner: str, from_s: float, to_s: float) -> None:
        """Nothing, when it would end before it begins."""
        from_s, to_s = max(from_s, self.from_s), min(to_s, self.to_s)
        if from_s < to_s:
            self._strokes.append((from_s, to_s, layer, owner))

    def stretches(self, starts: Sequence[tuple[float, Key]]) -> Iterator[Stretch]:
        """What is seen from above, neighbours of one owner and attempt as one."""
        began = sorted((max(at_s, self.from_s), key) for at_s, key in starts)
        moments, keys = [at_s for at_s, _ in began], [key for _, key in began]
        open_: Stretch | None = None
        for from_s, to_s, owner in self._pieces([m for m in moments if m < self.to_s]):
            index = bisect_right(moments, from_s)
            key = keys[index - 1] if index else (0, 0)
            if open_ is not None and (open_.owner, open_.attempt) == (owner, key):
                open_ = Stretch(open_.from_s, to_s, owner, key)
                continue
            if open_ is not None:
                yield open_
            open_ = Stretch(from_s, to_s, owner, key)
        if open_ is not None:
            yield open_

    def _pieces(self, moments: Iterable[float]) -> Iterator[tuple[float, float, str]]:
        strokes = sorted(self._strokes, key=lambda stroke: stroke[0])
        edges = {edge for stroke in strokes for edge in stroke[:2]} | set(moments)
        above: list[tuple[int, int, float, str]] = []
        newest = 0
        for from_s, to_s in pairwise(sorted(edges)):
            while newest < len(strokes) and strokes[newest][0] <= from_s:
                _, until_s, layer, owner = strokes[newest]
                # Of one layer what began last is seen.
                heapq.heappush(above, (-layer, -newest, until_s, owner))
                newest += 1
            while above[0][2] <= from_s:
                heapq.heappop(above)
            yield from_s, to_s, above[0][3]
