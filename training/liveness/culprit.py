"""Which rank holds the others up, from the progress of each. Pure.

Ranks of one step go through the same collectives in the same order. A rank that waits in one has
entered it; the others wait for the rank that has entered fewer, or that is in none.
Times are seconds, steps completed optimizer steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

MAX_NAMED = 16
STOPPED = frozenset({"T", "t"})


@dataclass(frozen=True, slots=True)
class RankProgress:
    """How far one rank has come.

    Attributes:
        phase: of its heartbeat; empty where it writes none.
        entered: collectives of the step that it has entered.
        left: those of them that have come to their end.
        operation: the newest one.
        silent_s: since its heartbeat was last written.
        process_state: the kernel's letter.
        counts_collectives: whether its program writes them down; a command's need not.
    """

    rank: int
    node: str
    device: int | None
    step: int
    phase: str
    entered: int
    left: int
    operation: str
    silent_s: float
    process_state: str = ""
    counts_collectives: bool = True

    @property
    def waits(self) -> bool:
        """Whether it is in a collective."""
        return self.left < self.entered

    @property
    def text(self) -> str:
        """For the report."""
        if self.process_state in STOPPED:
            where = f"stopped by a signal (state {self.process_state})"
        elif not self.phase:
            return "without a heartbeat"
        elif self.waits:
            where = f"waiting in {self.operation or 'a collective'}"
        elif self.counts_collectives:
            where = f"in no collective, phase {self.phase}"
        else:
            return f"in phase {self.phase} after step {self.step}"
        if not self.phase:
            return where
        entered = f"{self.entered} entered " if self.counts_collectives or self.waits else ""
        return f"{where}, {entered}after step {self.step}"


@dataclass(frozen=True, slots=True)
class Standstill:
    """What the progress of all ranks shows together.

    Attributes:
        missing: ranks that the others wait for; empty when no rank differs.
        line: for the evidence.
        ranks: what every rank is doing, a line for each group.
    """

    missing: tuple[RankProgress, ...]
    line: str
    ranks: tuple[str, ...]


def find_standstill(ranks: Sequence[RankProgress]) -> Standstill | None:
    """Find the ranks that the others wait for; None without any rank."""
    if not ranks:
        return None
    missing = _missing(ranks)
    return Standstill(missing, _line(ranks, missing), tuple(_grouped(ranks)))


def _missing(ranks: Sequence[RankProgress]) -> tuple[RankProgress, ...]:
    stopped = [rank for rank in ranks if rank.process_state in STOPPED]
    if stopped and not all(rank.counts_collectives for rank in ranks):
        return tuple(stopped)
    ranks = [rank for rank in ranks if rank.phase]
    waiting = [rank for rank in ranks if rank.waits]
    absent = [rank for rank in ranks if not rank.waits]
    if stopped:
        missing: Sequence[RankProgress] = stopped
    elif not ranks:
        return ()
    elif not waiting and not all(rank.counts_collectives for rank in ranks):
        first_step = min(rank.step for rank in ranks)
        missing = [rank for rank in ranks if rank.step == first_step]
    elif waiting and absent:
        missing = absent
    elif waiting:
        first = min((rank.step, rank.entered) for rank in ranks)
        missing = [rank for rank in ranks if (rank.step, rank.entered) == first]
    else:
        # No rank is in a collective: the one that stopped first may hold the others up elsewhere.
        longest_s = max(rank.silent_s for rank in ranks)
        missing = [rank for rank in ranks if rank.silent_s == longest_s]
    return tuple(missing) if len(missing) < len(ranks) or len(ranks) == 1 else ()


def _line(ranks: Sequence[RankProgress], missing: Sequence[RankProgress]) -> str:
    if not missing:
        inside = [rank for rank in ranks if rank.waits]
        if len(inside) == len(ranks):
            operation = inside[0].operation or "a collective"
            return f"all {len(ranks)} ranks wait in {operation}: a link or a device between them"
        phases = ", ".join(sorted({rank.phase for rank in ranks if rank.phase}))
        if not phases:
            return "no rank writes a heartbeat"
        return f"all {len(ranks)} ranks are in phase {phases}"
    culprits = ", ".join(
        f"rank {rank.rank} on {rank.node}: {rank.text}" for rank in missing[:MAX_NAMED]
    )
    names = {rank.rank for rank in missing}
    waiting = [rank for rank in ranks if rank.waits and rank.rank not in names]
    if not waiting:
        return culprits
    return (
        f"{culprits}; {_names([rank.rank for rank in waiting])}: waiting in {waiting[0].operation}"
    )


def _grouped(ranks: Sequence[RankProgress]) -> Iterator[str]:
    """One line for each different text, so that thousands of ranks stay readable."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(rank.text, []).append(rank.rank)
    for text, members in groups.items():
        yield f"{_names(members)}: {text}"


def _names(ranks: Collection[int]) -> str:
    """`ranks 0 to 3, 7`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    names = [str(s[0]) if len(s) == 1 else f"{s[0]} to {s[1]}" for s in spans[:MAX_NAMED]]
    more = f" and {len(spans) - MAX_NAMED} more spans" if len(spans) > MAX_NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(names)}{more}"
