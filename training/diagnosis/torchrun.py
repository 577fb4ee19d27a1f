"""Which rank failed first, by the summary that torchrun prints at last. Pure.

torchrun has one output for all ranks of a node, and names the failures of that node. Its times are
whole seconds: peers of a rank that was killed fail in the same one.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

_ROOT = "Root Cause (first observed failure)"
_ENTRY = re.compile(
    r"\btime +: (\S+)[^\n]*\n[^\n]*\bhost +: [^\n]*\n"
    r"[^\n]*\brank +: (\d+) \(local_rank: (\d+)\)[^\n]*\n[^\n]*\bexitcode +: (-?\d+)"
)
# What torchrun sends to the others, and how communication libraries end when a peer is gone.
_ECHOES = frozenset({-signal.SIGTERM, -signal.SIGABRT})


@dataclass(frozen=True, slots=True)
class FailedRank:
    """An entry of the summary.

    Attributes:
        time: as it is printed, in whole seconds.
        exit_code: negative for a signal.
    """

    time: str
    rank: int
    local_rank: int
    exit_code: int

    @property
    def is_killed(self) -> bool:
        """Whether a signal ended it that is no answer to the end of another rank."""
        return self.exit_code < 0 and self.exit_code not in _ECHOES


def first_failed(text: str) -> FailedRank | None:
    """The rank that failed first; None where the output does not tell it from others.

    Args:
        text: the end of the output of a node's launcher.
    """
    place = text.rfind(_ROOT)
    if place < 0:
        return None
    begin = max(0, text.rfind("Failures:", 0, place))
    root = _ENTRY.search(text, place)
    if root is None:
        return None
    entries = [_entry(found) for found in _ENTRY.finditer(text, begin)]
    first = [one for one in entries if one.time == _entry(root).time]
    killed = [one for one in first if one.is_killed]
    candidates = killed or first
    return candidates[0] if len(candidates) == 1 else None


def _entry(found: re.Match[str]) -> FailedRank:
    time, rank, local_rank, exit_code = found.groups()
    return FailedRank(time, int(rank), int(local_rank), int(exit_code))
