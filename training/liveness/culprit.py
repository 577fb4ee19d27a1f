"""The rank that holds the others up in a hang, from the progress of each. Pure.

Ranks of one step go through the same collectives in the same order. A rank that waits in a
collective has entered it; the others wait for the rank that has entered fewer, or is in none.
Times are seconds, steps completed optimizer steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from perdure.training.wire.rank_snapshot import RankSnapshot

MAX_NAMED = 16
STOPPED = frozenset({"T", "t"})


@dataclass(frozen=True, slots=True)
class Standstill:
    """A hang, by the progress of all ranks together.

    Attributes:
        missing: ranks that the others wait for; empty when no rank differs.
        line: evidence in words.
        ranks: what every rank is doing, a line for each group.
    """

    missing: tuple[RankSnapshot, ...]
    line: str
    ranks: tuple[str, ...]


def find_standstill(ranks: Sequence[RankSnapshot]) -> Standstill | None:
    """Find the ranks that the others wait for; None without any rank."""
    if not ranks:
        return None
    missing = _missing(ranks)
    return Standstill(missing, _line(ranks, missing), tuple(_grouped(ranks)))


def _missing(ranks: Sequence[RankSnapshot]) -> tuple[RankSnapshot, ...]:
    stopped = [rank for rank in ranks if rank.process_state in STOPPED]
    if stopped and not all(rank.counts_collectives for rank in ranks):
        return tuple(stopped)
    ranks = [rank for rank in ranks if rank.phase]
    waiting = [rank for rank in ranks if rank.is_waiting]
    absent = [rank for rank in ranks if not rank.is_waiting]
    if stopped:
        missing: Sequence[RankSnapshot] = stopped
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
        # No rank is in a collective: the rank that stopped first may hold the others up elsewhere.
        longest_s = max(rank.silent_s for rank in ranks)
        missing = [rank for rank in ranks if rank.silent_s == longest_s]
    return tuple(missing) if len(missing) < len(ranks) or len(ranks) == 1 else ()


def _line(ranks: Sequence[RankSnapshot], missing: Sequence[RankSnapshot]) -> str:
    if not missing:
        inside = [rank for rank in ranks if rank.is_waiting]
        if len(inside) == len(ranks):
            if len({rank.operation for rank in inside}) > 1:
                groups = "; ".join(_grouped(inside))
                return f"all {len(ranks)} ranks wait, but not in the same collective: {groups}"
            operation = inside[0].operation or "a collective"
            return f"all {len(ranks)} ranks wait in {operation}: a link or a device between them"
        phases = ", ".join(sorted({rank.phase for rank in ranks if rank.phase}))
        if not phases:
            return "no rank writes a heartbeat"
        return f"all {len(ranks)} ranks are in phase {phases}"
    culprits = ", ".join(
        f"rank {rank.rank} on {rank.node}: {_describe(rank)}" for rank in missing[:MAX_NAMED]
    )
    names = {rank.rank for rank in missing}
    waiting = [rank for rank in ranks if rank.is_waiting and rank.rank not in names]
    if not waiting:
        return culprits
    return (
        f"{culprits}; {_names([rank.rank for rank in waiting])}: waiting in {waiting[0].operation}"
    )


def _describe(rank: RankSnapshot) -> str:
    is_stopped = rank.process_state in STOPPED
    if not is_stopped and not rank.phase:
        return "without a heartbeat"
    if is_stopped:
        text = f"stopped by a signal (state {rank.process_state})"
        if not rank.phase:
            return text
    elif rank.is_waiting:
        text = f"waiting in {rank.operation or 'a collective'}"
    elif rank.counts_collectives:
        text = f"in no collective, phase {rank.phase}"
    else:
        return f"in phase {rank.phase} after step {rank.step}"
    is_counted = rank.counts_collectives or rank.is_waiting
    entered = f"{rank.entered} entered " if is_counted else ""
    return f"{text}, {entered}after step {rank.step}"


def _grouped(ranks: Sequence[RankSnapshot]) -> Iterator[str]:
    """Write a line for each different text, so that thousands of ranks stay readable."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(_describe(rank), []).append(rank.rank)
    for text, members in groups.items():
        yield f"{_names(members)}: {text}"


def _names(ranks: Collection[int]) -> str:
    """Name ranks as in `ranks 0 to 3, 7`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    names = [str(s[0]) if len(s) == 1 else f"{s[0]} to {s[1]}" for s in spans[:MAX_NAMED]]
    more = f" and {len(spans) - MAX_NAMED} more spans" if len(spans) > MAX_NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(names)}{more}"
