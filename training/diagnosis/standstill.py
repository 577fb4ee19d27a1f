"""Which rank holds the others up, from where each of them stands. Pure.

Ranks of one step go through the same collectives in the same order. Who waits in one has
entered it; who has entered fewer, or stands outside of all, is whom the others wait for.
Times are seconds, steps completed optimizer steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

MAX_NAMED = 16
STOPPED = frozenset({"T", "t"})


@dataclass(frozen=True, slots=True)
class Stand:
    """Where one rank stands.

    Attributes:
        phase: of its heartbeat.
        entered: collectives of the step that it has entered.
        left: those of them that have come to their end.
        operation: the newest one.
        silent_s: since its heartbeat was last written.
        process_state: the kernel's letter.
    """

    rank: int
    node: str
    device: int
    step: int
    phase: str
    entered: int
    left: int
    operation: str
    silent_s: float
    process_state: str = ""

    @property
    def waits(self) -> bool:
        """Whether it is in a collective."""
        return self.left < self.entered

    @property
    def told(self) -> str:
        """For a person."""
        if self.process_state in STOPPED:
            where = f"stopped by a signal (state {self.process_state})"
        elif self.waits:
            where = f"waiting in {self.operation or 'a collective'}"
        else:
            where = f"in no collective, phase {self.phase}"
        return f"{where}, {self.entered} entered after step {self.step}"


@dataclass(frozen=True, slots=True)
class Standstill:
    """What the stands of all ranks say together.

    Attributes:
        missing: ranks that the others wait for; empty when none stands out.
        line: for the evidence.
        ranks: where everybody stands, in groups, a line each.
    """

    missing: tuple[Stand, ...]
    line: str
    ranks: tuple[str, ...]


def holding_up(stands: Sequence[Stand]) -> Standstill | None:
    """Find the ranks that are missing; None without any stand."""
    if not stands:
        return None
    missing = _missing(stands)
    return Standstill(missing, _line(stands, missing), tuple(_grouped(stands)))


def _missing(stands: Sequence[Stand]) -> tuple[Stand, ...]:
    stopped = [one for one in stands if one.process_state in STOPPED]
    waiting = [one for one in stands if one.waits]
    absent = [one for one in stands if not one.waits]
    if stopped:
        found: Sequence[Stand] = stopped
    elif waiting and absent:
        found = absent
    elif waiting:
        first = min((one.step, one.entered) for one in stands)
        found = [one for one in stands if (one.step, one.entered) == first]
    else:
        # NoHook waits for anybody: the one that stopped first may hold the others up elsewhere.
        longest_s = max(one.silent_s for one in stands)
        found = [one for one in stands if one.silent_s == longest_s]
    return tuple(found) if len(found) < len(stands) or len(stands) == 1 else ()


def _line(stands: Sequence[Stand], missing: Sequence[Stand]) -> str:
    if not missing:
        inside = [one for one in stands if one.waits]
        if len(inside) == len(stands):
            what = inside[0].operation or "a collective"
            return f"all {len(stands)} ranks wait in {what}: a link or a device between them"
        return f"all {len(stands)} ranks stand in phase {stands[0].phase}"
    who = ", ".join(f"rank {one.rank} on {one.node}: {one.told}" for one in missing[:MAX_NAMED])
    names = {one.rank for one in missing}
    others = [one for one in stands if one.waits and one.rank not in names]
    if not others:
        return who
    return f"{who}; {_names([one.rank for one in others])}: waiting in {others[0].operation}"


def _grouped(stands: Sequence[Stand]) -> Iterator[str]:
    """One line for each different stand, so that thousands of ranks stay readable."""
    groups: dict[str, list[int]] = {}
    for one in stands:
        groups.setdefault(one.told, []).append(one.rank)
    for told, ranks in groups.items():
        yield f"{_names(ranks)}: {told}"


def _names(ranks: Collection[int]) -> str:
    """`ranks 0 to 3, 7`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    told = [str(s[0]) if len(s) == 1 else f"{s[0]} to {s[1]}" for s in spans[:MAX_NAMED]]
    more = f" and {len(spans) - MAX_NAMED} more spans" if len(spans) > MAX_NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(told)}{more}"
